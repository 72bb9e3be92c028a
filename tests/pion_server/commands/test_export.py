"""V.EXPORT: safetensors files for clients on the same machine (WIRE.md 4.6)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_server.errors import CommandError
from pion_server.formats import InputType, format_names, make_format
from pion_server.store.export import ExportRequest, Exports
from pion_server.store.opening import StoreOptions, open_stores
from pion_server.store.schema import uniform
from tests.pion_server.commands.checks import Word, receipt, refuse, store, values

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

HEADS, HEAD_DIM, ROWS, LAYERS = 2, 32, 7, 3
DIM = HEADS * HEAD_DIM
SHAPE: tuple[Word, ...] = (0, ROWS, LAYERS, HEADS, HEAD_DIM)
Start = Callable[..., "ServerProcess"]


def fill(client: RawClient, ns: bytes, fmt: str = "fp16") -> None:
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, fmt) == "OK"
    for layer in range(LAYERS):
        for at, side in enumerate((b"_pk", b"_pv")):
            store(client, ns + side, layer, 0, values(2 * layer + at, ROWS, DIM))


def export(client: RawClient, ns: bytes, *words: Word) -> Path:
    path = client.call("V.EXPORT", ns + b"_pk", ns + b"_pv", *(words or SHAPE))
    assert isinstance(path, bytes)
    assert os.path.isabs(path)
    return Path(os.fsdecode(path))


def tensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """The file parsed by hand: the format is eight bytes, JSON and data."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 4096 == 0
    header = json.loads(data[8 : 8 + size])
    found, end = {}, 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end, "tensors follow one another in the order of the header"
        end = stop
        found[name] = (entry["dtype"], entry["shape"], data[8 + size + start : 8 + size + stop])
    assert 8 + size + end == len(data)
    return found


