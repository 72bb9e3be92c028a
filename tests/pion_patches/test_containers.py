"""Blobs of recurrent state: exact in every dtype, readable by others, never believed blindly."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pion_patches.containers import (
    deserialize_arrays_cache,
    pack_arrays,
    serialize_arrays_cache,
    unpack_arrays,
)
from pion_patches.pieces import ITEMSIZE, RebuildError, array_from, dtype_name, dtype_named
from pion_patches.safetensors_blob import read_safetensors, write_safetensors
from tests.pion_patches.positions import bits

KIND = "ArraysCache"
#: Bit patterns a conversion would change: a signalling NaN, -0.0, a NaN payload, the largest, tiny.
WORDS = {2: [0x7F81, 0x8000, 0xFFC1, 0x7F7F, 0x0001], 4: [0x7F800001, 0x80000000, 0xFFC12345, 1, 0]}


def words(dtype: mx.Dtype) -> mx.array:
    size = ITEMSIZE[dtype_name(mx.zeros((0,), dtype))]
    return mx.array(WORDS[size], dtype=mx.uint16 if size == 2 else mx.uint32).view(dtype)[None]


def sample(name: str) -> mx.array:
    return mx.array([[0, 1, 2], [3, 4, 5]]).astype(dtype_named(name))


def same(one: mx.array | None, other: mx.array | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def edited(blob: bytes, **changes: Any) -> bytes:
    """A safetensors file with a changed header; `name=None` takes an entry out."""
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    for name, entry in changes.items():
        header[name] = entry
        if entry is None:
            del header[name]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + blob[8 + length :]


@pytest.mark.parametrize("name", sorted(ITEMSIZE))
def test_every_dtype_round_trips(name: str) -> None:
    (array,) = unpack_arrays(KIND, pack_arrays(KIND, [sample(name)], 7), 7)
    assert same(array, sample(name))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_both_containers_keep_every_bit(dtype: mx.Dtype) -> None:
    """N03: NaN payloads and negative zero too."""
    source = [words(dtype), words(dtype).reshape(5, 1, 1)]
    assert all(map(same, unpack_arrays(KIND, pack_arrays(KIND, source, 7), 7), source))
    assert all(map(same, deserialize_arrays_cache(serialize_arrays_cache(source)), source))


def test_nones_and_empty_arrays_round_trip() -> None:
    """E12, C08."""
    source = [None, mx.zeros((1, 0, 4)), None, mx.ones((1, 2)), mx.zeros((0,), mx.bfloat16)]
    assert all(map(same, unpack_arrays(KIND, pack_arrays(KIND, source, 0), 0), source))
    assert unpack_arrays(KIND, pack_arrays(KIND, [None, None], 0), 0) == (None, None)
    assert unpack_arrays(KIND, pack_arrays(KIND, [], 0), 0) == ()
    source = [mx.zeros((1, 0, 4)), mx.zeros((0,), mx.float16)]
    assert all(map(same, deserialize_arrays_cache(serialize_arrays_cache(source)), source))


def test_views_are_packed_as_what_they_show() -> None:
    """E10."""
    base = mx.arange(24, dtype=mx.float32).reshape(2, 3, 4)
    views = [base.transpose(2, 0, 1), base[:, ::2], mx.broadcast_to(base[:, :1], (2, 3, 4))]
    assert all(map(same, unpack_arrays(KIND, pack_arrays(KIND, views, 1), 1), views))
    assert all(map(same, deserialize_arrays_cache(serialize_arrays_cache(views)), views))


def test_blob_is_a_safetensors_file_others_can_read(tmp_path: Path) -> None:
    """Names and metadata as WIRE.md section 8 has them."""
    blob = pack_arrays(KIND, [mx.arange(6, dtype=mx.float32).reshape(1, 6), None], 40)
    path = tmp_path / "state.safetensors"
    path.write_bytes(blob)
    loaded: Any = mx.load(str(path), return_metadata=True)
    tensors, metadata = loaded
    assert metadata["meta"] == "type=ArraysCache|narr=2"
    assert metadata["tokens"] == "40"
    assert list(tensors) == ["a0"]
    assert mx.array_equal(tensors["a0"], mx.arange(6)[None]).item()


def test_files_of_mlx_are_read(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    tensors = {"b": sample("bfloat16"), "a": sample("int64"), "empty": mx.zeros((0, 3))}
    mx.save_safetensors(str(path), tensors, {"made": "elsewhere"})
    found, metadata = read_safetensors(path.read_bytes())
    assert metadata["made"] == "elsewhere"
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_blob_of_another_class_token_count_or_slots_is_refused() -> None:
    """C09, C15: whose state it is, and at which token, stands in the blob."""
    blob = pack_arrays(KIND, [mx.ones((1, 2)), None], 40)
    for kind, tokens in (("RotatingKVCache", 40), (KIND, 39), (KIND, 41)):
        with pytest.raises(RebuildError):
            unpack_arrays(kind, blob, tokens)
    good = {"meta": "type=ArraysCache|narr=2", "tokens": "40", "none": "1"}
    assert unpack_arrays(KIND, edited(blob, __metadata__=good), 40)[1] is None
    for lie in (
        {"meta": "type=ArraysCache|narr=1"},
        {"meta": "type=ArraysCache|narr=3"},
        {"meta": "ArraysCache"},
        {"none": ""},
        {"none": "0,1"},
        {"none": "1,7"},
        {"tokens": "040"},
    ):
        with pytest.raises(RebuildError):
            unpack_arrays(KIND, edited(blob, __metadata__=good | lie), 40)
    with pytest.raises(RebuildError):
        unpack_arrays(KIND, edited(blob, __metadata__=None), 40)


@pytest.mark.parametrize("entry", [
    {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 12]},
    {"dtype": "F32", "shape": [1, 2], "data_offsets": [4, 12]},
    {"dtype": "F32", "shape": [1, 3], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1, 1 << 40], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1, 2.0], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1] * 20 + [2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [2], "data_offsets": [0]},
    {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
    {"dtype": "F16", "shape": [1, 2], "data_offsets": [0, 4]},
    {"dtype": "F8", "shape": [1, 8], "data_offsets": [0, 8]},
    {"dtype": 5, "shape": [1, 2], "data_offsets": [0, 8]},
    {"dtype": "F32", "shape": [1, 2], "data_offsets": [0, 8], "more": 1},
    {"dtype": "F32", "shape": [1, 2]},
    None,
    7,
])  # fmt: skip
def test_header_that_lies_is_refused(entry: Any) -> None:
    """E18: beyond the end, overlapping, another size than its shape, unknown, missing."""
    blob = pack_arrays(KIND, [mx.ones((1, 2))], 3)
    with pytest.raises(RebuildError):
        unpack_arrays(KIND, edited(blob, a0=entry), 3)


@pytest.mark.parametrize("blob", [
    b"", b"\0", b"\0" * 8, b"\xff" * 8, (1 << 63).to_bytes(8, "little") + b"{}",
    (2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"{",
    (100).to_bytes(8, "little") + b"{}", (200).to_bytes(8, "little") + b"[" * 200,
    (21).to_bytes(8, "little") + b'{"__metadata__":[1]}',
    (40).to_bytes(8, "little") + b'{"__metadata__":{"meta":1}}             ',
    (30).to_bytes(8, "little") + b'{"a0":{},"a0":{}}             ',
])  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(blob: bytes) -> None:
    """E18: truncated, header-only and absurd files."""
    with pytest.raises(RebuildError):
        unpack_arrays(KIND, blob, 1)


def test_truncated_and_lengthened_blobs_are_refused() -> None:
    """E18."""
    ours = pack_arrays(KIND, [mx.ones((1, 2)), mx.ones((1, 3))], 3)
    reference = serialize_arrays_cache([mx.ones((1, 2)), mx.ones((1, 3))])
    for cut_off in range(1, len(ours)):
        with pytest.raises(RebuildError):
            unpack_arrays(KIND, ours[:-cut_off], 3)
    for cut_off in range(1, len(reference)):
        with pytest.raises(RebuildError):
            deserialize_arrays_cache(reference[:-cut_off])
    with pytest.raises(RebuildError):
        unpack_arrays(KIND, ours + b"\0", 3)
    with pytest.raises(RebuildError):
        deserialize_arrays_cache(reference + b"\0")


@pytest.mark.parametrize(
    ("nbytes", "shape"),
    [(0, (0, 2**30, 2**30, 2**30)), (0, (0, 2**31)), (0, (2**32, 2**32)), (16, (-2, -2))],
)
def test_shapes_no_array_has_are_refused(nbytes: int, shape: tuple[int, ...]) -> None:
    """E18: empty and yet too large, or of a size that overflows to the right one."""
    with pytest.raises(RebuildError):
        array_from(bytes(nbytes), "float32", shape)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_blobs_are_read_as_announced_or_refused(data: st.DataObject) -> None:
    """Whatever bytes are changed, the answer is arrays of the announced form or RebuildError."""
    source = [mx.ones((1, 2)), None, mx.zeros((1, 3), mx.bfloat16)]
    blob = bytearray(data.draw(st.sampled_from([
        pack_arrays(KIND, source, 3),
        serialize_arrays_cache([array for array in source if array is not None]),
    ])))  # fmt: skip
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob) - 1))
        blob[at] = data.draw(st.integers(0, 255))
    try:
        arrays = unpack_arrays(KIND, blob, 3)
    except RebuildError:
        pass
    else:
        assert [array if array is None else array.nbytes for array in arrays] == [8, None, 6]
    try:
        found = deserialize_arrays_cache(blob)
    except RebuildError:
        pass
    else:
        assert sum(array.size for array in found) <= 5


# The reference container


def test_reference_container_has_the_documented_bytes() -> None:
    """Version, count, then ndim, shape, dtype code and raw bytes of each array."""
    arrays = [mx.array([[1.0, -2.0]]), mx.array([0.5], mx.float16), mx.array([[3.0]], mx.bfloat16)]
    expected = (
        struct.pack("<2I", 1, 3)
        + struct.pack("<4I2f", 2, 1, 2, 0, 1.0, -2.0)
        + struct.pack("<3Ie", 1, 1, 1, 0.5)
        + struct.pack("<4If", 2, 1, 1, 2, 3.0)
    )
    assert serialize_arrays_cache(arrays) == expected
    assert all(map(same, deserialize_arrays_cache(expected), arrays))


@pytest.mark.parametrize("array", [None, mx.array([1]), mx.array([True]), mx.array([1j])])
def test_reference_container_refuses_what_it_cannot_hold(array: mx.array | None) -> None:
    with pytest.raises(ValueError, match="holds no"):
        serialize_arrays_cache([array])


@pytest.mark.parametrize("blob", [
    struct.pack("<2I", 2, 0), struct.pack("<2I", 0, 0), struct.pack("<2I", 1, 1),
    struct.pack("<2I", 1, 1 << 31), struct.pack("<3I", 1, 1, 1 << 31),
    struct.pack("<5I", 1, 1, 1, 1, 3), struct.pack("<5I", 1, 1, 1, 1 << 31, 0),
    struct.pack("<6I", 1, 1, 1, 1, 2, 0x3F800001),
])  # fmt: skip
def test_reference_container_that_lies_is_refused(blob: bytes) -> None:
    """Other versions, counts beyond the end, unknown dtypes, bfloat16 that never was."""
    with pytest.raises(RebuildError):
        deserialize_arrays_cache(blob)


def test_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        write_safetensors({"a": mx.array([1j])}, {})


@pytest.mark.nightly
def test_large_state_passes() -> None:
    """256 MB, which is 32 times what an 8,192-token state of a large hybrid takes."""
    source = mx.full((1, 1 << 26), 0.5)
    (array,) = unpack_arrays(KIND, pack_arrays(KIND, [source], 9), 9)
    assert array is not None
    assert mx.array_equal(array, source).item()
