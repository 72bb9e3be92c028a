"""An incomplete frame and a silent client: how long the lane waits, on the test's own loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from pion_server.payload import Buffer
from pion_server.wire.binary import Frame
from pion_server.wire.connection import Connection
from pion_server.wire.lane import binary_lane
from pion_server.wire.server import Server
from tests.pion_server.wire.binary_client import pack

SILENCE = 0.3
PONG = b"\x5e\xca\0\0\0\0\0"


class Mute:
    """A service that answers OK to every frame, 0x01 only after `SILENCE` has long passed."""

    def connected(self, connection: Connection) -> None:
        pass

    def execute(self, connection: Connection, request: list[Buffer]) -> object:
        raise AssertionError("no RESP here")

    def execute_frame(self, connection: Connection, frame: Frame) -> object:
        return self._answer_late() if frame.command == 1 else None

    def disconnected(self, connection: Connection) -> None:
        pass

    async def _answer_late(self) -> None:
        await asyncio.sleep(3 * SILENCE)


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@asynccontextmanager
async def listening(silence: float) -> AsyncIterator[Connect]:
    service = Mute()
    server = Server(service)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server.listen(listener, binary_lane(service, 1 << 30, silence))
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()
    await server.stop()


def test_an_incomplete_frame_that_falls_silent_is_closed() -> None:
    async def scenario() -> None:
        async with listening(SILENCE) as connect:
            for part in (b"\x5e", pack(0xFF)[:6], pack(0x24, b"body")[:-1]):
                reader, writer = await connect()
                writer.write(pack(0xFF) + part)
                assert await reader.readexactly(7) == PONG
                assert await asyncio.wait_for(reader.read(), 20) == b""

    asyncio.run(scenario())


def test_a_slow_frame_is_awaited_as_long_as_bytes_come() -> None:
    async def scenario() -> None:
        async with listening(7 * SILENCE) as connect:
            reader, writer = await connect()
            started = asyncio.get_running_loop().time()
            for byte in pack(0x24, b"slow body"):
                writer.write(bytes((byte,)))
                await asyncio.sleep(SILENCE / 2)
            assert asyncio.get_running_loop().time() - started > 7 * SILENCE
            assert await asyncio.wait_for(reader.readexactly(7), 20) == PONG

    asyncio.run(scenario())


def test_silence_between_frames_and_during_a_command_is_nobodys_business() -> None:
    async def scenario() -> None:
        async with listening(SILENCE) as connect:
            reader, writer = await connect()
            writer.write(pack(0xFF)[:3])
            await asyncio.sleep(SILENCE / 3)
            writer.write(pack(0xFF)[3:])
            assert await reader.readexactly(7) == PONG
            await asyncio.sleep(3 * SILENCE)
            writer.write(pack(1) + pack(0xFF)[:4])
            assert await asyncio.wait_for(reader.readexactly(7), 20) == PONG
            writer.write(pack(0xFF)[4:])
            assert await asyncio.wait_for(reader.readexactly(7), 20) == PONG

    asyncio.run(scenario())
