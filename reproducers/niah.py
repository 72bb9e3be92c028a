"""A needle is found by every lane, and by 8 blocks of 64 at 64K tokens.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
100% at 64K on Gemma-4-E2B-4bit; over the wire the magic numbers vanilla finds (Llama-3.2-1B).
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/niah.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("niah", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
