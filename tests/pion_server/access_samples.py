"""Arguments for every command and frame, about one name: what the access tests send.

A command that is missing here fails `test_access_matrix`: who adds one says how it is asked.
`{ns}` and `{sid}` stand for the name and its K side, `{attn}` for its attention session.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

Words: TypeAlias = tuple[bytes, ...]

DIM: Final = 32
#: One row of zeros but for a one, as f32.
ROW: Final = struct.pack(f"<{DIM}f", 1.0, *[0.0] * (DIM - 1))

_RESP: Final[Mapping[str, str]] = {
    "ATTEND.DECODE.CLOSE": "{attn} {token}",
    "ATTEND.DECODE.STEP": "{attn} 0 {token} 1 32 1 1 0 0 1 {row} {row} {row} {zero}",
    "ATTEND.PREFIX.DROP": "{attn}",
    "ATTEND.PREFIX.LOOKUP": "{attn} 0",
    "ATTEND.PREFIX.QUERY": "{attn} 0 1 32 1 {row}",
    "ATTEND.PREFIX.QUERY_FUSED": "{attn} 0 1 32 1 1 {row} {row} {row} {zero}",
    "ATTEND.PREFIX.QUERY_SPARSE": "{attn} 0 1 32 1 {row} {word} {one}",
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO": "{attn} 0 1 32 1 1 1 {row} {zero}",
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED": "{attn} 0 1 32 1 1 1 1 {row} {row} {row} {zero}",
    "ATTEND.PREFIX.STORE": "{attn} 0 1 1 32 {row} {row}",
    "ATTEND.QUERYBATCH": "1 1 32 1 {row} {row} {row}",
    "AUTH": "nobody wrong",
    "CLIENT": "ID",
    "COMMAND": "COUNT",
    "CONFIG": "GET port",
    "DBSIZE": "",
    "DECR": "{ns}",
    "DECRBY": "{ns} 2",
    "DEL": "{ns}",
    "ECHO": "word",
    "EXISTS": "{ns}",
    "EXPIRE": "{ns} 1000",
    "FLUSHALL": "",
    "FLUSHDB": "",
    "GET": "{ns}",
    "HDEL": "{ns} field",
    "HELLO": "2",
    "HEXISTS": "{ns} field",
    "HGET": "{ns} field",
    "HGETALL": "{ns}",
    "HINCRBY": "{ns} field 1",
    "HKEYS": "{ns}",
    "HLEN": "{ns}",
    "HMGET": "{ns} field",
    "HMSET": "{ns} field value",
    "HSET": "{ns} field value",
    "HSETNX": "{ns} field value",
    "HVALS": "{ns}",
    "INCR": "{ns}",
    "INCRBY": "{ns} 2",
    "INFO": "Pion",
    "KEYS": "{ns}",
    "KV.PREFIX.ADMIT": "{ns}",
    "KV.PREFIX.BLOCKS": "{ns}",
    "KV.PREFIX.COMMIT": "",
    "KV.PREFIX.DROP": "{ns}",
    "KV.PREFIX.EXPIRE": "{ns} 1000",
    "KV.PREFIX.INFO": "",
    "KV.PREFIX.LEND": "{ns}",
    "KV.PREFIX.LIST": "{ns}",
    "KV.PREFIX.LOOKUP": "{ns}",
    "KV.PREFIX.MEMBERSHIP": "{ns} 1 {hash}",
    "KV.PREFIX.META": "{ns} GET",
    "KV.PREFIX.OWNER": "{ns}",
    "KV.PREFIX.PIN": "{ns}",
    "KV.PREFIX.REGISTER": "{ns} 32 fp32",
    "KV.PREFIX.REGISTER.SCHEMA": "{ns} 1 fmt=fp32,dim=32 fmt=fp32,dim=32",
    "KV.PREFIX.SAVE": "",
    "KV.PREFIX.UNPIN": "{ns}",
    "KV.PREFIX.WARM": "{ns} 1 32 {attn}",
    "MGET": "{ns}",
    "MSET": "{ns} 5",
    "PERSIST": "{ns}",
    "PEXPIRE": "{ns} 1000000",
    "PING": "",
    "PION.SOCKET": "{ns}",
    "PION.STATS": "",
    "PTTL": "{ns}",
    "QUIT": "",
    "RESET": "",
    "SAVE": "",
    "SCAN": "0 MATCH {ns}",
    "SELECT": "0",
    "SET": "{ns} 5",
    "SETEX": "{ns} 1000 5",
    "SETNX": "{ns} 5",
    "SHUTDOWN": "NEVER",
    "SLOWLOG": "LEN",
    "SSM.PREFIX.DROP": "{ns} 7",
    "SSM.PREFIX.FETCH": "{ns} 0",
    "SSM.PREFIX.STORE": "{ns} 0 state",
    "STRLEN": "{ns}",
    "TTL": "{ns}",
    "TYPE": "{ns}",
    "UNLINK": "{ns}",
    "V.COMMIT": "{sid} 1",
    "V.CREATE": "{sid} 32 VQUANT fp32",
    "V.DROP": "{sid}",
    "V.EXPORT": "{sid} {vsid} 0 1 1 1 32",
    "V.FETCH": "{sid} 0 RANGE 0 1",
    "V.INFO": "{sid}",
    "V.RESTORE": "{sid} 1",
    "V.SNAPSHOT": "{sid}",
    "V.STOREBATCH": "{sid} 0 0 1 {row}",
    "ZADD": "{ns} 1 member",
    "ZCARD": "{ns}",
    "ZRANGE": "{ns} 0 -1",
    "ZREM": "{ns} member",
    "ZSCORE": "{ns} member",
}


def words_for(command: str, ns: bytes) -> Words:
    """A request about `ns`; KeyError for a command that has no sample."""
    values = {
        "{ns}": ns,
        "{sid}": ns + b"_pk",
        "{vsid}": ns + b"_pv",
        "{attn}": ns + b"_attn",
        "{row}": ROW,
        "{zero}": b"\0",
        "{word}": bytes(4),
        "{one}": struct.pack("<I", 1),
        "{hash}": bytes(8),
        "{token}": TOKEN,
    }
    words = _RESP[command].split()
    return (command.encode(), *(values.get(word, word.encode()) for word in words))


def _fused(ns: bytes) -> bytes:
    sid = ns + b"_attn"
    sizes = struct.pack("<HHHHII", 0, 1, DIM, 1, 1, 1)
    return struct.pack("<H", len(sid)) + sid + sizes + 3 * ROW + b"\0"


def _step(ns: bytes) -> bytes:
    sid = ns + b"_attn"
    head = struct.pack("<6H6I16sQ", len(sid), 0, 1, 1, DIM, 0, 1, 0, 0, 1, 1, 0, TOKEN, 0)
    return head + 3 * ROW + b"\0" + sid


def _sid_alone(ns: bytes) -> bytes:
    sid = ns + b"_attn"
    return struct.pack("<H", len(sid)) + sid


def _sid_and_token(ns: bytes) -> bytes:
    return _sid_alone(ns) + TOKEN


TOKEN: Final = bytes(range(16))
_FRAMES: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    "ATTEND_DECODE_CLOSE": _sid_and_token,
    "ATTEND_DECODE_STEP": _step,
    "ATTEND_PREFIX_HOME": _sid_alone,
    "ATTEND_PREFIX_QUERY_FUSED": _fused,
    "AUTH": lambda ns: b"nobody\0wrong",
    "PING": lambda ns: b"",
}


def body_for(frame: str, ns: bytes) -> bytes:
    """A frame's body about `ns`; KeyError for a frame that has no sample."""
    return _FRAMES[frame](ns)
