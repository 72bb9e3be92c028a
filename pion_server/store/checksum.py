"""CRC32C over any buffer; google-crc32c takes `bytes` only, others pass in small pieces."""

from __future__ import annotations

from google_crc32c import extend as _extend

from pion_server.payload import Buffer

_PIECE = 1 << 17


def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC32C of `data`, continuing from `crc`."""
    if isinstance(data, bytes):
        return int(_extend(crc, data))
    view = memoryview(data).cast("B")
    for at in range(0, len(view), _PIECE):
        crc = _extend(crc, bytes(view[at : at + _PIECE]))
    return int(crc)
