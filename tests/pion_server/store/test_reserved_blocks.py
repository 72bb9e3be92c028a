"""Blocks that a log has ready behind its end: never part of its length, and given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pion_server.store import files
from pion_server.store.files import StoreFile
from pion_server.store.holes import reserve_blocks
from pion_server.store.log import WORTH_RESERVING, RecordLog

MB = 1 << 20


@pytest.fixture
def reserving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose file system can do it, with room enough."""
    monkeypatch.setattr(files, "PLENTY", MB)
    probe = StoreFile.open(tmp_path / "probe")
    try:
        reserve_blocks(probe.fileno(), 0, MB)
    except OSError as error:
        pytest.skip(f"no blocks can be reserved here: {error}")
    return tmp_path


def blocks(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_a_log_has_blocks_ready_that_are_no_part_of_it(reserving: Path) -> None:
    """They count neither as its length nor as what it takes."""
    path = reserving / "log"
    log = RecordLog(path, reserving, 1)
    record = log.append(2, b"{}", [b"r" * WORTH_RESERVING])
    assert log.end == log.file.size()
    assert blocks(path) >= log.end + files.AHEAD
    assert log.file.allocated() <= log.end
    assert record.read() == b"r" * WORTH_RESERVING
    log.file.release_reserved()
    assert blocks(path) < log.end + MB
    assert record.read() == b"r" * WORTH_RESERVING


def test_what_a_killed_process_had_ready_is_given_back_by_the_next(reserving: Path) -> None:
    path = reserving / "log"
    log = RecordLog(path, reserving, 1)
    log.append(2, b"{}", [b"r" * WORTH_RESERVING])
    again = RecordLog(path, reserving, 1)
    again.start_from(log.marker, log.seq, log.end)
    assert again.file.size() == log.end
    assert blocks(path) < log.end + MB


def test_nothing_is_had_ready_without_plenty_of_room_or_under_a_limit(
    reserving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = RecordLog(reserving / "bounded", reserving, 1)
    bounded.max_bytes = 100 * MB
    bounded.append(2, b"{}", [b"r" * MB])
    assert blocks(reserving / "bounded") < 2 * MB
    monkeypatch.setattr(files, "PLENTY", 1 << 62)
    log = RecordLog(reserving / "log", reserving, 1)
    log.append(2, b"{}", [b"r" * MB])
    assert blocks(reserving / "log") < 2 * MB


def test_a_file_system_that_refuses_takes_records_all_the_same(
    reserving: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked once."""
    asked = []

    def refuse(fd: int, offset: int, length: int) -> None:
        asked.append(offset)
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(files, "reserve_blocks", refuse)
    log = RecordLog(reserving / "log", reserving, 1)
    records = [log.append(2, b"{}", [bytes([n]) * MB]) for n in range(3)]
    assert [record.read()[0] for record in records] == [0, 1, 2]
    assert len(asked) == 1
