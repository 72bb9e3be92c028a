"""Logs and snapshots cut, filled, flipped: what is read is bit-equal, or an error for its entry."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pion_server.store.files import StoreFile
from pion_server.store.log import HEAD, Record
from pion_server.store.opening import KEYS_KIND, SSM_KIND, VSTORE_KIND
from pion_server.store.reading import LogReader
from tests.pion_server.faults.damage import (
    KLOG,
    KSNAPSHOT,
    LOGS,
    NAMES,
    SLOG,
    SSNAPSHOT,
    VLOG,
    VSNAPSHOT,
    History,
    Images,
    Moment,
    differences,
    read_all,
    record,
    restart_and_read,
    write_more,
)
from tests.pion_server.faults.forge import Forge, ForgedServer
from tests.pion_server.faults.observer import Refused
from tests.pion_server.faults.oracle import Image

KINDS = {VLOG: VSTORE_KIND, VSNAPSHOT: VSTORE_KIND, SLOG: SSM_KIND, SSNAPSHOT: SSM_KIND}
KINDS |= {KLOG: KEYS_KIND, KSNAPSHOT: KEYS_KIND}
# What lies in another log than rows and manifests do.
LOG_OF = {"state": SLOG, "key": KLOG}
Servers = Callable[..., ForgedServer]


@pytest.fixture(scope="module")
def logged(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Everything lies in the logs."""
    return _history(forge, tmp_path_factory.mktemp("logged"), 220, 5, 0)


@pytest.fixture(scope="module")
def saved(forge: Forge, tmp_path_factory: pytest.TempPathFactory) -> History:
    """Most lies in snapshots, the rest in the logs."""
    return _history(forge, tmp_path_factory.mktemp("saved"), 8, 6, 220)


def _history(forge: Forge, home: Path, acts: int, seed: int, before_save: int) -> History:
    home.joinpath("data").mkdir(mode=0o700)
    server = ForgedServer(forge, home / "data", ("--no-crash-log",), None)
    history = record(server, acts, seed, before_save)
    server.close()
    return history


@pytest.fixture
def started(forged: Servers, memory_path: Path) -> Callable[[History], ForgedServer]:
    """One server, on a fresh copy of a history's files each time it is asked for."""
    servers: list[ForgedServer] = []

    def start(history: History) -> ForgedServer:
        if not servers:
            history.copy(memory_path / "data")
            servers.append(forged(directory=memory_path / "data"))
        else:
            servers[0].kill()
            history.copy(memory_path / "data")
        return servers[0]

    return start


def put_together(images: Images, log: str, others: Images) -> Images:
    """What lies in `log` as in `images`, what lies in other logs as in `others`."""

    def part(image: Image, wanted: bool) -> Image:
        return {k: v for k, v in image.items() if (LOG_OF.get(k[0], VLOG) == log) is wanted}

    return {name: part(images[name], True) | part(others[name], False) for name in NAMES}


def after_cut(history: History, log: str, length: int) -> list[Images]:
    """The images of which one must stand when `log` ends at `length` and the others are whole."""
    number = max(n for n, m in enumerate(history.moments) if m.lengths[log] <= length)
    before = history.moments[number].images
    candidates = [before]
    if number + 1 < len(history.moments):
        under_way: Moment = history.moments[number + 1]
        candidates += [before | {under_way.ns: image} for image in under_way.between]
    return [put_together(images, log, history.images) for images in candidates]


def cut_lengths(history: History, log: str, records: int) -> range:
    """From the end of the log back through its last records."""
    lengths = sorted({moment.lengths[log] for moment in history.moments})
    return range(lengths[max(0, len(lengths) - 1 - records)], lengths[-1])


def check_cut(
    server: ForgedServer, history: History, log: str, length: int, again: bool = True
) -> None:
    """Cut it, start, compare; then write, start `again` and compare once more."""

    def cut(directory: Path) -> None:
        with (directory / log).open("r+b") as file:
            file.truncate(length)

    found = restart_and_read(server, cut)
    assert found in after_cut(history, log, length), (log, length)
    if again:
        ledger = write_more(server.client())
        assert restart_and_read(server) == found
        ledger.settle(server.client())


