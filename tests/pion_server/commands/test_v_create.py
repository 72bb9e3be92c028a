"""V.CREATE: formats, schemas, existing sessions (WIRE.md 3, 4.1, 16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pion_server.formats import format_names
from tests.pion_server.commands.checks import fetch, info, lines, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient

UNIFORM = [name for name in format_names() if name != "bf16_rope_fp8_body"]


def describe(client: RawClient, sid: bytes) -> dict[str, str]:
    return lines(client.call("V.INFO", sid))


def test_without_a_format_it_is_int8(client: RawClient, ns: bytes) -> None:
    assert isinstance(client.call("V.CREATE", ns, 64), int)
    assert describe(client, ns)["v_format"] == "int8"
    assert describe(client, ns)["value_dim"] == "64"


@pytest.mark.parametrize("fmt", UNIFORM)
def test_every_format_is_echoed_as_asked_for(client: RawClient, ns: bytes, fmt: str) -> None:
    client.call("v.create", ns, 64, "vquant", fmt.upper())
    shown = describe(client, ns)
    assert (shown["v_format"], shown["schema"], shown["num_layers"]) == (fmt, "uniform", "0")


def test_each_session_has_its_own_index(client: RawClient, ns: bytes) -> None:
    first = client.call("V.CREATE", ns + b"a", 32)
    second = client.call("V.CREATE", ns + b"b", 32)
    assert first != second
    assert client.call("V.CREATE", ns + b"a", 32) == first
    assert describe(client, ns + b"b")["session_idx"] == str(second)


def test_creating_again_keeps_the_rows(client: RawClient, ns: bytes) -> None:
    rows = values(1, 4, 32)
    client.call("V.CREATE", ns, 32, "VQUANT", "fp32")
    store(client, ns, 0, 0, rows)
    before = info(client)
    client.call("V.CREATE", ns, 32, "VQUANT", "fp32")
    assert info(client) == before
    found = fetch(client, ns, 0, 0, 4, 32)
    assert found is not None
    assert (found == rows).all()


def test_another_shape_is_adopted_when_empty_and_refused_with_rows(
    client: RawClient, ns: bytes
) -> None:
    client.call("V.CREATE", ns, 32, "VQUANT", "fp32")
    client.call("V.CREATE", ns, 64, "VQUANT", "fp16")
    assert describe(client, ns)["v_format"] == "fp16"
    store(client, ns, 0, 0, values(1, 1, 64))
    for words in ((ns, 64), (ns, 32, "VQUANT", "fp16"), (ns, "SCHEMA", 1, "fmt=fp16,dim=64")):
        refuse(client, "V.CREATE", *words, text="session exists with another format")
    client.call("V.CREATE", ns, 64, "VQUANT", "fp16")


def test_a_schema_names_every_layer(client: RawClient, ns: bytes) -> None:
    specs = ["fmt=fp16,dim=32", "", ",,fmt=mlx4g32,,", "fmt=bf16_rope_fp8_body,dim=96,rope=32"]
    client.call("V.CREATE", ns, 64, "SCHEMA", 4, *specs)
    shown = client.call("V.INFO", ns).decode().split("\r\n")[1:-1]
    assert shown == [
        "value_dim:32",
        "v_format:fp16",
        "num_layers:4",
        "schema:heterogeneous",
        "layer_0_tokens:0",
        "layer_0_dim:32",
        "layer_0_fmt:fp16",
        "layer_1_tokens:0",
        "layer_1_dim:64",
        "layer_1_fmt:int8",
        "layer_2_tokens:0",
        "layer_2_dim:64",
        "layer_2_fmt:mlx4g32",
        "layer_3_tokens:0",
        "layer_3_dim:96",
        "layer_3_fmt:bf16_rope_fp8_body",
        "layer_3_rope:32",
        "total_tokens:0",
    ]


def test_equal_layers_are_the_same_session_however_they_were_asked_for(
    client: RawClient, ns: bytes
) -> None:
    side, specs = ns + b"_pk", ["fmt=fp16,dim=32", "fmt=int8,dim=32"]
    client.call("V.CREATE", side, "SCHEMA", 2, *specs)
    store(client, side, 0, 0, values(1, 1, 32))
    client.call("V.CREATE", side, 0, "schema", 2, *specs)
    client.call("V.CREATE", side, 32, "SCHEMA", 2, "FMT=FP16", "")
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 2, *specs, *specs)
    assert describe(client, side)["layer_0_tokens"] == "1"


def test_a_schema_of_256_layers(client: RawClient, ns: bytes) -> None:
    client.call("V.CREATE", ns, 0, "SCHEMA", 256, *["fmt=fp16,dim=32"] * 256)
    store(client, ns, 255, 0, values(1, 1, 32))
    assert describe(client, ns)["layer_255_tokens"] == "1"


def test_a_lone_side_is_a_session_but_no_prefix(client: RawClient, ns: bytes) -> None:
    client.call("V.CREATE", ns + b"_pk", 32)
    assert client.call("KV.PREFIX.LOOKUP", ns) == "MISS"
    client.call("V.CREATE", ns + b"_pv", 32)
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires: <session_id> <value_dim>"),
        ((0,), "value_dim"),
        ((8193,), "value_dim"),
        ((-1,), "value_dim"),
        (("64x",), "invalid integer"),
        (("+64",), "invalid integer"),
        ((" 64",), "invalid integer"),
        (("",), "invalid integer"),
        ((64, "VQUANT"), "VQUANT without value"),
        ((64, "VQUANT", "fp17"), "unknown VQUANT format"),
        ((64, "VQUANT", "fp17"), "turbo4, fp16, turbo3, turbo2, fp8, mlx4g32"),
        ((64, "VQUANT", "fp16", "x"), "unknown extra word"),
        ((64, "FORMAT", "fp16"), "unknown extra word"),
        ((64, "VQUANT", "bf16_rope_fp8_body"), "SCHEMA"),
        ((48, "VQUANT", "turbo4"), "multiple of 32"),
        ((48, "VQUANT", "turbo3"), "multiple of 32"),
        ((48, "VQUANT", "turbo2"), "multiple of 32"),
        ((48, "VQUANT", "fp8"), "multiple of 32"),
        ((48, "VQUANT", "mlx4g32"), "multiple of 32"),
        (("SCHEMA",), "SCHEMA"),
        ((0, "SCHEMA"), "SCHEMA"),
        ((0, "SCHEMA", 0), "SCHEMA layer count"),
        ((0, "SCHEMA", -1, "x"), "SCHEMA layer count"),
        ((0, "SCHEMA", "many"), "invalid integer"),
        ((0, "SCHEMA", 257, *["fmt=fp16"] * 257), "exceeds"),
        ((0, "SCHEMA", 2, "dim=32"), "too few"),
        ((0, "SCHEMA", 1, "dim=32", "dim=32"), "too many"),
        ((8193, "SCHEMA", 1, "dim=32"), "default_dim"),
        ((-1, "SCHEMA", 1, "dim=32"), "default_dim"),
        ((0, "SCHEMA", 1, "fmt=fp17,dim=32"), "layer 0: unknown fmt"),
        ((0, "SCHEMA", 2, "dim=32", "dim=0"), "layer 1"),
        ((0, "SCHEMA", 1, "dim=8193"), "dim"),
        ((0, "SCHEMA", 1, "dim="), "invalid integer"),
        ((0, "SCHEMA", 1, "fmt=fp16"), "dim missing"),
        (("SCHEMA", 1, "fmt=fp16"), "dim missing"),
        ((64, "SCHEMA", 1, "width=3"), "unknown key"),
        ((64, "SCHEMA", 1, "s=3"), "S-tensor reserved"),
        ((64, "SCHEMA", 1, "fmt=bf16_rope_fp8_body"), "missing rope="),
        ((64, "SCHEMA", 1, "fmt=bf16_rope_fp8_body,rope=64"), "rope not in (0, dim)"),
        ((64, "SCHEMA", 1, "fmt=bf16_rope_fp8_body,rope=0"), "rope"),
        ((64, "SCHEMA", 1, "fmt=bf16_rope_fp8_body,rope=8193"), "rope"),
        ((64, "SCHEMA", 1, "fmt=bf16_rope_fp8_body,rope=16"), "multiple of 32"),
        ((48, "SCHEMA", 1, "fmt=turbo4"), "multiple of 32"),
        ((64, "SCHEMA", 1, "fmt=fp16,rope=32"), "rope"),
        ((64, "SCHEMA", 1, b"fmt=\xff\r\n-x,dim=32"), "unknown fmt"),
    ],
)
def test_refusals_name_the_fault_and_change_nothing(
    client: RawClient, ns: bytes, words: tuple[str | bytes | int, ...], text: str
) -> None:
    refuse(client, "V.CREATE", ns, *words, text=text)
    assert client.error("V.INFO", ns) == "ERR session not found"


@pytest.mark.parametrize("size", [0, 206, 10_000])
def test_a_sid_has_1_to_205_bytes(client: RawClient, size: int) -> None:
    refuse(client, "V.CREATE", b"x" * size, 32, text="sid")


def test_any_bytes_make_a_sid(client: RawClient, ns: bytes) -> None:
    """I06: names with path separators, NUL, newlines and 200 bytes are only names."""
    for name in (b"../../etc/passwd", b"\0\n\r\xff", b" ", b"n" * 200, "naïve→".encode()):
        client.call("V.CREATE", name + b"_pk", 32, "VQUANT", "fp32")
        store(client, name + b"_pk", 0, 0, values(5, 1, 32))
        assert lines(client.call("V.INFO", name + b"_pk"))["layer_0_tokens"] == "1"
        assert client.call("V.DROP", name + b"_pk") == 1
