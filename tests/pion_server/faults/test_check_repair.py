"""`--check` and `--repair`: what they say, what they leave, and their exit status."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pion_server.faults import oracle
from tests.pion_server.faults.forge import Forge, ForgedServer, run_flags
from tests.pion_server.faults.load import Ledger, perform
from tests.pion_server.faults.observer import Refused, observe

Servers = Callable[..., ForgedServer]
VALUES = bytes([9, 8, 7, 60]) * (16 * oracle.DIM)


@pytest.fixture
def stopped(forged: Servers) -> ForgedServer:
    """A server that was killed; one prefix lies in the snapshot, `late` in the log."""
    server = forged()
    client = server.client()
    for ns in ("saved", "late"):
        acts = [oracle.register(ns, "fp32"), oracle.store_state(ns, 2, VALUES)]
        perform(client, Ledger(ns), [*acts, oracle.store(ns, "_pk", "fp32", 5, 0, VALUES)])
        if ns == "saved":
            assert client.call("KV.PREFIX.SAVE") == "OK"
    server.kill()
    return server


@pytest.fixture
def examine(
    forge: Forge, stopped: ForgedServer, tmp_path: Path
) -> Callable[[str], tuple[int, list[str]]]:
    def run(flag: str) -> tuple[int, list[str]]:
        status, said, _ = run_flags(forge, [flag, str(stopped.directory)], tmp_path / "said")
        return status, said.splitlines()

    return run


Examine = Callable[[str], tuple[int, list[str]]]


def spoil(path: Path, place: int, data: bytes = b"\x55\x55") -> None:
    with path.open("r+b") as file:
        file.seek(place)
        file.write(data)


def test_a_sound_directory_has_no_problems(stopped: ForgedServer, examine: Examine) -> None:
    before = {path: path.read_bytes() for path in stopped.directory.glob("pion.[vs]s*")}
    for flag in ("--check", "--repair"):
        status, said = examine(flag)
        assert status == 0
        assert re.fullmatch(r"6 files, \d+ records, \d+ bytes: no problems", said[-1])
        assert len(said) == 1
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("pion.vstore.0", "ROWS 'saved_pk' layer 5"),
        ("pion.vstore.wal.0", "ROWS 'late_pk' layer 5"),
        ("pion.ssm.0", "STATE 'saved' layer 2"),
        ("pion.ssm.wal.0", "STATE 'late' layer 2"),
    ],
)
def test_a_damaged_body_is_named_and_left(
    stopped: ForgedServer, examine: Examine, name: str, entry: str
) -> None:
    path = stopped.directory / name
    spoil(path, path.read_bytes().index(VALUES) + 100)
    spoiled = path.read_bytes()
    for flag in ("--check", "--repair"):
        status, said = examine(flag)
        assert status == 1
        assert said[0].startswith(f"{name}: record ")
        assert f"({entry}): stored data is damaged: checksum mismatch" in said[0]
        assert said[-1].endswith("bytes: 1 problem")
        assert path.read_bytes() == spoiled
    stopped.start()
    client = stopped.client()
    ns = re.findall(r"'(\w+?)(?:_pk)?'", entry)[0]
    wrong = [value for value in observe(client, ns).values() if _refused(value)]
    assert len(wrong) == 1
    perform(
        client,
        Ledger(ns),
        [oracle.store(ns, "_pk", "fp32", 5, 0, VALUES), oracle.store_state(ns, 2, VALUES)],
    )
    assert client.call("KV.PREFIX.SAVE") == "OK"
    stopped.kill()
    assert examine("--check")[0] == 0


def _refused(value: object) -> bool:
    return isinstance(value, Refused) or (isinstance(value, tuple) and Refused("") in value)


@pytest.mark.parametrize("second", [False, True])
def test_a_damaged_head_is_no_loss_and_said(
    stopped: ForgedServer, examine: Examine, second: bool
) -> None:
    path = stopped.directory / "pion.vstore.wal.0"
    body = path.read_bytes().index(VALUES)
    spoil(path, body + len(VALUES) + 60 if second else body - 60)
    status, said = examine("--check")
    assert status == 1
    assert said[0] == "pion.vstore.wal.0: 1 records have one damaged head"
    stopped.start()
    assert ("rows", "_pk", 5) in observe(stopped.client(), "late")
    if not second:
        assert "1 records recovered from their second head" in stopped.errors.read_text()


@pytest.mark.parametrize("tail", [bytes(5000), b"half a record"], ids=["zeros", "garbage"])
def test_repair_cuts_a_torn_tail_and_keeps_it(
    stopped: ForgedServer, examine: Examine, tail: bytes
) -> None:
    path = stopped.directory / "pion.vstore.wal.0"
    sound = path.read_bytes()
    path.write_bytes(sound + tail)
    problem = f"pion.vstore.wal.0: torn tail of {len(tail)} bytes at offset {len(sound)}"
    assert examine("--check") == (1, [problem, examine("--check")[1][-1]])
    assert path.read_bytes() == sound + tail
    status, said = examine("--repair")
    assert status == 1
    (kept,) = stopped.directory.glob("pion.vstore.wal.0.cut-*")
    assert said[0] == f"{problem}, cut and kept as {kept.name}"
    assert kept.read_bytes() == tail
    assert kept.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == sound
    assert examine("--check")[0] == 0
    stopped.start()
    assert ("rows", "_pk", 5) in observe(stopped.client(), "late")


def test_a_foreign_file_is_a_problem_and_left(stopped: ForgedServer, examine: Examine) -> None:
    """Such as the public server's: neither served from nor touched."""
    path = stopped.directory / "pion.ssm.0"
    path.write_bytes(b"PIONSS01" + bytes(100))
    status, said = examine("--repair")
    assert status == 1
    assert "not a pion-server record log (it looks like the public Pion server's)" in said[0]
    assert path.read_bytes() == b"PIONSS01" + bytes(100)


def test_a_snapshot_of_another_store_is_refused(
    stopped: ForgedServer, forged: Servers, forge: Forge, tmp_path: Path
) -> None:
    """Numbers of two stores mean nothing to each other: replaying one over the other would lie."""
    other = forged()
    client = other.client()
    perform(client, Ledger("x"), [oracle.register("x", "fp16")])
    assert client.call("KV.PREFIX.SAVE") == "OK"
    other.kill()
    (stopped.directory / "pion.vstore.0").write_bytes(
        (other.directory / "pion.vstore.0").read_bytes()
    )
    flags = ["--port", "0", "--dir", str(stopped.directory)]
    status, _, said = run_flags(forge, flags, tmp_path / "said")
    assert status == 1
    assert "belong to different stores; move one of them away" in said


def test_a_directory_that_is_not_there_is_said(forge: Forge, tmp_path: Path) -> None:
    status, _, said = run_flags(forge, ["--check", str(tmp_path / "none")], tmp_path / "said")
    assert status == 1
    assert "no data directory" in said
    assert not (tmp_path / "none").exists()
