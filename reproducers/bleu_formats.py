"""BLEU of the storage formats against standalone mlx-lm.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
fp16 0.969, first token 20/20, identical 17/20; turbo4 0.538, 18/20; int8 first token 95% or more.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/bleu_formats.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("bleu", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
