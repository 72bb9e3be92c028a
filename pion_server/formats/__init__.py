"""Storage formats: how a row of numbers is kept, one file a format.

A module of this package registers its format by being there; the first question about formats
imports all of them, and numpy, without which a server can start. Nothing else is needed, so that a
client can decode PACKED rows as well as the server can.
"""

from __future__ import annotations

from pion_server.formats.base import CHUNK_VALUES, MAX_DIM, Format, InputType, Run
from pion_server.formats.registry import (
    format_by_tag,
    format_names,
    load_formats,
    make_format,
    register,
)

__all__ = [
    "CHUNK_VALUES",
    "MAX_DIM",
    "Format",
    "InputType",
    "Run",
    "format_by_tag",
    "format_names",
    "load_formats",
    "make_format",
    "register",
]