@pytest.mark.parametrize("log", LOGS)
def test_a_log_cut_inside_its_last_records_shows_what_was_before(
    started: Callable[[History], ForgedServer], logged: History, log: str
) -> None:
    """CASES E06, E07: through a real start, with new writes and a second start."""
    lengths = cut_lengths(logged, log, 8)[::-1]
    chosen = lengths[:: max(1, len(lengths) // 8)]
    for length in chosen:
        check_cut(started(logged), logged, log, length)
    print(f"\n{log}: cut at {len(chosen)} of {len(lengths)} lengths")


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("log", LOGS)
def test_a_log_cut_at_every_byte_of_its_last_records_shows_what_was_before(
    started: Callable[[History], ForgedServer], logged: History, log: str
) -> None:
    lengths = cut_lengths(logged, log, 4)[-2000:]
    for length in lengths:
        check_cut(started(logged), logged, log, length, again=length % 7 == 0)
    print(f"\n{log}: cut at all of {len(lengths)} lengths")


def tails(history: History, log: str) -> dict[str, bytes]:
    data = (history.directory / log).read_bytes()
    reader = LogReader(StoreFile.open(history.directory / log), KINDS[log])
    first = next(iter(reader.records()))
    whole = data[first.where[1] - HEAD.size - len(first.meta) :][: 2 * HEAD.size + 100]
    draw = random.Random(11)
    return {
        "zeros": bytes(4096),
        "one zero": b"\0",
        "ones": b"\xff" * 4096,
        "random": draw.randbytes(5000),
        "half a record": data[-150:-70],
        "an old record again": data[40 : 40 + len(whole) * 3],
        "the whole log again": data,
    }


@pytest.mark.parametrize("log", LOGS)
def test_a_filled_tail_costs_nothing_and_later_writes_survive(
    started: Callable[[History], ForgedServer], logged: History, log: str
) -> None:
    """CASES E06, E07. Old records that turn up again behind newer ones do not count."""
    for title, tail in tails(logged, log).items():

        def fill(directory: Path, tail: bytes = tail) -> None:
            with (directory / log).open("ab") as file:
                file.write(tail)

        server = started(logged)
        before = len(server.errors.read_text())
        assert restart_and_read(server, fill) == logged.images, title
        said = server.errors.read_text()[before:]
        assert log in said, (title, said)
        client = server.client()
        ledger = write_more(client)
        assert restart_and_read(server) == logged.images, title
        ledger.settle(server.client())


def flip(data: bytearray, bit: int) -> None:
    data[bit // 8] ^= 1 << bit % 8


def records_of(path: Path) -> list[Record]:
    return list(LogReader(StoreFile.open(path), KINDS[path.name]).records())


def in_a_body(records: list[Record], place: int) -> bool:
    return any(r.where[1] <= place < r.where[1] + r.length for r in records)


def check_flip(server: ForgedServer, history: History, name: str, bit: int, save: bool) -> int:
    """Damage one bit; the number of entries that are errors then."""

    def damage(directory: Path) -> None:
        data = bytearray((directory / name).read_bytes())
        flip(data, bit)
        (directory / name).write_bytes(data)

    records = records_of(history.directory / name)
    found = restart_and_read(server, damage)
    wrong = differences(found, history.images)
    assert len(wrong) <= 1, (name, bit, wrong)
    if wrong:
        assert in_a_body(records, bit // 8), (name, bit, wrong)
    if save:
        client = server.client()
        assert client.call("KV.PREFIX.SAVE") == "OK"
        assert read_all(client) == found, (name, bit)
        assert restart_and_read(server) == found, (name, bit)
    return len(wrong)


def flip_bits(
    start: Callable[[History], ForgedServer], history: History, name: str, count: int, seed: int
) -> None:
    draw = random.Random(seed)
    size = (history.directory / name).stat().st_size
    outcome: Counter[str] = Counter()
    for number in range(count):
        bit = draw.randrange(size * 8)
        server = start(history)
        wrong = check_flip(server, history, name, bit, save=number % 5 == 0)
        outcome["an error for its entry" if wrong else "all data bit-equal"] += 1
    print(f"\n{name} ({size} bytes): {count} bits flipped, {dict(outcome)}")


FILES = [("logged", log) for log in LOGS]
FILES += [("saved", name) for name in (VSNAPSHOT, SSNAPSHOT, KSNAPSHOT)]


@pytest.mark.parametrize(("history", "name"), FILES)
def test_a_flipped_bit_is_never_a_wrong_byte(
    started: Callable[[History], ForgedServer],
    request: pytest.FixtureRequest,
    history: str,
    name: str,
) -> None:
    """CASES E02. Each fifth time the server then saves: damage is not made good by it."""
    flip_bits(started, request.getfixturevalue(history), name, 10, seed=len(name))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("history", "name"), FILES)
def test_a_flipped_bit_anywhere_is_never_a_wrong_byte(
    started: Callable[[History], ForgedServer],
    request: pytest.FixtureRequest,
    history: str,
    name: str,
) -> None:
    flip_bits(started, request.getfixturevalue(history), name, 500, seed=99)


@pytest.mark.parametrize(("history", "name"), FILES)
@pytest.mark.parametrize("copy", ["first head", "second head", "both heads"])
def test_a_wrong_length_in_the_middle_hides_nothing_behind_it(
    started: Callable[[History], ForgedServer],
    request: pytest.FixtureRequest,
    history: str,
    name: str,
    copy: str,
) -> None:
    """The length of a body or of metadata, one bit wrong: a huge one, and a small one."""
    made: History = request.getfixturevalue(history)
    path = made.directory / name
    records = [r for r in records_of(path) if r.length]
    middle = records[len(records) // 2]
    head = HEAD.size + len(middle.meta)
    first, second = middle.where[1] - head, middle.where[1] + middle.length
    places = {"first head": [first], "second head": [second], "both heads": [first, second]}[copy]
    body_at, meta_at = 28, 24
    for bit in (body_at * 8 + 2, body_at * 8 + 38, meta_at * 8 + 1):

        def damage(directory: Path, bit: int = bit) -> None:
            data = bytearray((directory / name).read_bytes())
            for place in places:
                flip(data, place * 8 + bit)
            (directory / name).write_bytes(data)

        server = started(made)
        found = restart_and_read(server, damage)
        if copy != "both heads":
            assert found == made.images, bit
        elif name == KSNAPSHOT:
            # A record of many small keys: what is gone is theirs, and nothing has another value.
            assert {key[0] for _, key in differences(found, made.images)} <= {"key"}, bit
        elif found != made.images:
            changed = [n for n in NAMES if found[n] != made.images[n]]
            assert len(changed) == 1, (bit, changed)
        ledger = write_more(server.client())
        assert restart_and_read(server) == found
        ledger.settle(server.client())


def once_acknowledged(history: History) -> set[tuple[object, ...]]:
    """Every value a client was ever told to be stored, row by row, with where it was stored."""
    known: set[tuple[object, ...]] = set()
    for moment in history.moments:
        for ns, image in moment.images.items():
            known.update(_values(ns, image))
    return known


def _values(ns: str, image: Image) -> Iterator[tuple[object, ...]]:
    for key, value in image.items():
        if key[0] == "rows":
            fmt = image[("session", key[1])]
            yield from ((ns, key, row, fmt, data) for row, data in enumerate(value))
        elif isinstance(value, frozenset):
            yield from ((ns, key, field, data) for field, data in value)
        else:
            yield (ns, key, value)


def check_sectors(
    start: Callable[[History], ForgedServer], history: History, name: str, places: int
) -> None:
    """Lose one sector of a file, at about so many places: what is read was stored there once."""
    known = once_acknowledged(history)
    outcome: Counter[str] = Counter()
    size = (history.directory / name).stat().st_size
    for at in range(0, size, 512 * max(1, size // (512 * places))):

        def damage(directory: Path, at: int = at) -> None:
            with (directory / name).open("r+b") as file:
                file.seek(at)
                file.write(bytes(min(512, size - at)))

        found = restart_and_read(start(history), damage)
        for ns, image in found.items():
            for value in _values(ns, image):
                lost = value[-1] is None or isinstance(value[-1], Refused)
                assert lost or value in known, (name, at, value)
        outcome["all as before" if found == history.images else "some lost or older"] += 1
    print(f"\n{name} ({size} bytes): sectors zeroed, {dict(outcome)}")


@pytest.mark.parametrize("name", LOGS)
def test_a_lost_sector_invents_nothing(
    started: Callable[[History], ForgedServer], logged: History, name: str
) -> None:
    """It may take both heads of small records; then nobody knows that these were written."""
    check_sectors(started, logged, name, 30)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LOGS)
def test_any_lost_sector_invents_nothing(
    started: Callable[[History], ForgedServer], logged: History, name: str
) -> None:
    check_sectors(started, logged, name, 500)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("size", [1, 39, 40, 41, 8192])
def test_a_log_of_zeros_is_an_empty_log(
    forged: Servers, tmp_path: Path, log: str, size: int
) -> None:
    """CASES E06, E18: what a power loss leaves of a log whose first page was never written."""
    directory = tmp_path / "data"
    directory.mkdir(mode=0o700)
    (directory / log).write_bytes(bytes(size))
    server = forged(directory=directory)
    ledger = write_more(server.client())
    restart_and_read(server)
    ledger.settle(server.client())
