"""Four bits in groups of 32 keep digits that groups of 64 lose; affine beats symmetric.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
groups of 64 recall "2430-04-22" for "2030-04-22"; affine 2.92 points better on K; 0.038 against
turbo4's 0.047 mean absolute error.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/mlx4g32_digits.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("formats", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
