"""V.STOREBATCH and V.FETCH: rows in, the same rows out (WIRE.md 4.2, 4.3, 16, 17)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pion_server.formats import InputType, format_names, make_format
from tests.pion_server.commands.checks import (
    F32,
    Word,
    fetch,
    info,
    lines,
    receipt,
    refuse,
    store,
    values,
)

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

DIM = 64
NUMBERS = [name for name in format_names() if name not in ("raw", "bf16_rope_fp8_body")]
# Mean error of rows in [-1, 1]: no more than WIRE.md 16 allows.
BANDS = {"int8": 0.05, "turbo4": 0.35, "turbo3": 0.75, "turbo2": 0.75, "mlx4g32": 0.35}


def create(client: RawClient, sid: bytes, fmt: str, dim: int = DIM) -> None:
    client.call("V.CREATE", sid, dim, "VQUANT", fmt)


def count(client: RawClient, sid: bytes, layer: int = 0) -> int:
    return int(lines(client.call("V.INFO", sid)).get(f"layer_{layer}_tokens", 0))


@pytest.mark.parametrize("fmt", NUMBERS)
def test_rows_come_back_as_their_format_reads_them(client: RawClient, ns: bytes, fmt: str) -> None:
    rows = values(3, 9, DIM)
    create(client, ns, fmt)
    store(client, ns, 2, 0, rows)
    form = make_format(fmt, DIM)
    expected = form.decode(form.encode(rows.tobytes(), 9, InputType.F32))
    found = fetch(client, ns, 2, 0, 9, DIM)
    assert found is not None
    assert found.tobytes() == expected.tobytes()
    assert float(np.abs(found - rows).mean()) < BANDS.get(fmt, 0.05)


def test_errors_grow_with_the_savings(client: RawClient, ns: bytes) -> None:
    rows, errors, seen = values(4, 64, DIM), [], set()
    for fmt in ("int8", "mlx4g32", "turbo4", "turbo3", "turbo2"):
        create(client, ns + fmt.encode(), fmt)
        store(client, ns + fmt.encode(), 0, 0, rows)
        found = fetch(client, ns + fmt.encode(), 0, 0, 64, DIM)
        assert found is not None
        errors.append(float(np.abs(found - rows).mean()))
        seen.add(found.tobytes())
    assert errors[0] < errors[1] < errors[2]
    assert len(seen) == 5


def test_storing_the_same_rows_again_stores_the_same_bytes(client: RawClient, ns: bytes) -> None:
    rows = values(5, 8, DIM)
    for fmt in NUMBERS:
        sid = ns + fmt.encode()
        create(client, sid, fmt)
        found = []
        for _ in range(2):
            store(client, sid, 0, 0, rows)
            found.append(client.call("V.FETCH", sid, 0, "RANGE", 0, 8, "FMT", "PACKED"))
        assert found[0] == found[1], fmt


@pytest.mark.parametrize(
    ("fmt", "kind", "word"),
    [("fp16", "F16", "u2"), ("bf16", "BF16", "u2"), ("fp32", "F32", "u4")],
)
def test_equal_types_keep_every_bit_pattern(
    client: RawClient, ns: bytes, fmt: str, kind: str, word: str
) -> None:
    """N03: NaN payloads, infinities, -0.0 and subnormals among them."""
    patterns = np.arange(65536, dtype="u2")
    blob = patterns if word == "u2" else (patterns.astype("u4") << 16) | patterns[::-1]
    create(client, ns, fmt, 4096)
    assert client.call("V.STOREBATCH", ns, 0, 0, 16, blob.tobytes(), "FMT", kind) == "OK"
    assert client.call("V.FETCH", ns, 0, "RANGE", 0, 16, "FMT", "PACKED") == blob.tobytes()
    if fmt == "fp16":
        assert client.call("V.FETCH", ns, 0, "RANGE", 0, 16, "FMT", "NATIVE") == blob.tobytes()
    if fmt == "bf16":
        wide = client.call("V.FETCH", ns, 0, "RANGE", 0, 16)
        assert wide == (patterns.astype("u4") << 16).tobytes()
    if fmt == "fp32":
        assert client.call("V.FETCH", ns, 0, "RANGE", 0, 16) == blob.tobytes()


def test_bf16_bits_shipped_as_f16_are_never_touched(client: RawClient, ns: bytes) -> None:
    """N02: what `pion-vllm-mlx serve` does; 188.0 as bf16 is 0x433C, fp16's 3.6171875."""
    bits = np.array([0x433C, 0x3F80, 0x7FC1, 0x8000] * 8, dtype="u2")
    create(client, ns, "fp16", 32)
    client.call("V.STOREBATCH", ns, 0, 0, 1, bits.tobytes(), "fmt", "f16")
    assert client.call("V.FETCH", ns, "batch", 0, 1, "fmt", "native") == [bits.tobytes()]
    found = fetch(client, ns, 0, 0, 1, 32)
    assert found is not None
    assert found[0, 0] == 3.6171875
    assert found[0, 1] == 1.875


