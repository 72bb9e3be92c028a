"""KV.PREFIX.LEND: whole prefixes as descriptors over the Unix socket."""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

from pion_server.errors import CommandError
from pion_server.store import lending, tensor_file
from pion_server.store.final_file import make_final_file
from pion_server.store.lending import BlobWanted, Lending, LendRequest, RowsWanted
from pion_server.store.opening import StoreOptions, Stores, open_stores
from pion_server.store.schema import uniform
from pion_server.store.tensor_file import Part
from tests.conftest import RawClient, ReplyError

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

Start = Callable[..., "ServerProcess"]
HEADS, WIDTH, ROWS = 2, 32, 5
DIM = HEADS * WIDTH


class UnixClient(RawClient):
    """A raw connection to the Unix socket that keeps the descriptors it is sent."""

    def __init__(self, path: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self._data = b""
        self.files: list[int] = []

    def _more(self, n: int) -> None:
        piece, ancillary, _, _ = self.socket.recvmsg(n, 1024)
        for _, _, data in ancillary:
            self.files += array.array("i", data)
        assert piece, "closed inside a reply"
        self._data += piece


@pytest.fixture
def unix(running: ServerProcess) -> Iterator[UnixClient]:
    client = UnixClient(running.client().call("PION.SOCKET")[0])
    yield client
    client.close()
    for fd in client.files:
        os.close(fd)


def rows_of(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((ROWS, DIM), dtype=np.float32)


def checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def fill(client: RawClient, ns: bytes, seed: int = 1, blob: bytes = b"state") -> tuple[int, str]:
    """One layer of K and V and one blob under a manifest: the generation, and the layout."""
    gen = client.call("KV.PREFIX.META", ns, "BEGIN")
    assert client.call("KV.PREFIX.REGISTER", ns, DIM, "fp32") == "OK"
    lines = []
    for at, side in enumerate("kv"):
        data = rows_of(seed + at).tobytes()
        sid = ns + b"_p" + side.encode()
        assert client.call("V.STOREBATCH", sid, 0, 0, ROWS, data, "GEN", gen) == "OK"
        lines.append(f"{side} 0 {ROWS} {checksum(data)} {HEADS} F32:{WIDTH}")
    assert client.call("SSM.PREFIX.STORE", ns, 3, blob, "GEN", gen) == "OK"
    lines.append(f"s 3 {len(blob)} {checksum(blob)}")
    assert client.call("KV.PREFIX.META", ns, "SET", gen, b"manifest") == "OK"
    return gen, "\n".join(lines)


def borrow(client: UnixClient, ns: bytes, seconds: float = 20.0) -> tuple[list[Any], int]:
    """The reply and the descriptor, once the file is made."""
    ends = time.monotonic() + seconds
    while (reply := client.call("KV.PREFIX.LEND", ns)) is None:
        assert time.monotonic() < ends, "no file was made"
        time.sleep(0.02)
    return reply, client.files[-1]


def tensors(fd: int) -> dict[str, np.ndarray[Any, Any]]:
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        start, end = entry["data_offsets"]
        dtype = {"F32": np.float32, "U8": np.uint8}[entry["dtype"]]
        body = data[8 + size + start : 8 + size + end]
        found[name] = np.frombuffer(body, dtype).reshape(entry["shape"])
    return found


def test_a_prefix_comes_as_one_file_head_major_with_its_state(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    assert unix.call("KV.PREFIX.LEND", ns) is None
    assert unix.files == []
    assert unix.call("KV.PREFIX.LEND", ns, gen, layout) == "OK"
    (found_gen, nbytes, digest), fd = borrow(unix, ns)
    assert found_gen == gen
    assert len(digest) == 16
    status = os.fstat(fd)
    assert status.st_size == nbytes
    held = tensors(fd)
    assert held["s.3"].tobytes() == b"state"
    for at, side in enumerate("kv"):
        turned = rows_of(1 + at).reshape(ROWS, HEADS, WIDTH).swapaxes(0, 1)[None]
        assert np.array_equal(held[f"{side}.0.0"], turned)


def test_state_that_is_lent_is_used(unix: UnixClient, ns: bytes) -> None:
    """A namespace of state alone: eviction takes those first that nobody was lent, either."""
    gen = unix.call("KV.PREFIX.META", ns, "BEGIN")
    assert unix.call("SSM.PREFIX.STORE", ns, 3, b"state", "GEN", gen) == "OK"
    assert unix.call("KV.PREFIX.META", ns, "SET", gen, b"manifest") == "OK"
    layout = f"s 3 5 {checksum(b'state')}"
    assert unix.call("KV.PREFIX.LEND", ns, gen, layout) == "OK"
    _, fd = borrow(unix, ns)
    assert tensors(fd)["s.3"].tobytes() == b"state"
    time.sleep(0.3)
    ((_, _, _, _, before),) = unix.call("KV.PREFIX.LIST", ns)
    borrow(unix, ns)
    ((_, _, _, _, after),) = unix.call("KV.PREFIX.LIST", ns)
    assert after < before


def test_room_is_rows_of_zeros_behind_those_of_each_head(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    roomy = layout.replace(f"k 0 {ROWS} ", f"k 0 {ROWS}+3 ")
    assert unix.call("KV.PREFIX.LEND", ns, gen, roomy) == "OK"
    (_, nbytes, _), fd = borrow(unix, ns)
    assert os.fstat(fd).st_size == nbytes
    held = tensors(fd)
    turned = rows_of(1).reshape(ROWS, HEADS, WIDTH).swapaxes(0, 1)[None]
    assert held["k.0.0"].shape == (1, HEADS, ROWS + 3, WIDTH)
    assert np.array_equal(held["k.0.0"][:, :, :ROWS], turned)
    assert not held["k.0.0"][:, :, ROWS:].any()
    assert held["v.0.0"].shape == (1, HEADS, ROWS, WIDTH)
    assert held["s.3"].tobytes() == b"state"


def test_nobody_can_write_to_a_lent_file_and_it_has_no_name(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    unix.call("KV.PREFIX.LEND", ns, gen, layout)
    _, fd = borrow(unix, ns)
    status = os.fstat(fd)
    assert (status.st_nlink, stat.S_IMODE(status.st_mode)) == (0, 0o400)
    assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    for change in (lambda: os.ftruncate(fd, 10), lambda: os.write(fd, b"x")):
        with pytest.raises(OSError) as refusal:
            change()
        assert refusal.value.errno in (errno.EINVAL, errno.EBADF)


def block_sums(rows: int) -> str:
    """The checksums of blocks of so many rows over both sides, as `fill` stores them."""
    sides = [rows_of(1), rows_of(2)]
    return "".join(
        checksum(b"".join(side[at : at + rows].tobytes() for side in sides))
        for at in range(0, ROWS, rows)
    )


def in_blocks(layout: str, rows: int, sums: str) -> str:
    """The layout with checksums of blocks in the place of those of layers."""
    for at in (1, 2):
        layout = layout.replace(checksum(rows_of(at).tobytes()), "-")
    return f"b {rows} {sums}\n{layout}"


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_rows_are_also_checked_in_blocks_over_all_layers(
    unix: UnixClient, ns: bytes, rows: int
) -> None:
    gen, layout = fill(unix, ns)
    wanted = in_blocks(layout, rows, block_sums(rows))
    assert unix.call("KV.PREFIX.LEND", ns, gen, wanted) == "OK"
    held = tensors(borrow(unix, ns)[1])
    turned = rows_of(2).reshape(ROWS, HEADS, WIDTH).swapaxes(0, 1)[None]
    assert np.array_equal(held["v.0.0"], turned)


def test_one_wrong_block_is_an_error_for_who_asks_next(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    sums = block_sums(2)
    wrong = sums[:-1] + ("0" if sums[-1] != "0" else "1")
    assert unix.call("KV.PREFIX.LEND", ns, gen, in_blocks(layout, 2, wrong)) == "OK"
    ends = time.monotonic() + 20
    reply: Any = None
    while reply is None and time.monotonic() < ends:
        unix.send(unix.pack("KV.PREFIX.LEND", ns))
        reply = unix.read()
    assert "damaged: block 2" in str(reply)
    assert unix.files == []


def test_every_row_is_covered_by_exactly_one_checksum(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    good = in_blocks(layout, 2, block_sums(2))
    for bad, word in (
        (layout.replace(checksum(rows_of(1).tobytes()), "-"), "either"),
        (f"b 2 {block_sums(2)}\n{layout}", "either"),
        (good.replace(block_sums(2), block_sums(3)), "number of checksums"),
        (good.replace(block_sums(2), block_sums(2)[:-3]), "16 hex digits"),
        (good.replace("b 2 ", "b 0 "), "rows of a block"),
        (f"{good}\nb 2 {block_sums(2)}", "once, b"),
    ):
        assert word in unix.error("KV.PREFIX.LEND", ns, gen, bad), bad


def test_a_file_stays_readable_past_store_drop_and_save(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    unix.call("KV.PREFIX.LEND", ns, gen, layout)
    _, fd = borrow(unix, ns)
    before = tensors(fd)["k.0.0"]
    fill(unix, ns, seed=9)
    assert unix.call("KV.PREFIX.LEND", ns) is None, "rows of another fill are not lent"
    assert unix.call("KV.PREFIX.SAVE") == "OK"
    assert unix.call("KV.PREFIX.DROP", ns) == 1
    assert unix.call("KV.PREFIX.LEND", ns) is None
    assert np.array_equal(tensors(fd)["k.0.0"], before)


def test_save_and_compaction_take_no_file_away(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    unix.call("KV.PREFIX.LEND", ns, gen, layout)
    reply, _ = borrow(unix, ns)
    assert unix.call("KV.PREFIX.SAVE") == "OK"
    assert unix.call("KV.PREFIX.LEND", ns) == reply


def test_a_layout_of_another_fill_is_stale(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    assert unix.error("KV.PREFIX.LEND", ns, gen + 1, layout).startswith("STALE")
    unix.call("V.STOREBATCH", ns + b"_pk", 0, 0, ROWS, rows_of(7).tobytes())
    assert unix.error("KV.PREFIX.LEND", ns, gen, layout).startswith("STALE")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda text: text.replace("F32:32", "F32:31"), "parts"),
        (lambda text: text.replace(f" {ROWS} ", f" {ROWS + 1} ", 1), "not found"),
        (lambda text: text.replace("s 3 5", "s 3 6"), "not found"),
        (lambda text: text.replace("s 3 5 ", "s 3 5 0000000000000000", 1)[:-16], "damaged"),
        (lambda text: text.replace(checksum(rows_of(1).tobytes()), "0" * 16), "damaged"),
    ],
    ids=["widths", "rows", "state", "state checksum", "rows checksum"],
)
def test_what_does_not_add_up_is_an_error_for_who_asks_next(
    unix: UnixClient, ns: bytes, change: Callable[[str], str], word: str
) -> None:
    gen, layout = fill(unix, ns)
    assert unix.call("KV.PREFIX.LEND", ns, gen, change(layout)) == "OK"
    ends = time.monotonic() + 20
    reply: Any = None
    while reply is None and time.monotonic() < ends:
        unix.send(unix.pack("KV.PREFIX.LEND", ns))
        reply = unix.read()
    assert isinstance(reply, ReplyError)
    assert word in str(reply)
    assert unix.files == []


@pytest.mark.parametrize(
    "layout",
    [
        "",
        "x 0",
        "k 0 1",
        "k 0 5 zz 2 F32:32",
        "k 0 5 0123456789abcdef 2 F31:32",
        "k 0 5+ 0123456789abcdef 2 F32:32",
        "k 0 5+0 0123456789abcdef 2 F32:32",
        "k 0 5+4097 0123456789abcdef 2 F32:32",
        "k -1 5 0 2 F32:1",
    ],
)
def test_a_malformed_layout_is_refused_at_once(unix: UnixClient, ns: bytes, layout: str) -> None:
    gen, _ = fill(unix, ns)
    assert unix.error("KV.PREFIX.LEND", ns, gen, layout).startswith("ERR")


def test_a_layout_naming_a_layer_twice_is_refused(unix: UnixClient, ns: bytes) -> None:
    gen, layout = fill(unix, ns)
    assert "once" in unix.error("KV.PREFIX.LEND", ns, gen, layout + "\n" + layout)


def test_no_descriptor_over_tcp(client: RawClient, ns: bytes) -> None:
    fill(client, ns)
    assert "Unix socket" in client.error("KV.PREFIX.LEND", ns)


def test_the_unix_socket_wants_the_password_like_every_door(server: Start) -> None:
    """G01: no path and no descriptor without authentication."""
    running = server("--requirepass", "secret")
    assert running.client().error("PION.SOCKET").startswith("NOAUTH")
    unix = UnixClient(os.fsencode(running.directory / "pion.sock"))
    assert unix.error("PION.SOCKET").startswith("NOAUTH")
    assert unix.error("KV.PREFIX.LEND", "ns").startswith("NOAUTH")
    assert unix.call("AUTH", "secret") == "OK"
    assert unix.call("PION.SOCKET")[0] == os.fsencode(running.directory.resolve() / "pion.sock")
    unix.close()


def test_nobody_is_lent_what_is_another_tenants(server: Start, ns: bytes) -> None:
    """I03: the same name and the same layout, two tenants and the admin."""
    running = server("--requirepass", "root", "--tenant", "a=pa", "--tenant", "b=pb")
    path = os.fsencode(running.directory / "pion.sock")
    a, b, admin = UnixClient(path), UnixClient(path), UnixClient(path)
    assert a.call("AUTH", "a", "pa") == b.call("AUTH", "b", "pb") == "OK"
    assert admin.call("AUTH", "root") == "OK"
    gen, layout = fill(a, ns)
    a.call("KV.PREFIX.LEND", ns, gen, layout)
    borrow(a, ns)
    for other in (b, admin):
        assert other.call("KV.PREFIX.LEND", ns) is None
        assert other.error("KV.PREFIX.LEND", ns, gen, layout).startswith("STALE")
        assert other.files == []
    other_gen, other_layout = fill(b, ns, seed=8)
    b.call("KV.PREFIX.LEND", ns, other_gen, other_layout)
    assert not np.array_equal(
        tensors(borrow(b, ns)[1])["k.0.0"], tensors(borrow(a, ns)[1])["k.0.0"]
    )
    for client in (a, b, admin):
        client.close()


def test_the_socket_is_private_answers_resp_and_goes_with_the_server(server: Start) -> None:
    running = server()
    path = running.directory / "pion.sock"
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    unix = UnixClient(os.fsencode(path))
    assert unix.call("PING") == "PONG"
    assert "unix:0" in unix.call("CLIENT", "INFO").decode()
    unix.close()
    running.kill()
    assert path.exists()
    running.restart()
    unix = UnixClient(os.fsencode(path))
    assert unix.call("PING") == "PONG", "a socket left by a killed server is replaced"
    unix.close()
    assert running.stop() == 0
    assert not path.exists()


def test_a_named_socket_and_none(server: Start, tmp_path: Path) -> None:
    named = server("--unixsocket", str(tmp_path / "s"))
    assert named.client().call("PION.SOCKET")[0] == os.fsencode(tmp_path.resolve() / "s")
    assert server("--unixsocket", "none").client().call("PION.SOCKET") is None


def test_a_data_directory_with_a_long_path_serves_without_a_socket(
    server: Start, tmp_path: Path
) -> None:
    directory = tmp_path / ("d" * 100)
    running = server(directory=directory)
    assert running.client().call("PION.SOCKET") is None
    assert "too long" in running.errors.read_text()


def test_a_socket_path_that_cannot_be_had_is_refused(server: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path, word in ((tmp_path / "file", "no socket"), (tmp_path / ("x" * 104), "too long")):
        with pytest.raises(AssertionError, match="did not get ready") as failure:
            server("--unixsocket", str(path))
        assert word in str(failure.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    opened = open_stores(StoreOptions(tmp_path / "data"))
    yield opened
    opened.close()


def request_for(stores: Stores, ns: bytes, *, blob: bytes = b"", room: int = 0) -> LendRequest:
    """A stored prefix of one layer, and the request for its file."""
    owner = object()
    schema = uniform("fp32", DIM)
    gen = stores.vstore.manifests.begin(ns, owner)
    stores.vstore.register(ns, (schema, schema), owner=owner)
    data = rows_of(1).tobytes()
    for side in (b"_pk", b"_pv"):
        stores.vstore.store(ns + side, 0, 0, ROWS, data, gen=gen, owner=owner)
    blobs: tuple[BlobWanted, ...] = ()
    if blob:
        stores.ssm.store(ns, 0, blob, gen=gen, owner=owner)
        blobs = (BlobWanted(0, len(blob), checksum(blob)),)
    stores.vstore.manifests.set(ns, gen, b"m")
    part = (Part(".0", "F32", HEADS, WIDTH),)
    rows = tuple(RowsWanted(side, 0, ROWS, checksum(data), part, room) for side in "kv")
    return LendRequest(ns, gen, b"layout", rows, blobs)


def make(lent: Lending, request: LendRequest) -> None:
    assert lent.begin(request)
    lent.make(request)


@pytest.mark.parametrize("window", [0, 100, 700, 1500])
def test_a_file_is_the_same_however_much_of_it_is_put_together_in_memory(
    stores: Stores, tmp_path: Path, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_for(stores, b"a", blob=b"state", room=2)
    whole = Lending(stores.vstore, stores.ssm, tmp_path)
    make(whole, request)
    expected = whole.find(b"a")
    monkeypatch.setattr(tensor_file, "WINDOW_BYTES", window)
    pieced = Lending(stores.vstore, stores.ssm, tmp_path)
    make(pieced, request)
    found = pieced.find(b"a")
    assert expected is not None
    assert found is not None
    read = [os.pread(one.file.fileno(), one.nbytes + 1, 0) for one in (expected, found)]
    assert len(read[0]) == expected.nbytes
    assert read[0] == read[1]


def test_the_budget_keeps_the_files_used_last(stores: Stores, tmp_path: Path) -> None:
    one, two, three = (request_for(stores, name) for name in (b"a", b"b", b"c"))
    lent = Lending(stores.vstore, stores.ssm, tmp_path / "x", budget=2 * 7000)
    make(lent, one)
    make(lent, two)
    assert lent.find(b"a") is not None
    make(lent, three)
    assert lent.find(b"a") is not None
    assert lent.find(b"b") is None
    assert lent.held[0] == 2


def test_a_file_over_the_budget_is_an_error_for_a_while(stores: Stores, tmp_path: Path) -> None:
    now = [0.0]
    lent = Lending(stores.vstore, stores.ssm, tmp_path / "x", budget=100, clock=lambda: now[0])
    request = request_for(stores, b"a")
    make(lent, request)
    with pytest.raises(CommandError, match="budget"):
        lent.find(b"a")
    assert not lent.begin(request)
    now[0] = 60.0
    assert lent.find(b"a") is None
    assert lent.begin(request)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_cannot_take_the_file_is_an_error(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(lending, "make_final_file", fail)
    lent = Lending(stores.vstore, stores.ssm, tmp_path / "x")
    make(lent, request_for(stores, b"a"))
    with pytest.raises(CommandError, match="cannot write"):
        lent.find(b"a")


def test_a_disk_with_little_room_left_is_full(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log needs what is left more than the file does."""
    real = os.fstatvfs

    def little(fd: int) -> os.statvfs_result:
        fields = list(real(fd))
        fields[4] = 1
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", little)
    lent = Lending(stores.vstore, stores.ssm, tmp_path / "x")
    make(lent, request_for(stores, b"a"))
    with pytest.raises(CommandError, match="No space"):
        lent.find(b"a")
    assert list((tmp_path / "x").iterdir()) == []


def test_a_prefix_that_changes_while_its_file_is_made_is_not_lent(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = Lending(stores.vstore, stores.ssm, tmp_path / "x")
    request = request_for(stores, b"a", blob=b"state")
    real = make_final_file

    def make_and_change(*args: Any) -> Any:
        made = real(*args)
        request_for(stores, b"a")
        return made

    monkeypatch.setattr(lending, "make_final_file", make_and_change)
    make(lent, request)
    assert lent.find(b"a") is None
    assert lent.held == (0, 0)