def head_major(rows: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(rows.reshape(len(rows), HEADS, -1).transpose(1, 0, 2))[None]


def test_the_file_holds_every_layer_head_major(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    found = tensors(export(client, ns))
    assert list(found) == ["k.0", "v.0", "k.1", "v.1", "k.2", "v.2"]
    for number, (dtype, shape, data) in enumerate(found.values()):
        assert (dtype, shape) == ("F16", [1, HEADS, ROWS, HEAD_DIM])
        rows = values(number, ROWS, DIM).astype(np.float16)
        assert data == head_major(rows).tobytes()


def test_mlx_and_safetensors_load_it(client: RawClient, ns: bytes) -> None:
    mx = pytest.importorskip("mlx.core")
    safetensors = pytest.importorskip("safetensors.numpy")
    fill(client, ns)
    path = export(client, ns, 2, 6, 2, HEADS, HEAD_DIM)
    loaded, other = mx.load(str(path)), safetensors.load_file(path)
    assert set(loaded) == set(other) == {"k.0", "v.0", "k.1", "v.1"}
    for number, name in enumerate(["k.0", "v.0", "k.1", "v.1"]):
        rows = head_major(values(number, ROWS, DIM).astype(np.float16)[2:6])
        assert loaded[name].shape == (1, HEADS, 4, HEAD_DIM)
        assert np.array(loaded[name]).tobytes() == other[name].tobytes() == rows.tobytes()


@pytest.mark.parametrize("fmt", [n for n in format_names() if n not in ("raw",)])
def test_other_formats_are_decoded_to_halves(client: RawClient, ns: bytes, fmt: str) -> None:
    rope = 32 if fmt == "bf16_rope_fp8_body" else 0
    spec = f"fmt={fmt},dim={DIM}" + (",rope=32" if rope else "")
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 1, spec, spec)
    for side in (b"_pk", b"_pv"):
        store(client, ns + side, 0, 0, values(1, ROWS, DIM))
    form = make_format(fmt, DIM, rope)
    decoded = form.decode(form.encode(values(1, ROWS, DIM).tobytes(), ROWS, InputType.F32))
    found = tensors(export(client, ns, 0, ROWS, 1, HEADS, HEAD_DIM))
    for name in ("k.0", "v.0"):
        assert found[name][0] == "F16"
        assert found[name][2] == head_major(decoded.astype(np.float16)).tobytes()


def test_every_half_pattern_is_exported_bit_by_bit(client: RawClient, ns: bytes) -> None:
    bits = np.arange(65536, dtype=np.uint16).reshape(-1, DIM)
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    for side in (b"_pk", b"_pv"):
        client.call("V.STOREBATCH", ns + side, 0, 0, 1024, bits.tobytes(), "FMT", "F16")
    found = tensors(export(client, ns, 0, 1024, 1, HEADS, HEAD_DIM))
    assert found["k.0"][2] == head_major(bits).tobytes()


def test_large_layers_are_written_in_pieces(client: RawClient, ns: bytes) -> None:
    """More rows than one step holds, several batches a layer, an overwrite among them."""
    heads, dim, count = 4, 64, 12_000
    rows = values(1, count, heads * dim).astype(np.float16)
    client.call("KV.PREFIX.REGISTER", ns, heads * dim, "fp16")
    for side in (b"_pk", b"_pv"):
        for start in (0, 5000, 3000, 8000):
            part = rows[start : start + 5000]
            words = (0, start, len(part), part.tobytes(), "FMT", "F16")
            client.call("V.STOREBATCH", ns + side, *words)
    found = tensors(export(client, ns, 0, count, 1, heads, dim))
    expected = np.ascontiguousarray(rows.reshape(count, heads, dim).transpose(1, 0, 2))
    assert found["v.0"][2] == expected.tobytes()


def test_stored_keeps_each_format(client: RawClient, ns: bytes) -> None:
    """mlx4g32 as MLX's three arrays, float formats as they are, the rest as packed rows."""
    widths = {"fp16": DIM, "bf16": DIM, "fp32": DIM, "mlx4g32": DIM, "int8": DIM, "raw": 24}
    specs = [f"fmt={fmt},dim={width}" for fmt, width in widths.items()]
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, len(specs), *specs, *specs)
    packed = {}
    for layer, (fmt, width) in enumerate(widths.items()):
        for side in (b"_pk", b"_pv"):
            if fmt == "raw":
                blob = bytes(range(ROWS * 24))
                client.call("V.STOREBATCH", ns + side, layer, 0, ROWS, blob, "FMT", "PACKED")
            else:
                store(client, ns + side, layer, 0, values(layer, ROWS, width))
        packed[layer] = client.call(
            "V.FETCH", ns + b"_pk", layer, "RANGE", 0, ROWS, "FMT", "PACKED"
        )
    words: tuple[Word, ...] = (0, ROWS, len(specs), HEADS, HEAD_DIM)
    refuse(client, "V.EXPORT", ns + b"_pk", ns + b"_pv", *words, text="STORED")
    found = tensors(export(client, ns, *words, "fmt", "stored"))
    for layer, (dtype, item) in enumerate([("F16", "u2"), ("BF16", "u2"), ("F32", "u4")]):
        rows = np.frombuffer(packed[layer], item).reshape(ROWS, DIM)
        shape = [1, HEADS, ROWS, HEAD_DIM]
        assert found[f"k.{layer}"] == (dtype, shape, head_major(rows).tobytes())
    rows = np.frombuffer(packed[3], "u1").reshape(ROWS, -1)
    for name, dtype, width, part in (
        ("codes", "U32", HEAD_DIM // 8, rows[:, : DIM // 2]),
        ("scales", "F16", HEAD_DIM // 32, rows[:, DIM // 2 : DIM // 2 + DIM // 16]),
        ("biases", "F16", HEAD_DIM // 32, rows[:, DIM // 2 + DIM // 16 :]),
    ):
        shape = [1, HEADS, ROWS, width]
        assert found[f"k.3.{name}"] == (dtype, shape, head_major(part).tobytes())
    assert found["k.4"] == ("U8", [1, 1, ROWS, DIM + 8], packed[4])
    assert found["k.5"] == ("U8", [1, 1, ROWS, 24], packed[5])
    assert list(found)[:8] == [f"{s}.{n}" for n in range(3) for s in "kv"] + [
        "k.3.codes",
        "k.3.scales",
    ]


def test_stored_rows_of_another_width_are_one_head(client: RawClient, ns: bytes) -> None:
    client.call("KV.PREFIX.REGISTER.SCHEMA", ns, 1, "fmt=fp16,dim=96", "fmt=mlx4g32,dim=96")
    for side in (b"_pk", b"_pv"):
        store(client, ns + side, 0, 0, values(1, ROWS, 96))
    words: tuple[Word, ...] = (0, ROWS, 1, HEADS, HEAD_DIM)
    refuse(client, "V.EXPORT", ns + b"_pk", ns + b"_pv", *words, text="layer 0 holds 96")
    found = tensors(export(client, ns, *words, "FMT", "STORED"))
    rows = values(1, ROWS, 96).astype(np.float16)
    assert found["k.0"] == ("F16", [1, 1, ROWS, 96], rows.tobytes())
    assert found["v.0.codes"][:2] == ("U32", [1, 1, ROWS, 12])


def test_stored_mlx4g32_is_what_mlx_dequantises(client: RawClient, ns: bytes) -> None:
    mx = pytest.importorskip("mlx.core")
    fill(client, ns, "mlx4g32")
    loaded = mx.load(str(export(client, ns, *SHAPE, "FMT", "STORED")))
    parts = [loaded[f"k.0.{name}"] for name in ("codes", "scales", "biases")]
    wide = mx.dequantize(*parts, group_size=32, bits=4).astype(mx.float32)
    data = client.call("V.FETCH", ns + b"_pk", 0, "RANGE", 0, ROWS)
    rows = np.frombuffer(data, np.float32).reshape(ROWS, DIM)
    assert np.abs(np.array(wide) - head_major(rows)).max() < 2e-3


def test_modes_keep_others_out(running: ServerProcess, client: RawClient, ns: bytes) -> None:
    """I06: and no name of a session is part of a file's name."""
    ns = b"../../" + ns + b"\0\n"
    fill(client, ns)
    path = export(client, ns)
    assert path.parent == (running.directory / "pion-export").resolve()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(path.parent.glob(".tmp-*"))


def test_the_same_request_answers_the_same_path(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    path = export(client, ns)
    inode = path.stat().st_ino
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    client.call("V.CREATE", ns + b"_pk", DIM, "VQUANT", "fp16")
    client.call("V.FETCH", ns + b"_pk", "BATCH", 0, 2)
    assert export(client, ns) == path
    assert path.stat().st_ino == inode
    others = {
        export(client, ns, 0, ROWS - 1, LAYERS, HEADS, HEAD_DIM),
        export(client, ns, 0, ROWS, 1, HEADS, HEAD_DIM),
        export(client, ns, 0, ROWS, LAYERS, 1, DIM),
        export(client, ns, *SHAPE, "FMT", "STORED"),
        path,
    }
    assert len(others) == 5
    assert all(other.exists() for other in others)


@pytest.mark.parametrize(
    "change",
    [
        ("V.STOREBATCH", "K", 0, 0, 1, bytes(DIM * 4)),
        ("V.STOREBATCH", "V", 9, 0, 1, bytes(DIM * 4)),
        ("V.RESTORE", "K", "SNAPSHOT"),
        ("KV.PREFIX.REGISTER", "NS", DIM, "int8"),
        ("KV.PREFIX.DROP", "NS"),
        ("V.DROP", "V"),
    ],
)
def test_a_changed_session_takes_its_files_along(
    client: RawClient, ns: bytes, change: tuple[Word, ...]
) -> None:
    client.call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    number = client.call("V.SNAPSHOT", ns + b"_pk")
    fill(client, ns)
    fill(client, ns + b"2")
    path, other = export(client, ns), export(client, ns + b"2")
    held = path.open("rb")
    before = held.read()
    names: dict[Word, Word] = {"NS": ns, "K": ns + b"_pk", "V": ns + b"_pv", "SNAPSHOT": number}
    client.call(*(names.get(word, word) for word in change))
    assert not path.exists()
    assert other.exists()
    held.seek(0)
    assert held.read() == before, "who has opened it keeps its bytes"
    held.close()
    if change[0] == "V.STOREBATCH":
        again = export(client, ns)
        assert again != path
        assert (again.read_bytes() != before) == (change[1] == "K")


def test_a_deleted_file_is_written_again(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    path = export(client, ns)
    expected = path.read_bytes()
    path.unlink()
    again = export(client, ns)
    assert again.read_bytes() == expected
    for file in again.parent.iterdir():
        file.unlink()
    again.parent.rmdir()
    assert export(client, ns).read_bytes() == expected


def test_served_bytes_are_counted_each_time(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    for _ in range(2):
        before = receipt(client)["kvprefix_bytes_served"]
        export(client, ns)
        data = 2 * LAYERS * ROWS * DIM * 2
        assert receipt(client)["kvprefix_bytes_served"] - before == data


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "requires: <k_sid> <v_sid>"),
        ((0, 7, 3, 2), "requires: <k_sid> <v_sid>"),
        ((0, 7, 3, 2, 32, "FMT"), "FMT STORED"),
        ((0, 7, 3, 2, 32, "FMT", "F16"), "FMT STORED"),
        ((0, 7, 3, 2, 32, "FMT", "STORED", 1), "requires"),
        ((7, 7, 3, 2, 32), "invalid range"),
        ((5, 2, 3, 2, 32), "invalid range"),
        ((-1, 7, 3, 2, 32), "invalid range"),
        ((0, 1_048_577, 3, 2, 32), "invalid range"),
        (("x", 7, 3, 2, 32), "invalid integer"),
        ((0, 7, 0, 2, 32), "num_layers"),
        ((0, 7, -1, 2, 32), "num_layers"),
        ((0, 7, 3, 0, 32), "n_kv_heads"),
        ((0, 7, 3, 2, 0), "head_dim"),
        ((0, 7, 3, 2, -32), "head_dim"),
        ((0, 7, 4, 2, 32), "num_layers 4 exceeds"),
        ((0, 7, 3, 2, 16), "layer 0 holds 64"),
        ((0, 7, 3, 3, 32), "layer 0 holds 64"),
        ((0, 8, 3, 2, 32), "never written"),
        ((7, 9, 3, 2, 32), "never written"),
        ((0, 8, 3, 2, 32, "FMT", "STORED"), "never written"),
    ],
)
def test_refusals_leave_no_file(
    running: ServerProcess, client: RawClient, ns: bytes, words: tuple[Word, ...], text: str
) -> None:
    fill(client, ns)
    directory = running.directory / "pion-export"
    before = sorted(directory.iterdir()) if directory.exists() else []
    refuse(client, "V.EXPORT", ns + b"_pk", ns + b"_pv", *words, text=text)
    assert (sorted(directory.iterdir()) if directory.exists() else []) == before


def test_unknown_sessions_and_gaps_are_refused(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    for sids in ((ns + b"x_pk", ns + b"_pv"), (ns + b"_pk", ns + b"x_pv")):
        refuse(client, "V.EXPORT", *sids, *SHAPE, text="ERR session not found")
    refuse(client, "V.EXPORT", b"", ns + b"_pv", *SHAPE, text="sid")
    refuse(client, "V.EXPORT", ns + b"_pk", b"", *SHAPE, text="sid")
    store(client, ns + b"_pv", 4, 0, values(1, ROWS, DIM))
    store(client, ns + b"_pk", 4, 0, values(1, ROWS, DIM))
    words: tuple[Word, ...] = (0, ROWS, 5, HEADS, HEAD_DIM)
    refuse(client, "V.EXPORT", ns + b"_pk", ns + b"_pv", *words, text="never written")


def test_it_touches_both_sessions(server: Start, ns: bytes) -> None:
    client = server("--vstore-sessions", "4").client()
    for name in (b"a", b"b"):
        fill(client, ns + name)
    for _ in range(2):
        path = export(client, ns + b"a")
        client.call("KV.PREFIX.REGISTER", ns + b"c", DIM, "fp16")
        assert client.call("KV.PREFIX.OWNER", ns + b"a") == "0"
        client.call("KV.PREFIX.DROP", ns + b"c")
        fill(client, ns + b"b")
    for name in (b"c", b"d"):
        client.call("KV.PREFIX.REGISTER", ns + name, DIM, "fp16")
    assert not path.exists(), "eviction removes the file"


def test_the_budget_keeps_the_files_used_last(server: Start, ns: bytes) -> None:
    size = 4096 + 2 * LAYERS * ROWS * DIM * 2
    client = server("--export-budget", str(2 * size)).client()
    for name in (b"a", b"b", b"c"):
        fill(client, ns + name)
    first, second = export(client, ns + b"a"), export(client, ns + b"b")
    assert export(client, ns + b"a") == first
    third = export(client, ns + b"c")
    assert [path.exists() for path in (first, second, third)] == [True, False, True]
    big = ns + b"big"
    client.call("KV.PREFIX.REGISTER", big, DIM, "fp16")
    for side in (b"_pk", b"_pv"):
        store(client, big + side, 0, 0, values(1, 200, DIM))
    words: tuple[Word, ...] = (0, 200, 1, HEADS, HEAD_DIM)
    refuse(client, "V.EXPORT", big + b"_pk", big + b"_pv", *words, text="--export-budget")
    assert [path.exists() for path in (first, third)] == [True, True]


def test_a_new_process_removes_what_its_predecessor_left(
    server: Start, ns: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_EXPORT_DIR", str(tmp_path / "exports"))
    first, second = server(), server()
    paths = {}
    for running in (first, second):
        fill(running.client(), ns)
        paths[running.port] = export(running.client(), ns)
    mine, other = paths[first.port], paths[second.port]
    assert mine.parent == other.parent == (tmp_path / "exports").resolve()
    assert mine.parent.stat().st_mode & 0o777 == 0o700
    (mine.parent / f".tmp-{mine.name}").touch()
    (mine.parent / "not-ours.safetensors").touch()
    first.kill()
    first.restart()
    assert mine.exists()
    again = export(first.client(), ns)
    left = {path.name for path in mine.parent.iterdir()}
    assert left == {again.name, other.name, "not-ours.safetensors"}


def test_clients_elsewhere_are_sent_to_fetch(server: Start, ns: bytes, tmp_path: Path) -> None:
    """A peer that is not local, as the wire tells it."""
    extra = tmp_path / "remote.py"
    extra.write_text("import pion_server.wire.server as w\nw.is_local = lambda host: False\n")
    client = server(extra=extra).client()
    fill(client, ns)
    refuse(client, "V.EXPORT", ns + b"_pk", ns + b"_pv", *SHAPE, text="V.FETCH")


def test_others_are_served_while_a_file_is_written(running: ServerProcess, ns: bytes) -> None:
    """Exports wait for one another without a thread each; a session changed meanwhile is seen."""
    clients = [running.client() for _ in range(6)]
    rows = values(1, 20_000, DIM).tobytes()
    clients[0].call("KV.PREFIX.REGISTER", ns, DIM, "fp16")
    for layer in range(4):
        for side in (b"_pk", b"_pv"):
            clients[0].call("V.STOREBATCH", ns + side, layer, 0, 20_000, rows)
    for number, one in enumerate(clients):
        words = (0, 20_000 - number % 3, 4, HEADS, HEAD_DIM)
        one.send(one.pack("V.EXPORT", ns + b"_pk", ns + b"_pv", *words))
    assert running.client().call("PING") == "PONG"
    found = [one.read() for one in clients]
    assert found[:3] == found[3:]
    assert len(set(found)) == 3


REQUEST = ExportRequest(b"s", b"s", 0, 500, 1, HEADS, HEAD_DIM)


def open_exports(tmp_path: Path, directory: Path | None = None) -> tuple[Any, Exports]:
    stores = open_stores(StoreOptions(tmp_path))
    stores.vstore.create(b"s", uniform("fp16", DIM), None)
    stores.vstore.store(b"s", 0, 0, 500, values(1, 500, DIM).tobytes(), owner=None)
    return stores, Exports(stores.vstore, tmp_path, directory=directory)


def test_a_directory_of_others_is_not_used(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    stores, exports = open_exports(tmp_path, shared)
    with pytest.raises(CommandError, match="this user's alone"):
        exports.write(exports.prepare(REQUEST))
    shared.chmod(0o755)
    found = exports.write(exports.prepare(REQUEST))
    assert found is not None
    assert found.path.parent == shared.resolve()
    assert shared.stat().st_mode & 0o777 == 0o700
    exports = Exports(stores.vstore, tmp_path, directory=found.path)
    with pytest.raises(CommandError, match="cannot create"):
        exports.write(exports.prepare(REQUEST))
    stores.close()


def test_a_full_disk_leaves_no_partial_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, exports = open_exports(tmp_path)
    real, calls = os.pwritev, []

    def full(fd: int, views: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        return real(fd, [views[0][:100]], offset)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", full)
        with pytest.raises(CommandError, match="cannot write: No space left"):
            exports.write(exports.prepare(REQUEST))
    assert list((tmp_path / "pion-export").iterdir()) == []
    found = exports.write(exports.prepare(REQUEST))
    assert found is not None
    assert list((tmp_path / "pion-export").iterdir()) == [found.path]
    stores.close()


def test_a_session_that_changes_while_it_is_written_gives_no_file(tmp_path: Path) -> None:
    stores, exports = open_exports(tmp_path)
    draft = exports.prepare(REQUEST)
    stores.vstore.store(b"s", 0, 0, 1, values(2, 1, DIM).tobytes(), owner=None)
    assert exports.write(draft) is None
    assert list((tmp_path / "pion-export").iterdir()) == []
    assert exports.find(REQUEST) is None
    stores.close()


def test_damaged_rows_are_an_error_and_no_file(tmp_path: Path) -> None:
    stores, exports = open_exports(tmp_path)
    log = tmp_path / "pion.vstore.wal.0"
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(CommandError, match="damaged"):
        exports.write(exports.prepare(REQUEST))
    assert list((tmp_path / "pion-export").iterdir()) == []
    stores.close()