def test_f32_is_rounded_to_nearest_even_and_overflows_to_infinity(
    client: RawClient, ns: bytes
) -> None:
    rows = np.array(
        [[1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, -70000.0, 1e-9, -0.0, 2048.5] * 4],
        dtype=np.float32,
    )
    create(client, ns, "fp16", 32)
    store(client, ns, 0, 0, rows)
    with np.errstate(over="ignore"):
        expected = rows.astype(np.float16)
    assert np.isinf(expected).sum() == 8
    native = client.call("V.FETCH", ns, 0, "RANGE", 0, 1, "FMT", "NATIVE")
    assert native == expected.tobytes()


@pytest.mark.parametrize("fmt", NUMBERS)
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_half_words_are_widened_before_they_are_converted(
    client: RawClient, ns: bytes, fmt: str, kind: str
) -> None:
    wide = values(6, 5, DIM)
    if kind == "F16":
        half = wide.astype(np.float16)
        wide, blob = half.astype(np.float32), half.tobytes()
    else:
        bits = (wide.view(np.uint32) >> 16).astype(np.uint16)
        wide = (bits.astype(np.uint32) << 16).view(np.float32)
        blob = bits.tobytes()
    create(client, ns, fmt)
    client.call("V.STOREBATCH", ns, 0, 0, 5, blob, "FMT", kind)
    client.call("V.STOREBATCH", ns, 1, 0, 5, wide.tobytes())
    one, two = client.call("V.FETCH", ns, "BATCH", 0, 5, "FMT", "PACKED")
    assert one == two


def test_native_is_half_the_bytes_of_fp16_and_nothing_else(client: RawClient, ns: bytes) -> None:
    rows = values(7, 3, DIM)
    for fmt in NUMBERS:
        create(client, ns + fmt.encode(), fmt)
        store(client, ns + fmt.encode(), 0, 0, rows)
        wide = client.call("V.FETCH", ns + fmt.encode(), 0, "RANGE", 0, 3)
        native = client.call("V.FETCH", ns + fmt.encode(), 0, "range", 0, 3, "fmt", "native")
        assert len(wide) == 3 * DIM * 4
        if fmt == "fp16":
            assert len(native) == len(wide) // 2
            native = np.frombuffer(native, np.float16).astype(np.float32).tobytes()
        assert native == wide, fmt


