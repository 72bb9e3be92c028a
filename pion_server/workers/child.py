"""One worker: a server process that its parent starts, with sockets it inherits.

    python -m pion_server.workers.child        # started by pion_server.workers.parent only

The parent writes a `Launch` to its standard input, and one byte once all workers have opened their
stores: from then on every worker knows what the others hold, and clients are let in. The end of
that input means that the parent is gone, and ends the worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pion_server import journal
from pion_server.config import Config
from pion_server.doors import Doors
from pion_server.flag_values import ConfigError
from pion_server.state import ServerState
from pion_server.tenants import Tenant

_LENGTH = struct.Struct("<I")
_INPUT = 0
# What a worker reports, in this order.
OPENED, SERVING = b"o", b"s"
GO = b"g"
# Exit status of a worker that a client's SHUTDOWN ended: the others are to end, too.
EVERYBODY_ENDS = 75
_ORPHANED = "its parent has ended"


@dataclass(frozen=True, slots=True)
class DoorNumbers:
    """Descriptors of bound sockets to be passed on; see `Doors`."""

    port: int
    resp: tuple[int, ...]
    binary: tuple[int, ...]

    @classmethod
    def of(cls, doors: Doors) -> DoorNumbers:
        resp, binary = (
            tuple(sock.fileno() for sock in socks) for socks in (doors.resp, doors.binary)
        )
        return cls(doors.port, resp, binary)

    def open(self) -> Doors:
        """The sockets, in the process that has inherited them."""
        resp, binary = (
            [socket.socket(fileno=number) for number in numbers]
            for numbers in (self.resp, self.binary)
        )
        return Doors(self.port, resp, binary)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a worker is told. `report`: the descriptor it writes OPENED and SERVING to."""

    worker: int
    config: Config
    doors: DoorNumbers
    tls_doors: DoorNumbers | None
    report: int

    @property
    def descriptors(self) -> list[int]:
        """All that it inherits."""
        doors = [self.doors] + ([self.tls_doors] if self.tls_doors else [])
        return [self.report, *(fd for one in doors for fd in one.resp + one.binary)]

    def pack(self) -> bytes:
        """Its length and itself as JSON; `unpack` reads what follows the length."""
        data = json.dumps(asdict(self), default=_as_json).encode()
        return _LENGTH.pack(len(data)) + data

    @classmethod
    def unpack(cls, data: bytes) -> Launch:
        """The launch that `pack` was called of."""
        fields = json.loads(data, object_hook=_from_json)
        config = fields["config"]
        config["tenants"] = tuple(Tenant(**one) for one in config["tenants"])
        config["notices"] = tuple(config["notices"])
        doors, tls_doors = (
            None
            if one is None
            else DoorNumbers(one["port"], tuple(one["resp"]), tuple(one["binary"]))
            for one in (fields["doors"], fields["tls_doors"])
        )
        assert doors is not None
        return cls(fields["worker"], Config(**config), doors, tls_doors, fields["report"])


def _as_json(value: object) -> dict[str, str]:
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    raise TypeError(f"a launch holds no {type(value).__name__}")


def _from_json(found: dict[str, Any]) -> Any:
    match found:
        case {"path": str() as text, **rest} if not rest:
            return Path(text)
        case {"bytes": str() as text, **rest} if not rest:
            return bytes.fromhex(text)
    return found


def main() -> int:
    """Run the worker its standard input describes; the exit status."""
    launch = _read_launch()
    from pion_server import serving
    from pion_server.store.files import DirectoryInUse
    from pion_server.store.log import ForeignFile
    from pion_server.tls_door import TlsDoor

    config, worker = serving.prepare(launch.config), launch.worker
    try:
        doors = launch.doors.open()
        tls = TlsDoor.of(config, launch.tls_doors.open() if launch.tls_doors else None)
        entrances = serving.Entrances(doors, tls, serving.metrics_door(config))
        state = serving.open_data(config, doors.port, worker)
        status, _ = serving.reports_of(config, doors.port)
        status.path = status.path.with_name(f"{status.path.name}.{worker}")
        os.write(launch.report, OPENED)
        if os.read(_INPUT, 1) != GO:
            state.close()
            return 0

        def reached() -> None:
            os.write(launch.report, SERVING)
            os.close(launch.report)
            _end_with_parent(state)

        reason = serving.run_loop(config, state, entrances, status, reached)
    except (ConfigError, DirectoryInUse, ForeignFile) as error:
        journal.complain("worker", f"worker {worker}: {error}", level="error", worker=worker)
        return 1
    status.write("stopped")
    return EVERYBODY_ENDS if reason == "SHUTDOWN" else 0


def _read_launch() -> Launch:
    (length,) = _LENGTH.unpack(_read(_LENGTH.size))
    return Launch.unpack(_read(length))


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = os.read(_INPUT, count - len(data))
        if not more:
            raise SystemExit(1)
        data += more
    return data


def _end_with_parent(state: ServerState) -> None:
    """Stop as soon as the other end of the standard input closes."""
    loop = asyncio.get_running_loop()

    def look() -> None:
        if not os.read(_INPUT, 64):
            loop.remove_reader(_INPUT)
            state.stop(_ORPHANED)

    loop.add_reader(_INPUT, look)


if __name__ == "__main__":
    sys.exit(main())
