"""A retrieved chunk's K/V is injected instead of its text: the same answer, sooner.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon, 3 cases): in process 100% of
tokens as text RAG and 55% (37 to 73%) less time to first token; from the server 46% (29 to 61%).
Hardware: a Mac with Apple Silicon for these times; the small model on a CPU anywhere, where one
chunk is as exact.

    python reproducers/stage0_hybrid_kv_injection.py [--model PATH_OR_ID] [--fraction 0.1]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("retrieval", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