@pytest.mark.parametrize("fmt", [*NUMBERS, "raw"])
def test_packed_rows_are_the_stored_bytes_and_can_be_stored_elsewhere(
    client: RawClient, ns: bytes, fmt: str
) -> None:
    form = make_format(fmt, DIM)
    create(client, ns, fmt)
    if fmt == "raw":
        client.call("V.STOREBATCH", ns, 0, 0, 6, bytes(range(256)) + bytes(128), "FMT", "PACKED")
    else:
        store(client, ns, 0, 0, values(1, 4, DIM))
        store(client, ns, 0, 4, 3 * values(2, 2, DIM))
    packed = client.call("V.FETCH", ns, 0, "RANGE", 0, 6, "FMT", "PACKED")
    assert len(packed) == 6 * form.packed_row_bytes
    create(client, ns + b"2", fmt)
    client.call("V.STOREBATCH", ns + b"2", 0, 0, 6, packed, "FMT", "PACKED")
    assert client.call("V.FETCH", ns + b"2", 0, "RANGE", 0, 6, "FMT", "PACKED") == packed
    part = client.call("V.FETCH", ns + b"2", 0, "RANGE", 3, 5, "FMT", "PACKED")
    assert part == packed[3 * form.packed_row_bytes : 5 * form.packed_row_bytes]
    if fmt != "raw":
        same = client.call("V.FETCH", ns + b"2", 0, "RANGE", 0, 6)
        assert same == client.call("V.FETCH", ns, 0, "RANGE", 0, 6)


def test_each_int8_batch_keeps_its_own_scale(client: RawClient, ns: bytes) -> None:
    """A later batch of larger numbers must not change how the first one reads."""
    first = values(1, 4, DIM)
    create(client, ns, "int8")
    store(client, ns, 0, 0, first)
    before = fetch(client, ns, 0, 0, 4, DIM)
    store(client, ns, 0, 4, 1000 * values(2, 4, DIM))
    after = fetch(client, ns, 0, 0, 4, DIM)
    assert before is not None
    assert after is not None
    assert (before == after).all()
    assert np.abs(after - first).max() < 2 / 254


def test_raw_rows_go_in_and_out_packed_only(client: RawClient, ns: bytes) -> None:
    create(client, ns, "raw", 8)
    refuse(client, "V.STOREBATCH", ns, 0, 0, 1, bytes(8), text="PACKED")
    refuse(client, "V.STOREBATCH", ns, 0, 0, 1, bytes(16), "FMT", "F16", text="PACKED")
    client.call("V.STOREBATCH", ns, 0, 0, 2, b"0123456789abcdef", "FMT", "PACKED")
    for words in (
        (0, "RANGE", 0, 2),
        (0, "RANGE", 0, 2, "FMT", "NATIVE"),
        (0, 1),
        ("BATCH", 0, 2),
        (5, "RANGE", 0, 2),
    ):
        refuse(client, "V.FETCH", ns, *words, text="PACKED")
    assert client.call("V.FETCH", ns, "BATCH", 1, 2, "FMT", "PACKED") == [b"89abcdef"]


def test_batches_overwrite_and_append(client: RawClient, ns: bytes) -> None:
    one, two = values(1, 6, DIM), values(2, 4, DIM)
    create(client, ns, "fp32")
    store(client, ns, 0, 0, one)
    store(client, ns, 0, 4, two)
    store(client, ns, 0, 1, two[:1])
    expected = np.concatenate([one[:1], two[:1], one[2:4], two])
    found = fetch(client, ns, 0, 0, 8, DIM)
    assert found is not None
    assert (found == expected).all()
    assert count(client, ns) == 8
    assert int(lines(client.call("V.INFO", ns))["total_tokens"]) == 8


def test_row_by_row_in_any_order(client: RawClient, ns: bytes) -> None:
    rows = values(9, 40, DIM)
    create(client, ns, "fp32")
    before = info(client)["vstore_bytes"]
    order = np.random.default_rng(1).permutation(40)
    for at in (*order, *order[:10]):
        store(client, ns, 0, int(at), rows[at : at + 1])
    found = fetch(client, ns, 0, 0, 40, DIM)
    assert found is not None
    assert (found == rows).all()
    assert info(client)["vstore_bytes"] - before == 40 * DIM * 4


