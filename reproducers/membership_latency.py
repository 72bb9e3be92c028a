"""KV.PREFIX.MEMBERSHIP of 1,562 hashes in 1,562: 125 us p50.

Expected (design document, Apple Silicon): 125 us p50, 270 us p99, end to end over loopback.
Hardware: a Mac with Apple Silicon for these times; sizes and agreement are the same anywhere.

    python reproducers/membership_latency.py
"""

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("store_commands")
