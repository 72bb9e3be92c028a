"""Conversions between f32 and the narrow floating-point types numpy lacks or must not warn about.

Each fills its second argument from its first, of the same shape, and rounds to nearest, ties to
even. bf16: the upper half of an f32. E4M3FN: sign, 4 bits of exponent (bias 7), 3 of mantissa, no
infinities, 0x7F is NaN, largest value 448 (OCP 8-bit Floating Point Specification, revision 1.0).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pion_server.formats.scratch import Scratch

F32Array: TypeAlias = NDArray[np.float32]
U16Array: TypeAlias = NDArray[np.uint16]
U8Array: TypeAlias = NDArray[np.uint8]

F16_MAX = 65504.0
F16_SMALLEST_NORMAL = 2.0**-14
F32_MAX = float(np.finfo(np.float32).max)
E4M3_MAX = 448.0


def narrow_to_f16(values: F32Array, words: NDArray[np.float16]) -> int:
    """f32 to f16; overflow becomes ±inf, NaN stays NaN. How many finite numbers overflowed."""
    # The processor notes an overflow by itself: looking for one would cost half as much again.
    try:
        with np.errstate(all="ignore", over="raise"):
            np.copyto(words, values, casting="unsafe")
    except FloatingPointError:
        with np.errstate(all="ignore"):
            np.copyto(words, values, casting="unsafe")
        return int(np.count_nonzero(np.isinf(words) & np.isfinite(values)))
    return 0


def narrow_to_bf16(values: F32Array, words: U16Array, scratch: Scratch) -> None:
    """f32 to bf16 words; overflow becomes ±inf, NaN stays NaN (widened bf16 with all its bits)."""
    bits = values.view(np.uint32)
    sums = scratch.array("bf16 sums", values.shape, np.uint32)
    # Adding half a unit, less one where the kept part is even, carries exactly when rounding up.
    np.right_shift(bits, 16, out=sums)
    sums &= 1
    sums += 0x7FFF
    sums += bits
    sums >>= 16
    np.copyto(words, sums, casting="unsafe")
    nan = np.isnan(values, out=scratch.array("bf16 nan", values.shape, np.bool_))
    if nan.any():
        kept = (bits[nan] >> 16).astype(np.uint16)
        kept[(kept & 0x7F) == 0] |= 0x40
        words[nan] = kept


def widen_bf16(words: U16Array, values: F32Array) -> None:
    """bf16 words to f32, exact for every bit pattern."""
    bits = values.view(np.uint32)
    np.copyto(bits, words)
    bits <<= 16


def narrow_to_e4m3(values: F32Array, codes: U8Array, scratch: Scratch) -> None:
    """Finite f32 to E4M3FN bytes; beyond ±448 saturates, -0.0 keeps its sign.

    Leaves in `values` the magnitudes that the bytes stand for.

    Adding 2^(e+20) to a magnitude in [2^e, 2^(e+1)) leaves a sum whose last bit is worth 2^(e-3):
    the adder itself rounds to 3 bits of mantissa, and the sum's low byte is the multiple k of
    2^(e-3), 8 to 16. The code is 8·(e+6) + k. With e held at -6 or more the same holds for
    subnormals, where k runs from 0 to 8.
    """
    words = scratch.array("e4m3 words", values.shape, np.uint32)
    narrow = scratch.array("e4m3 narrow", values.shape, np.uint8)
    sums = values.view(np.uint32)
    np.right_shift(sums, 24, out=words)
    words &= 0x80
    np.copyto(codes, words, casting="unsafe")

    np.clip(np.abs(values, out=values), 0.0, E4M3_MAX, out=values)
    np.bitwise_and(sums, 0x7F800000, out=words)
    np.maximum(words, np.uint32((127 - 6) << 23), out=words)
    words += 20 << 23
    values += words.view(np.float32)
    np.copyto(narrow, sums, casting="unsafe")
    codes |= narrow
    values -= words.view(np.float32)
    # The upper 12 bits of 2^(e+20) are 8·(e + 20 + 127), 8·141 too many: 104 modulo 256.
    words >>= 20
    np.copyto(narrow, words, casting="unsafe")
    narrow -= 104
    codes += narrow


def widen_e4m3(codes: U8Array, values: F32Array) -> None:
    """E4M3FN bytes to f32, exact; `values` is contiguous."""
    # No index can be out of range; "clip" only spares numpy's buffered, checked copy.
    _E4M3_VALUES.take(codes, out=values, mode="clip")


def _tabulate_e4m3() -> F32Array:
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    positive = np.where(exponent > 0, normal, mantissa * 2.0**-9).astype(np.float32)
    positive[127] = np.nan
    return np.concatenate([positive, -positive])


_E4M3_VALUES = _tabulate_e4m3()
