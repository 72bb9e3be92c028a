"""Many queries a head in one request: 32.9 times sooner; a demoted prefix comes back.

Expected (design document, Apple Silicon): 22.9 ms against 754 ms at Llama-3.2-3B's shape (32.9x);
KV.PREFIX.WARM 50 to 200 ms.
Hardware: a Mac with Apple Silicon for these times; sizes and agreement are the same anywhere.

    python reproducers/batched_query.py
"""

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("batched_query")
