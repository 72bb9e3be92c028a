"""The five kernels, put together from a few pieces of Metal source.

Every kernel is `open`, a walk over the prefix (`dense` or `listed`), perhaps one over the suffix,
and `close`; `softmax` is what they share. Dimension, rows a threadgroup and simdgroups a
threadgroup are template arguments, so eight head dimensions and two dtypes need no further source.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

import mlx.core as mx

DIMS = (32, 64, 96, 128, 160, 192, 256, 512)
DTYPES = {mx.float32: "fp32", mx.float16: "fp16"}

SIMD_WIDTH = 32
# Threadgroups wanted to keep a GPU busy, and keys that make one worth its start. Neither could be
# measured yet.
_BUSY = 64
_WORTH = 1024
# Floats of threadgroup memory in which simdgroups meet: half of the 32 KiB every Apple GPU has.
_MEETING = 4096


class Kind(enum.StrEnum):
    """A kernel by the name the design gives it."""

    Q1 = "sdpa_q1"
    BATCHED_Q = "sdpa_batched_q"
    BATCHED_Q_FUSED = "sdpa_batched_q_fused"
    Q1_SPARSE = "sdpa_q1_sparse"
    Q1_SPARSE_FUSED = "sdpa_q1_sparse_fused"

    @property
    def listed(self) -> bool:
        """Whether it sees listed tokens of the prefix only."""
        return self in (Kind.Q1_SPARSE, Kind.Q1_SPARSE_FUSED)

    @property
    def fused(self) -> bool:
        """Whether it sees a suffix too."""
        return self in (Kind.BATCHED_Q_FUSED, Kind.Q1_SPARSE_FUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What one call works on.

    `q` [H_q][M][D] float32; `k`, `v` [H_kv][N][D] float32 or float16; `head_map` [H_q] int32, the
    kv head of each query head; `first` the first prefix token that may be seen. Listed kernels see
    the tokens `indices[h][:counts[h]]` ([H_q][T] and [H_q] int32, or [1][T] and [1] for all heads;
    what is outside of first..N-1 is skipped, what is there twice counts twice). Fused kernels see a
    suffix [H_kv][S][D] float32 as well: query m its positions 0..max(S - M, 0) + m.
    """

    q: mx.array
    k: mx.array
    v: mx.array
    head_map: mx.array
    first: int = 0
    indices: mx.array | None = None
    counts: mx.array | None = None
    suffix_k: mx.array | None = None
    suffix_v: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel for one head dimension and one dtype of K and V.

    Calling it returns the output [H_q][M][D] and the natural log-sum-exp [H_q][M] of the scaled
    scores, float32, lazily. A row that sees no token is 0, its log-sum-exp -inf.
    """

    kind: Kind
    dim: int
    dtype: mx.Dtype

    @property
    def function(self) -> Callable[..., list[mx.array]]:
        """What `mx.fast.metal_kernel` made; takes the arguments that `launch` names."""
        return _build(self.kind, self.dtype)

    def launch(self, operands: Operands) -> dict[str, Any]:
        """The arguments of one call, whose results are for `join`.

        Too few rows to keep a GPU busy: then the keys are cut in slices, each a row of its own.
        """
        heads, many, dim = operands.q.shape
        rows, groups = geometry(dim, many)
        threads = groups * SIMD_WIDTH
        tiles = -(-many // rows)
        slices = max(1, min(_BUSY // (tiles * heads), _keys(operands) // _WORTH))
        return {
            "inputs": _inputs(self.kind, operands, slices),
            "template": [("T", self.dtype), ("D", dim), ("ROWS", rows), ("GROUPS", groups)],
            "grid": (threads * tiles, heads, slices),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [(slices, heads, many, dim), (slices, heads, many)],
            "output_dtypes": [mx.float32, mx.float32],
        }

    def __call__(self, operands: Operands) -> tuple[mx.array, mx.array]:
        return join(*self.function(**self.launch(operands)))


def available() -> bool:
    """Whether this MLX runs Metal kernels."""
    return bool(mx.metal.is_available())


def select(kind: Kind, dim: int, dtype: mx.Dtype) -> Kernel | None:
    """The kernel for K and V of that dimension and dtype; None if there is none."""
    if dim not in DIMS or dtype not in DTYPES:
        return None
    return Kernel(kind, dim, dtype)


def join(out: mx.array, lse: mx.array) -> tuple[mx.array, mx.array]:
    """One result of those for slices of the keys: [Z][H][M][D] and [Z][H][M] without the Z."""
    if len(out) == 1:
        return out[0], lse[0]
    top = mx.max(lse, axis=0)
    # Where no slice saw a key: inf - inf is to be 0 in the end, as it is for one slice.
    weights = mx.exp(lse - mx.where(top == -mx.inf, 0.0, top))
    total = mx.sum(weights, axis=0)
    joined = mx.sum(out * weights[..., None], axis=0) / mx.where(total == 0, 1.0, total)[..., None]
    return joined, top + mx.log(total)


def geometry(dim: int, many: int) -> tuple[int, int]:
    """Query rows and simdgroups of a threadgroup, for M = `many` rows a head.

    One row: as many simdgroups as meet in threadgroup memory, to hide latency. More: rows share
    what is read of K and V; a lane keeps 2 * rows * dim / 32 floats, bounded for the sake of
    registers, and there are fewer simdgroups, since registers bound the threads as well.
    """
    if many == 1:
        return 1, min(SIMD_WIDTH, 1 << (_MEETING // dim).bit_length() - 1)
    return 1 << min(3, (16 * SIMD_WIDTH // dim).bit_length() - 1), 8


def input_names(kind: Kind) -> list[str]:
    """The kernel's inputs, in the order it takes them."""
    names = ["q", "k", "v", "head_map", "sizes", "scale"]
    names += ["indices", "counts"] if kind.listed else []
    names += ["suffix_k", "suffix_v"] if kind.fused else []
    return names


