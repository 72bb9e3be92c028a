"""Metal kernels of our own: a provider of `pion_server.attend.operations.Operations`.

The sources are the `.metal` files beside this one, `sources` puts them together, `provider` fits
them to the five operations and proves them on first use. Where this MLX has no Metal, importing is
harmless and every call fails: ask `available` first.
"""

from __future__ import annotations

from pion_server.attend import portable
from pion_server.attend.kernels.provider import Disagreement, KernelOperations, self_check
from pion_server.attend.kernels.sources import Kernel, Kind, Operands, available, select

__all__ = [
    "Disagreement",
    "Kernel",
    "KernelOperations",
    "Kind",
    "Operands",
    "available",
    "query_fused",
    "query_many",
    "query_one",
    "query_sparse",
    "query_sparse_fused",
    "select",
    "self_check",
]

_proven = KernelOperations(portable)
query_one = _proven.query_one
query_many = _proven.query_many
query_fused = _proven.query_fused
query_sparse = _proven.query_sparse
query_sparse_fused = _proven.query_sparse_fused
