"""640 bytes a token and side at D = 1,024 as mlx4g32, 2,048 as fp16: 3.2 times.

Expected (design document, Apple Silicon): 640 B against 2,048 B; 86,580 tokens of a 4B model in a
16 GB machine (fp16: 12.5 GB), which is those bytes times layers and sides.
Hardware: a Mac with Apple Silicon for these times; sizes and agreement are the same anywhere.

    python reproducers/format_sizes.py
"""

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("strict_numerics")
