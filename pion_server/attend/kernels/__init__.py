"""Metal kernels of our own, offered as `pion_server.attend.operations.Operations`.

The sources are the `.metal` files beside this one; `sources` puts them together, `provider` fits
them to the operations and proves them on first use. Where this MLX has no Metal, importing is
harmless and every call raises: ask `available` first.
"""

from __future__ import annotations

from pion_server.attend.kernels.provider import Disagreement, kernel_operations, self_check
from pion_server.attend.kernels.sources import Kernel, Kind, Operands, available, select

__all__ = [
    "Disagreement",
    "Kernel",
    "Kind",
    "Operands",
    "available",
    "kernel_operations",
    "select",
    "self_check",
]
