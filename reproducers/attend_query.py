"""K and V are stored once, queries send Q only: 146 times less than sending all.

Expected (design document, Apple Silicon): 194 ms with everything on the wire, 1.33 ms a query
after one STORE (146x); native Metal 0.65 ms, at M=1 H=8 N=2048 D=128 0.441 ms against 0.489 ms of
bare MLX; cosine 1.0000.
Hardware: a Mac with Apple Silicon for these times; sizes and agreement are the same anywhere.

    python reproducers/attend_query.py
"""

from evals.reproduce import reproduce_bench

if __name__ == "__main__":
    reproduce_bench("attend")
