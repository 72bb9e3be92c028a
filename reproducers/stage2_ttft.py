"""Time to first token by prefix length: vanilla, cache rebuild, shared prefix.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
at 2,048 tokens 1530 ms, 84 ms (18.3x), 30 ms (50.6x); crossover of rebuild and shared near 512.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/stage2_ttft.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("ttft", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
