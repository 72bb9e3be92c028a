"""What the engine asks of whoever computes: operations as the design's kernels cut them, and one.

`portable` is one provider and serves every device MLX has; Metal kernels are another. All of them:
q, suffix tensors and results are float32, `k` and `v` `[H_kv][N][D]` float32 or float16, scale is
1/sqrt(D), the softmax subtracts the maximum and sums in float32 or better. `first` is the first
visible prefix token (a window hides those before it). Results may be lazy.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


class Operations(Protocol):
    """The six operations. A module of such functions is a provider too."""

    def query_one(self, q: mx.array, k: mx.array, v: mx.array, first: int) -> mx.array:
        """sdpa_q1: q [H][D], a kv head a query head → [H][D]."""

    def query_many(
        self, q: mx.array, k: mx.array, v: mx.array, first: int
    ) -> tuple[mx.array, mx.array]:
        """sdpa_batched_q: q [H][M][D] → output [H][M][D], log-sum-exp [H][M]."""

    def query_fused(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
        first: int,
    ) -> mx.array:
        """sdpa_batched_q_fused: q [H_q][M][D] over the prefix and a suffix [H_kv][S][D] → as q.

        Query m sees suffix positions 0..max(S - M, 0) + m. `head_map` [H_q]: kv head of each.
        """

    def decode(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
        window: int,
    ) -> mx.array:
        """q [H_q][M][D] stands at the last M positions of a suffix [H_kv][S >= M][D].

        Each sees prefix and suffix up to its own position, with `window` W > 0 the last W
        positions only. Answers [H_q][M][D + 1]: the output and, last, the log-sum-exp.
        """

    def query_sparse(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        tokens: NDArray[np.int32],
        counts: NDArray[np.int32],
    ) -> mx.array:
        """sdpa_q1_sparse: head h of q [H][D] sees `tokens[h][:counts[h]]` [H][T] → [H][D].

        Every token is within the prefix, also behind the count; a head that sees none gets 0.
        """

    def query_sparse_fused(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        tokens: NDArray[np.int32],
        suffix_k: mx.array,
        suffix_v: mx.array,
        head_map: NDArray[np.int32],
    ) -> mx.array:
        """sdpa_q1_sparse_fused: q [H_q][D] over `tokens` [T >= 1] and all of the suffix → as q."""
