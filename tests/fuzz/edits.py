"""Bytes from a fuzzer as changes to something valid: what is checksummed is not met by chance."""

from __future__ import annotations

import struct

_EDIT = struct.Struct("<HBB")


def edited(base: bytes, data: bytes) -> bytes:
    """`base` after the edits in `data`, four bytes each: position, what to do, a byte for it."""
    result = bytearray(base)
    for at in range(0, len(data) - _EDIT.size + 1, _EDIT.size):
        position, action, byte = _EDIT.unpack_from(data, at)
        position %= len(result) + 1
        match action % 5:
            case 0:
                result[position : position + 1] = bytes((byte,))
            case 1:
                result.insert(position, byte)
            case 2:
                del result[position : position + byte]
            case 3:
                result[position:position] = result[: byte + 1]
            case 4:
                del result[position:]
    return bytes(result)
