"""Storage formats: how a row of numbers is kept, one file a format.

Importing this package registers every format; two of the same name or tag fail here. It needs numpy
only, so that a client can decode PACKED rows as well as the server can.
"""

from __future__ import annotations

from pion_server.formats import (  # noqa: F401 - importing a format registers it
    bf16,
    bf16_rope_fp8_body,
    fp8,
    fp16,
    fp32,
    int8,
    mlx4g32,
    raw,
    turbo2,
    turbo3,
    turbo4,
)
from pion_server.formats.base import CHUNK_VALUES, MAX_DIM, Format, InputType, Run
from pion_server.formats.registry import format_by_tag, format_names, make_format, register

__all__ = [
    "CHUNK_VALUES",
    "MAX_DIM",
    "Format",
    "InputType",
    "Run",
    "format_by_tag",
    "format_names",
    "make_format",
    "register",
]
