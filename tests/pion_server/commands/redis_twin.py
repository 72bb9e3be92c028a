"""The real redis-server beside ours: the same commands to both, replies made comparable."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evals.serving import redis_server
from tests.conftest import RawClient, ReplyError

REDIS = shutil.which("redis-server")


@contextmanager
def run_redis(directory: Path) -> Iterator[RawClient]:
    """A connection to a redis-server of its own, which ends with the block."""
    with redis_server(directory) as port:
        assert port is not None
        yield RawClient("127.0.0.1", port)


def reply_of(client: RawClient, words: tuple[bytes, ...]) -> Any:
    """The reply; a refusal by its first word alone, scores as numbers, unordered replies sorted."""
    client.send(client.pack(*words))
    reply = client.read()
    if isinstance(reply, ReplyError):
        return ("refused", str(reply).split()[0])
    name = words[0].upper()
    if name in (b"KEYS", b"HKEYS", b"HVALS"):
        return sorted(reply)
    if name == b"SCAN":
        return sorted(_scan(client, words, reply))
    if name == b"HGETALL" and isinstance(reply, list):
        return dict(zip(reply[::2], reply[1::2], strict=True))
    with_scores = {word.upper() for word in words[4:]} & {b"WITHSCORES"}
    if name == b"ZRANGE" and with_scores and reply and not isinstance(reply[0], list):
        return [item if at % 2 == 0 else float(item) for at, item in enumerate(reply)]
    if name in (b"ZSCORE", b"ZADD") and isinstance(reply, bytes):
        return float(reply)
    if name in (b"TTL", b"PTTL") and reply > 0:
        return "some time"
    return reply


def _scan(client: RawClient, words: tuple[bytes, ...], reply: Any) -> list[bytes]:
    cursor, found = reply
    while cursor != b"0":
        cursor, more = client.call(words[0], cursor, *words[2:])
        found += more
    # Redis may return a key more than once.
    return list(set(found))
