"""The headline workload on 3B: 86.6% less time to first token.

Expected (design document, Llama-3.2-3B-Instruct-4bit, Apple Silicon):
2075 ms cold, 278 ms warm, 86.6% (7.47x), throughput 7.46x, first token 50/50.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/workload_3b.py [--model mlx-community/Llama-3.2-3B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("workload", __doc__, "mlx-community/Llama-3.2-3B-Instruct-4bit")