def test_a_layer_lacking_any_asked_row_is_null_in_all_three_forms(
    client: RawClient, ns: bytes
) -> None:
    """Zeros are never made up; `vstore_short_fetches` counts the layers."""
    create(client, ns, "fp16")
    store(client, ns, 0, 4, values(1, 2, DIM))
    store(client, ns, 1, 0, values(1, 8, DIM))
    short = info(client)["vstore_short_fetches"]
    assert count(client, ns) == 6
    for start, end in ((0, 6), (3, 5), (5, 7), (0, 1), (100, 101), (0, 1_048_576)):
        assert client.call("V.FETCH", ns, 0, "RANGE", start, end) is None
        assert client.call("V.FETCH", ns, 0, "RANGE", start, end, "FMT", "NATIVE") is None
        assert client.call("V.FETCH", ns, 0, "RANGE", start, end, "FMT", "PACKED") is None
    assert client.call("V.FETCH", ns, 0, 4, 5, 6) is None
    assert client.call("V.FETCH", ns, 0, 0) is None
    assert client.call("V.FETCH", ns, 7, "RANGE", 0, 1) is None
    found = client.call("V.FETCH", ns, "BATCH", 3, 6)
    assert found[0] is None
    assert len(found[1]) == 3 * DIM * 4
    assert client.call("V.FETCH", ns, "BATCH", 3, 9) == [None, None]
    assert info(client)["vstore_short_fetches"] - short == 18 + 3 + 1 + 2


def test_a_missing_layer_is_the_null_of_resp3_too(client: RawClient, ns: bytes) -> None:
    create(client, ns, "fp16")
    store(client, ns, 1, 0, values(1, 1, DIM))
    client.call("HELLO", 3)
    client.send(client.pack("V.FETCH", ns, "BATCH", 0, 1, "FMT", "NATIVE"))
    head = b"*2\r\n_\r\n$%d\r\n" % (DIM * 2)
    assert client._exactly(len(head)) == head
    client._exactly(DIM * 2 + 2)


def test_ids_answer_in_the_order_asked(client: RawClient, ns: bytes) -> None:
    rows = values(2, 200, DIM)
    create(client, ns, "fp32")
    store(client, ns, 3, 0, rows[:120])
    store(client, ns, 3, 120, rows[120:])
    for ids in ([0], [5, 4, 3], [7, 7, 7], [118, 119, 120, 121, 2], list(range(199, -1, -1))):
        data = client.call("V.FETCH", ns, 3, *ids)
        assert (np.frombuffer(data, np.float32).reshape(-1, DIM) == rows[ids]).all()


def test_batch_answers_layer_by_layer(client: RawClient, ns: bytes) -> None:
    rows = [values(layer, 5, DIM) for layer in range(4)]
    create(client, ns, "fp16")
    for layer, part in enumerate(rows):
        store(client, ns, layer, 0, part)
    whole = client.call("V.FETCH", ns, "BATCH", 1, 4)
    assert len(whole) == 4
    for layer, part in enumerate(rows):
        expected = part[1:4].astype(np.float16).astype(np.float32)
        assert whole[layer] == expected.tobytes()
    assert client.call("V.FETCH", ns, "batch", 1, 4, 2) == whole[:2]
    for more in (0, 4, 5, 300):
        assert client.call("V.FETCH", ns, "BATCH", 1, 4, more) == whole
    native = client.call("V.FETCH", ns, "BATCH", 1, 4, "FMT", "NATIVE")
    assert native == [part[1:4].astype(np.float16).tobytes() for part in rows]
    assert client.call("V.FETCH", ns, "BATCH", 1, 4, 1, "fmt", "Native") == native[:1]


