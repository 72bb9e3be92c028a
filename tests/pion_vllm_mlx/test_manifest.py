"""The manifest: what it says survives, and anything doubtful is refused with a reason."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pion_patches.pieces import RowLayout
from pion_vllm_mlx.manifest import (
    Blob,
    LeafEntry,
    Manifest,
    ManifestError,
    Rows,
    mismatch,
    read_manifest,
    write_manifest,
)

FINGERPRINT = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
EXAMPLE = Manifest(
    ids=(1, 65536, 7, 4294967295),
    fingerprint=FINGERPRINT,
    leaves=(
        LeafEntry(
            (0,),
            "KVCache",
            {"offset": 4, "heads": 2, "head_dim": 8},
            Rows(0, 4, RowLayout("dense", ("float32",), (16,)), "fp32", "0123456789abcdef"),
            Rows(0, 4, RowLayout("dense", ("float32",), (16,)), "fp32", "fedcba9876543210"),
            None,
        ),
        LeafEntry((1, 0), "ArraysCache", {}, None, None, Blob(1, 4096, "00112233445566ff")),
        LeafEntry(
            (1, 1),
            "QuantizedKVCache",
            {"bits": 4, "group_size": 32},
            Rows(
                1,
                4,
                RowLayout("mlx4g32", ("uint32", "float16", "float16"), (8, 2, 2)),
                "mlx4g32",
                "aaaaaaaaaaaaaaaa",
            ),
            None,
            None,
        ),
    ),
    prefill_ms=1234,
    prefill_step=512,
)
GOLDEN_V1 = (
    b"pion-prefix 1 ba3f0d899d101dd98a0bc021873fadc6\n"
    b'{"layout":"[token][head][dim] little-endian","tokens":4,"ids":"AQAAAAAAAQAHAAAA/////w='
    b'=","model":"9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08","prefill'
    b'_ms":1234,"prefill_step":512,"leaves":[{"path":[0],"kind":"KVCache","meta":{"offset":4'
    b',"heads":2,"head_dim":8},"keys":{"layer":0,"rows":4,"kind":"dense","parts":[["float32"'
    b',16]],"store":"fp32","xxh3":"0123456789abcdef"},"values":{"layer":0,"rows":4,"kind":"d'
    b'ense","parts":[["float32",16]],"store":"fp32","xxh3":"fedcba9876543210"},"blob":null},'
    b'{"path":[1,0],"kind":"ArraysCache","meta":{},"keys":null,"values":null,"blob":{"layer"'
    b':1,"bytes":4096,"xxh3":"00112233445566ff"}},{"path":[1,1],"kind":"QuantizedKVCache","m'
    b'eta":{"bits":4,"group_size":32},"keys":{"layer":1,"rows":4,"kind":"mlx4g32","parts":[['
    b'"uint32",8],["float16",2],["float16",2]],"store":"mlx4g32","xxh3":"aaaaaaaaaaaaaaaa"},'
    b'"values":null,"blob":null}]}'
)


def body_of(manifest: Manifest = EXAMPLE) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(write_manifest(manifest).partition(b"\n")[2])
    return loaded


def sealed(body: Any) -> bytes:
    """A manifest of any body whose own checksum is right."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"pion-prefix 1 %s\n%s" % (xxhash.xxh3_128_hexdigest(data).encode(), data)


def test_what_is_written_is_read() -> None:
    assert read_manifest(write_manifest(EXAMPLE)) == EXAMPLE


def test_the_golden_v1_manifest_reads_the_same_for_ever() -> None:
    """N04: version, axis order, widths, dtypes and formats are in the bytes, which are pinned."""
    assert read_manifest(GOLDEN_V1) == EXAMPLE
    assert write_manifest(EXAMPLE) == GOLDEN_V1


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_token_ids_of_32_bits_are_kept_exactly(ids: list[int]) -> None:
    manifest = dataclasses.replace(EXAMPLE, ids=tuple(ids))
    assert read_manifest(write_manifest(manifest)).ids == tuple(ids)


def test_mismatch_names_what_differs() -> None:
    ids = EXAMPLE.ids
    assert mismatch(EXAMPLE, ids, FINGERPRINT) is None
    assert mismatch(EXAMPLE, list(ids), FINGERPRINT) is None
    assert mismatch(EXAMPLE, ids[:-1], FINGERPRINT) == "length"
    assert mismatch(EXAMPLE, (*ids, 1), FINGERPRINT) == "length"
    assert mismatch(EXAMPLE, (*ids[:-1], 8), FINGERPRINT) == "ids"
    assert mismatch(EXAMPLE, ids, "0" * 64) == "model"