def source(kind: Kind) -> str:
    """The kernel's body."""
    walks = ["listed" if kind.listed else "dense", *(["suffix"] if kind.fused else [])]
    return "".join(piece(name) for name in ("open", *walks, "close"))


@functools.cache
def piece(name: str) -> str:
    """One `.metal` file."""
    return (files(__package__) / f"{name}.metal").read_text(encoding="utf-8")


@functools.cache
def _build(kind: Kind, dtype: mx.Dtype) -> Callable[..., list[mx.array]]:
    function = mx.fast.metal_kernel(
        name=f"pion_{kind}_{DTYPES[dtype]}",
        input_names=input_names(kind),
        output_names=["out", "lse"],
        header=piece("softmax"),
        source=source(kind),
    )
    return cast(Callable[..., list[mx.array]], function)


def _keys(operands: Operands) -> int:
    """At most as many keys as a row sees."""
    suffix = operands.suffix_k.shape[1] if operands.suffix_k is not None else 0
    if operands.indices is not None:
        return operands.indices.shape[1] + suffix
    return operands.k.shape[1] - operands.first + suffix


def _inputs(kind: Kind, operands: Operands, slices: int) -> list[mx.array]:
    suffix = operands.suffix_k.shape[1] if operands.suffix_k is not None else 0
    arrays = {
        "q": operands.q,
        "k": operands.k,
        "v": operands.v,
        "head_map": operands.head_map,
        "sizes": mx.array([operands.first, suffix, slices], mx.int32),
        "scale": mx.array(operands.q.shape[-1] ** -0.5, mx.float32),
        "indices": operands.indices,
        "counts": operands.counts,
        "suffix_k": operands.suffix_k,
        "suffix_v": operands.suffix_v,
    }
    if not suffix:
        # An empty array has no buffer to bind; these rows are never read.
        unread = mx.zeros((operands.k.shape[0], 1, operands.k.shape[2]), mx.float32)
        arrays |= {"suffix_k": unread, "suffix_v": unread}
    inputs = [arrays[name] for name in input_names(kind)]
    missing = [name for name in input_names(kind) if arrays[name] is None]
    if missing:
        raise ValueError(f"{kind} needs {', '.join(missing)}")
    return [array for array in inputs if array is not None]