def test_mixed_schemas_answer_each_layer_in_its_own_width(client: RawClient, ns: bytes) -> None:
    """D05: the layers exempt from quantising come back exactly."""
    layers = [("fp16", 32, 0), ("int8", 64, 0), ("bf16_rope_fp8_body", 96, 32), ("fp32", 32, 0)]
    specs = [f"fmt={fmt},dim={dim}" for fmt, dim, _ in layers]
    specs[2] += ",rope=32"
    client.call("V.CREATE", ns, 0, "SCHEMA", 4, *specs)
    for layer, (_, dim, _) in enumerate(layers[:3]):
        store(client, ns, layer, 0, values(layer, 3, dim))
    found = client.call("V.FETCH", ns, "BATCH", 0, 3, 4, "FMT", "NATIVE")
    assert [data and len(data) for data in found] == [3 * 32 * 2, 3 * 64 * 4, 3 * 96 * 4, None]
    form = make_format(*layers[2])
    rows = values(2, 3, 96)
    expected = form.decode(form.encode(rows.tobytes(), 3, InputType.F32))
    assert found[2] == expected.tobytes()
    refuse(client, "V.STOREBATCH", ns, 4, 0, 1, bytes(128), text="schema")
    refuse(client, "V.STOREBATCH", ns, 1, 0, 1, bytes(128), text="blob size")


def test_rows_touch_no_other_session(client: RawClient, ns: bytes) -> None:
    for number in range(5):
        create(client, ns + b"%d" % number, "fp32")
        store(client, ns + b"%d" % number, 0, 0, values(number, 2, DIM))
    for number in range(5):
        found = fetch(client, ns + b"%d" % number, 0, 0, 2, DIM)
        assert found is not None
        assert (found == values(number, 2, DIM)).all()


def test_large_batches_leave_the_loop_and_keep_their_order(client: RawClient, ns: bytes) -> None:
    """H09, H13: a pipeline of small and large commands, one of them refused, answers in order."""
    rows = values(1, 4096, DIM)
    create(client, ns, "fp32")
    for layer in range(4):
        client.send(client.pack("V.STOREBATCH", ns, layer, 0, 4096, rows.tobytes()))
        client.send(client.pack("V.STOREBATCH", ns, layer, 0, 4096, rows.tobytes()[:-1]))
        client.send(client.pack("PING", layer))
        client.send(client.pack("V.FETCH", ns, layer, "RANGE", 4095, 4096))
    for layer in range(4):
        assert client.read() == "OK"
        assert str(client.read()).startswith("ERR V.STOREBATCH: blob size")
        assert client.read() == b"%d" % layer
        assert client.read() == rows[4095:].tobytes()
    found = client.call("V.FETCH", ns, "BATCH", 0, 4096)
    assert found == [rows.tobytes()] * 4


def test_two_clients_store_the_same_rows_at_once(
    running: ServerProcess, client: RawClient, ns: bytes
) -> None:
    """WIRE.md 15.10."""
    rows = values(1, 2048, DIM)
    clients = [running.client(), running.client()]
    for one in clients:
        one.send(one.pack("KV.PREFIX.LOOKUP", ns))
    assert [one.read() for one in clients] == ["MISS", "MISS"]
    for one in clients:
        one.send(one.pack("KV.PREFIX.REGISTER", ns, DIM, "fp32"))
        for layer in range(3):
            for side in (b"_pk", b"_pv"):
                one.send(one.pack("V.STOREBATCH", ns + side, layer, 0, 2048, rows.tobytes()))
    for one in clients:
        assert [one.read() for _ in range(7)] == ["OK"] * 7
    assert client.call("KV.PREFIX.LOOKUP", ns) == "HIT"
    for side in (b"_pk", b"_pv"):
        assert client.call("V.FETCH", ns + side, "BATCH", 0, 2048, 3) == [rows.tobytes()] * 3


def test_the_log_grows_by_what_is_stored_and_no_more(client: RawClient, ns: bytes) -> None:
    """fp16: 2 bytes a value and less than 1 KiB a few records, whatever type came in."""
    before = info(client)
    create(client, ns, "fp16", 1024)
    rows = values(1, 64, 1024)
    half = rows.astype(np.float16).tobytes()
    client.call("V.STOREBATCH", ns, 0, 0, 64, rows.tobytes())
    client.call("V.STOREBATCH", ns, 1, 0, 64, half, "FMT", "F16")
    client.call("V.STOREBATCH", ns, 2, 0, 64, half, "FMT", "BF16")
    after = info(client)
    assert 0 < after["wal_bytes"] - before["wal_bytes"] - 3 * 64 * 1024 * 2 < 1024
    assert after["wal_appended"] - before["wal_appended"] == 4


