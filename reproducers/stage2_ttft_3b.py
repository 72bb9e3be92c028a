"""The same on 3B at 1,024 tokens.

Expected (design document, Llama-3.2-3B-Instruct-4bit, Apple Silicon):
1951 ms, 136.7 ms, 53.7 ms: 36.35x and 2.55x.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/stage2_ttft_3b.py [--model mlx-community/Llama-3.2-3B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("ttft", __doc__, "mlx-community/Llama-3.2-3B-Instruct-4bit")
