"""What many tests of commands ask: figures as numbers, rows as arrays, refusals without effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.conftest import RawClient

Word = str | bytes | int
F32 = NDArray[np.float32]

# Times go on by themselves; everything else in a figure is the effect of a command.
_CLOCKS = (b"uptime_in_seconds",)


def values(seed: int, rows: int, dim: int) -> F32:
    """Rows of f32 in [-1, 1], the same for the same seed."""
    return np.random.default_rng(seed).uniform(-1, 1, (rows, dim)).astype(np.float32)


def lines(bulk: bytes) -> dict[str, str]:
    """A bulk of `name:value` lines; every line must end with CRLF."""
    assert bulk.endswith(b"\r\n")
    return dict(line.split(":", 1) for line in bulk.decode().split("\r\n")[:-1])


def info(client: RawClient) -> dict[str, int]:
    """KV.PREFIX.INFO as numbers."""
    return {key: int(value) for key, value in lines(client.call("KV.PREFIX.INFO")).items()}


def receipt(client: RawClient) -> dict[str, Any]:
    """PION.STATS, without what changes by itself."""
    flat = client.call("PION.STATS")
    pairs = dict(zip(flat[::2], flat[1::2], strict=True))
    return {key.decode(): value for key, value in pairs.items() if key not in _CLOCKS}


def refuse(client: RawClient, *words: Word, text: str = "ERR ") -> str:
    """The command must be refused with `text` in its reply, and must have changed nothing."""
    before = client.call("KV.PREFIX.INFO"), receipt(client), client.call("V.INFO")
    reply = client.error(*words)
    assert text in reply, f"{text!r} is not in {reply!r}"
    assert reply.startswith(("ERR ", "OOM ", "STALE ", "MISCONF ", "NOPERM ")), reply
    assert reply.isascii()
    assert (client.call("KV.PREFIX.INFO"), receipt(client), client.call("V.INFO")) == before
    return reply


def store(client: RawClient, sid: bytes, layer: int, start: int, rows: F32) -> None:
    """V.STOREBATCH of f32 rows."""
    blob = np.ascontiguousarray(rows, dtype=np.float32).tobytes()
    assert client.call("V.STOREBATCH", sid, layer, start, len(rows), blob) == "OK"


def fetch(client: RawClient, sid: bytes, layer: int, start: int, end: int, dim: int) -> F32 | None:
    """V.FETCH RANGE as f32 rows."""
    data = client.call("V.FETCH", sid, layer, "RANGE", start, end)
    return None if data is None else np.frombuffer(data, np.float32).reshape(end - start, dim)
