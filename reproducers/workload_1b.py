"""The headline workload: 89.2% less time to first token, 9.2 times the throughput.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon):
846 ms cold, 91 ms warm, 89.2% (9.26x), throughput 9.20x, first token 50/50, hit rate 96.7%.
Hardware: a Mac with Apple Silicon for these figures; anywhere the small model on the CPU, and what
does not depend on speed is the same there.

    python reproducers/workload_1b.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

from evals.reproduce import reproduce

if __name__ == "__main__":
    reproduce("workload", __doc__, "mlx-community/Llama-3.2-1B-Instruct-4bit")