def test_fetches_are_counted_by_rows_asked_and_bytes_served(client: RawClient, ns: bytes) -> None:
    create(client, ns, "fp16")
    for layer in range(2):
        store(client, ns, layer, 0, values(1, 8, DIM))
    asked, served = info(client)["vstore_total_fetches"], receipt(client)["kvprefix_bytes_served"]

    def grown(*words: Word) -> tuple[int, int]:
        nonlocal asked, served
        client.call("V.FETCH", ns, *words)
        before = asked, served
        asked = info(client)["vstore_total_fetches"]
        served = receipt(client)["kvprefix_bytes_served"]
        return asked - before[0], served - before[1]

    assert grown(0, "RANGE", 2, 5) == (3, 3 * DIM * 4)
    assert grown(0, "RANGE", 2, 5, "FMT", "NATIVE") == (3, 3 * DIM * 2)
    assert grown("BATCH", 0, 8) == (16, 16 * DIM * 4)
    assert grown(0, 7, 7) == (2, 2 * DIM * 4)
    assert grown(0, "RANGE", 0, 9) == (9, 0)
    assert lines(client.call("V.INFO"))["total_fetches"] == str(asked)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires:"),
        ((0, 0, 1), "requires:"),
        ((-1, 0, 1, bytes(256)), "layer"),
        ((256, 0, 1, bytes(256)), "layer"),
        (("x", 0, 1, bytes(256)), "invalid integer"),
        ((0, -1, 1, bytes(256)), "start"),
        ((0, "1.0", 1, bytes(256)), "invalid integer"),
        ((0, 0, 0, b""), "count"),
        ((0, 0, -4, b""), "count"),
        ((0, 1_048_576, 1, bytes(256)), "1048576"),
        ((0, 1, 1_048_576, bytes(256)), "1048576"),
        ((0, 2**64, 1, bytes(256)), "invalid"),
        ((0, 0, 1, bytes(255)), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 1, bytes(257)), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 2, bytes(256)), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 1, bytes(128)), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 1, bytes(256), "FMT", "F16"), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 1, b""), "ERR V.STOREBATCH: blob size"),
        ((0, 0, 1, bytes(256), "FMT"), "option"),
        ((0, 0, 1, bytes(256), "FMT", "F64"), "FMT"),
        ((0, 0, 1, bytes(256), "junk"), "option"),
        ((0, 0, 1, bytes(256), "F32"), "option"),
        ((0, 0, 1, bytes(256), "GEN"), "GEN"),
        ((0, 0, 1, bytes(256), "GEN", "x"), "GEN"),
        ((0, 0, 1, bytes(256), "GEN", 0), "GEN"),
        ((0, 0, 1, bytes(256), "GEN", 77), "STALE "),
        ((0, 0, 1, bytes(256), "FMT", "F32", "GEN", 77), "STALE "),
    ],
)
def test_a_refused_store_changes_nothing(
    client: RawClient, ns: bytes, words: tuple[Word, ...], text: str
) -> None:
    create(client, ns + b"_pk", "fp32")
    store(client, ns + b"_pk", 0, 0, values(1, 1, DIM))
    refuse(client, "V.STOREBATCH", ns + b"_pk", *words, text=text)
    assert count(client, ns + b"_pk") == 1


