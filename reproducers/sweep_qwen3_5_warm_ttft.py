"""A hybrid by prefix length: warm time to first token, tokens as vanilla.

Expected (design document, Qwen3.5-4B-MLX-4bit, Apple Silicon):
2,048 tokens 6,080 ms to 246 ms (24.77x, 18/18), 4,096 12,757 to 390 (32.7x, 16/18), 8,192 27,598 to
2,373 (11.6x, 18/18).
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/sweep_qwen3_5_warm_ttft.py [--model mlx-community/Qwen3.5-4B-MLX-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("hybrid", __doc__, "mlx-community/Qwen3.5-4B-MLX-4bit")