def test_every_single_damaged_byte_is_noticed() -> None:
    """E02: no flipped bit can turn a manifest into another one."""
    blob = write_manifest(EXAMPLE)
    for at in range(len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 0x01
        with pytest.raises(ManifestError):
            read_manifest(damaged)


def test_every_truncation_is_noticed() -> None:
    """E18: empty, header only, cut anywhere, or longer than it was."""
    blob = write_manifest(EXAMPLE)
    for length in range(len(blob)):
        with pytest.raises(ManifestError):
            read_manifest(blob[:length])
    with pytest.raises(ManifestError):
        read_manifest(blob + b" ")


def test_a_later_version_is_refused_by_name() -> None:
    body = write_manifest(EXAMPLE).partition(b"\n")[2]
    head = b"pion-prefix 2 %s\n" % xxhash.xxh3_128_hexdigest(body).encode()
    with pytest.raises(ManifestError, match="version 2"):
        read_manifest(head + body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"tokens": NaN}',
        b'{"tokens": 1, "tokens": 1}',
        b"\xff\xfe{}",
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_clean_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ManifestError):
        read_manifest(sealed(body))


def set_field(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the field at `path[:-1]` to `path[-1]`."""

    def change(body: dict[str, Any]) -> None:
        target: Any = body
        for step in path[:-2]:
            target = target[step]
        target[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_field("tokens", 3),
        set_field("tokens", 5),
        set_field("tokens", True),
        set_field("tokens", 4.0),
        set_field("tokens", 0),
        set_field("ids", "AAAA"),
        set_field("ids", "no base64!"),
        set_field("ids", None),
        set_field("layout", "[head][token][dim] little-endian"),
        set_field("model", FINGERPRINT[:-1]),
        set_field("model", FINGERPRINT.upper()),
        set_field("prefill_ms", -1),
        set_field("prefill_step", 0),
        set_field("unknown", 1),
        set_field("leaves", {}),
        set_field("leaves", 0, "path", []),
        set_field("leaves", 0, "path", [-1]),
        set_field("leaves", 0, "path", [1, 1]),
        set_field("leaves", 0, "kind", ""),
        set_field("leaves", 0, "meta", []),
        set_field("leaves", 0, "keys", {}),
        set_field("leaves", 0, "keys", "layer", 256),
        set_field("leaves", 0, "keys", "layer", 1),
        set_field("leaves", 0, "keys", "rows", 0),
        set_field("leaves", 0, "keys", "rows", 1 << 40),
        set_field("leaves", 0, "keys", "parts", []),
        set_field("leaves", 0, "keys", "parts", [["float16"]]),
        set_field("leaves", 0, "keys", "parts", [["float16", 0]]),
        set_field("leaves", 0, "keys", "parts", [["float64", 16]]),
        set_field("leaves", 0, "keys", "parts", [["float16", 8], ["float16", 8]]),
        set_field("leaves", 0, "keys", "kind", "sparse"),
        set_field("leaves", 0, "keys", "xxh3", "0123"),
        set_field("leaves", 1, "blob", "bytes", -1),
        set_field("leaves", 1, "blob", "layer", "1"),
        set_field("ids", "\x80"),
    ],
)
def test_a_field_of_another_type_or_out_of_range_is_refused(
    change: Callable[[dict[str, Any]], None],
) -> None:
    """N02, N04: a missing dtype, another layout or a lying width is refused, never guessed."""
    body = body_of()
    change(body)
    with pytest.raises(ManifestError):
        read_manifest(sealed(body))


@pytest.mark.parametrize("where", [(), ("leaves", 0), ("leaves", 0, "keys"), ("leaves", 1, "blob")])
def test_a_missing_field_is_refused(where: tuple[Any, ...]) -> None:
    """N02: a manifest without a dtype is no manifest."""

    def names(body: Any) -> Any:
        for step in where:
            body = body[step]
        return body

    for name in list(names(body_of())):
        body = body_of()
        del names(body)[name]
        with pytest.raises(ManifestError):
            read_manifest(sealed(body))


def test_more_tokens_than_a_manifest_holds_are_refused_when_writing() -> None:
    with pytest.raises(ManifestError, match="limit"):
        write_manifest(dataclasses.replace(EXAMPLE, ids=(1,) * 1_000_000))