def test_unknown_sids_are_refused_by_name(client: RawClient, ns: bytes) -> None:
    assert client.error("V.STOREBATCH", ns, 0, 0, 1, bytes(4)) == "ERR session not found"
    for words in ((0, 1), (0, "RANGE", 0, 1), ("BATCH", 0, 1)):
        refuse(client, "V.FETCH", ns, *words, text="ERR session not found")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((0,), "requires:"),
        (("BATCH", 0), "requires:"),
        ((0, "RANGE", 0), "requires:"),
        ((256, "RANGE", 0, 1), "layer_id"),
        ((-1, "RANGE", 0, 1), "layer_id"),
        (("x", "RANGE", 0, 1), "layer_id"),
        ((256, 0), "layer_id"),
        ((0, "RANGE", 1, 1), "RANGE"),
        ((0, "RANGE", 2, 1), "RANGE"),
        ((0, "RANGE", -1, 1), "RANGE"),
        ((0, "RANGE", "a", 1), "RANGE"),
        ((0, "RANGE", 0, 1_048_577), "RANGE"),
        (("BATCH", 1, 1), "BATCH invalid range"),
        (("BATCH", -1, 1), "BATCH invalid range"),
        (("BATCH", 0, 1_048_577), "BATCH invalid range"),
        (("BATCH", 0, "x"), "BATCH invalid range"),
        (("BATCH", 0, 1, "x"), "num_layers"),
        ((0, "RANGE", 0, 1, "FMT"), "FMT"),
        ((0, "RANGE", 0, 1, "FMT", "F32"), "FMT"),
        ((0, "RANGE", 0, 1, "NATIVE"), "FMT"),
        ((0, "RANGE", 0, 1, "FMT", "NATIVE", "x"), "FMT"),
        (("BATCH", 0, 1, 1, "FMT", "x"), "FMT"),
        ((0, 0, "FMT", "NATIVE"), "FMT requires the RANGE or BATCH form"),
        ((0, ""), "no token IDs"),
        ((0, "x"), "token id"),
        ((0, -1), "token id"),
        ((0, 0, 1_048_576), "token id"),
    ],
)
def test_a_refused_fetch_counts_nothing(
    client: RawClient, ns: bytes, words: tuple[Word, ...], text: str
) -> None:
    create(client, ns, "fp16")
    store(client, ns, 0, 0, values(1, 2, DIM))
    refuse(client, "V.FETCH", ns, *words, text=text)


def test_a_batch_of_a_session_without_rows_is_refused(client: RawClient, ns: bytes) -> None:
    create(client, ns, "fp16")
    refuse(client, "V.FETCH", ns, "BATCH", 0, 1, text="no stored layers")
    client.call("V.CREATE", ns + b"s", "SCHEMA", 2, "fmt=fp16,dim=32", "dim=32")
    assert client.call("V.FETCH", ns + b"s", "BATCH", 0, 1) == [None, None]


def test_too_many_int8_runs_in_one_batch_are_refused_not_lost(client: RawClient, ns: bytes) -> None:
    """Each PACKED int8 row may bring a scale of its own; what a log record cannot name is no."""
    count_of_rows = 700_000
    packed = np.zeros((count_of_rows, 9), np.uint8)
    packed[:, :4] = np.arange(1, count_of_rows + 1, dtype="<u4").view(np.uint8).reshape(-1, 4)
    create(client, ns, "int8", 1)
    blob = packed.tobytes()
    refuse(client, "V.STOREBATCH", ns, 0, 0, count_of_rows, blob, "FMT", "PACKED", text="batch")
    some = 5000
    client.call("V.STOREBATCH", ns, 0, 0, some, packed[:some].tobytes(), "FMT", "PACKED")
    back = client.call("V.FETCH", ns, 0, "RANGE", 0, some, "FMT", "PACKED")
    assert back == packed[:some].tobytes()


@pytest.fixture(scope="module")
def filling(module_server: Callable[..., ServerProcess]) -> ServerProcess:
    return module_server("--fetch-zero-fill")


def padded(rows: F32, before: int, after: int) -> F32:
    return np.pad(rows, ((before, after), (0, 0)))


