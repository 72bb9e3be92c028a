"""What a parent tells its workers arrives as it was said."""

from __future__ import annotations

import struct
from pathlib import Path

from pion_server.config import Config, config_of_worker, parse
from pion_server.flags import FLAGS
from pion_server.workers.child import DoorNumbers, Launch


def arrived(launch: Launch) -> Launch:
    data = launch.pack()
    assert struct.unpack("<I", data[:4])[0] == len(data) - 4
    return Launch.unpack(data[4:])


def test_a_launch_arrives_with_every_kind_of_setting() -> None:
    config = parse(
        [
            *("-w", "3", "--dir", "/data/\udcff and \u00e4", "--requirepass", "p\u00e4ss"),
            *("--tenant", "a=x", "--tenant", "b=y", "--tenant-quota", "a=1gb,6"),
            *("--ns-prefix", "team|", "--unixsocket", "none", "--fsync", "always"),
            *("--maxmemory", "4gb", "--no-attention", "--metrics-port", "9000"),
        ],
        {},
    )
    doors = DoorNumbers(1974, (5, 6), (7,))
    for one in (config, config_of_worker(config, 2), Config()):
        for tls in (None, DoorNumbers(2000, (8,), (9, 10))):
            launch = Launch(2, one, doors, tls, 11)
            assert arrived(launch) == launch
    assert isinstance(arrived(launch).config.directory, Path)


def test_every_flags_value_is_of_a_kind_that_arrives() -> None:
    """A flag of a new kind fails here, not at somebody's start with several workers."""
    kinds = (int, str, bool, bytes, Path, tuple, type(None))
    names = {flag.field for flag in FLAGS if flag.field} & set(Config.__dataclass_fields__)
    defaults = Config()
    assert all(isinstance(getattr(defaults, name), kinds) for name in names)


def test_a_worker_inherits_its_doors_and_the_end_of_its_report() -> None:
    launch = Launch(0, Config(), DoorNumbers(1, (5,), (6,)), DoorNumbers(2, (7,), (8,)), 9)
    assert launch.descriptors == [9, 5, 6, 7, 8]
