"""A second instance is served what the first stored: BLEU 1.0000.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
HIT before any local work, 50 greedy tokens identical, BLEU 1.0000.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/cross_instance.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("cross_instance", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