@pytest.mark.parametrize("fmt", ["fp16", "int8", "turbo4", "fp32"])
def test_zero_fill_pads_where_some_asked_row_exists(
    filling: ServerProcess, ns: bytes, fmt: str
) -> None:
    client = filling.client()
    create(client, ns, fmt)
    store(client, ns, 0, 4, values(1, 2, DIM))
    held = fetch(client, ns, 0, 4, 6, DIM)
    assert held is not None
    for start, end in ((0, 8), (3, 5), (5, 9), (4, 6)):
        found = fetch(client, ns, 0, start, end, DIM)
        assert found is not None
        assert (found == padded(held, 4, 10)[start:end]).all()
    for start, end in ((0, 4), (6, 8)):
        assert client.call("V.FETCH", ns, 0, "RANGE", start, end) is None
    assert client.call("V.FETCH", ns, 1, "RANGE", 0, 1) is None
    assert client.call("V.FETCH", ns, "BATCH", 0, 8) == [padded(held, 4, 2).tobytes()]
    data = client.call("V.FETCH", ns, 0, 0, 4, 100, 5)
    none = np.zeros_like(held[0])
    assert data == np.stack([none, held[0], none, held[1]]).tobytes()
    assert client.call("V.FETCH", ns, 0, 0, 1) is None
    assert client.call("V.FETCH", ns, 0, "RANGE", 0, 8, "FMT", "PACKED") is None


def test_zero_filled_native_rows_are_half_words(filling: ServerProcess, ns: bytes) -> None:
    client = filling.client()
    create(client, ns, "fp16")
    rows = values(1, 2, DIM)
    store(client, ns, 0, 1, rows)
    short = info(client)["vstore_short_fetches"]
    native = client.call("V.FETCH", ns, 0, "RANGE", 0, 4, "FMT", "NATIVE")
    assert native == padded(rows, 1, 1).astype(np.float16).tobytes()
    assert info(client)["vstore_short_fetches"] == short + 1


def test_zero_fill_of_a_whole_empty_range_takes_no_memory(
    filling: ServerProcess, ns: bytes
) -> None:
    """A million rows of zeros are made while they are sent, not before."""
    client: Any = filling.client()
    create(client, ns, "fp16", 512)
    store(client, ns, 0, 0, values(1, 1, 512))

    def peak() -> int:
        return int(lines(client.call("INFO", "memory").split(b"\r\n", 1)[1])["used_memory_peak"])

    before = peak()
    client.send(client.pack("V.FETCH", ns, 0, "RANGE", 0, 1_048_576))
    head = client.socket.recv(16)
    assert head.startswith(b"$2147483648")
    client.close()
    client = filling.client()
    assert peak() - before < 64 << 20


def test_the_last_row_of_the_last_layer_and_the_widest_row_are_kept(
    client: RawClient, ns: bytes
) -> None:
    """WIRE.md 3: 1,048,576 rows a layer, 256 layers, 8192 values a row."""
    create(client, ns, "fp32", 1)
    row = np.array([[7.5]], dtype=np.float32)
    store(client, ns, 255, 1_048_575, row)
    assert client.call("V.FETCH", ns, 255, "RANGE", 1_048_575, 1_048_576) == row.tobytes()
    assert client.call("V.FETCH", ns, 255, 1_048_575) == row.tobytes()
    shown = lines(client.call("V.INFO", ns))
    assert (shown["num_layers"], shown["layer_255_tokens"]) == ("256", "1048576")
    create(client, ns + b"wide", "fp32", 8192)
    wide = values(1, 2, 8192)
    store(client, ns + b"wide", 0, 0, wide)
    assert client.call("V.FETCH", ns + b"wide", 0, "RANGE", 0, 2) == wide.tobytes()


def test_a_fetch_may_name_any_number_of_ids(client: RawClient, ns: bytes) -> None:
    rows = values(1, 1000, 1)
    create(client, ns, "fp32", 1)
    store(client, ns, 0, 0, rows)
    ids = np.random.default_rng(2).integers(0, 1000, 50_000)
    data = client.call("V.FETCH", ns, 0, *map(int, ids))
    assert data == rows[ids].tobytes()
