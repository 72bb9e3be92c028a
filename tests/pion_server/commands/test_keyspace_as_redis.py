"""The keyspace against the real redis-server: the same commands, the same replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.pion_server.commands.redis_twin import REDIS, reply_of, run_redis

if TYPE_CHECKING:
    from tests.conftest import RawClient, ServerProcess

    Pair = tuple[RawClient, RawClient]

pytestmark = pytest.mark.skipif(REDIS is None, reason="no redis-server installed")

Words = tuple[bytes, ...]
WORD = st.sampled_from(
    [b"a", b"b", b"c:1", b"c:2", b"", b"\0\r\n", b"\xff\xfe", b"*", b"[x]", b"7", b"-3", b"0"]
)
# Mostly of one type each, so that commands find something to work on; sometimes of another.
STRING = st.sampled_from([b"k1", b"k1", b"k2", b"\0\r\n\xff", b"h", b"z"])
HASH = st.sampled_from([b"h", b"h", b"h", b"h\xff", b"k1", b"z"])
SORTED = st.sampled_from([b"z", b"z", b"z", b"z\xff", b"k1", b"h"])
KEY = st.one_of(STRING, HASH, SORTED)
VALUE = st.one_of(
    WORD,
    st.sampled_from([b"9223372036854775807", b"-9223372036854775808", b" 1", b"01", b"1.5"]),
    st.integers(0, 40_000).map(lambda n: bytes(n % 251 for _ in range(n))),
)
INTEGER = st.one_of(
    st.integers(-600, 600).map(lambda n: b"%d" % n),
    st.sampled_from([b"9223372036854775807", b"-9223372036854775808", b"x", b"", b"1.0", b"+1"]),
)
SCORE = st.one_of(
    st.integers(-5, 5).map(lambda n: b"%d" % n),
    st.sampled_from([b"1712345678.123456", b"0.1", b"-inf", b"+inf", b"nan", b"x", b"1e3", b"-0"]),
)
PATTERN = st.text("ak1*?[]^-\\c:", max_size=6).map(str.encode)


def words(*parts: object) -> st.SearchStrategy[Words]:
    """A command of fixed words and of what strategies make: one word each, or a list of them."""
    made = [part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts]

    def flatten(values: tuple[object, ...]) -> Words:
        flat: list[bytes] = []
        for value in values:
            flat += value if isinstance(value, list) else [value]  # type: ignore[list-item]
        return tuple(flat)

    return st.tuples(*made).map(flatten)


def some(*alternatives: list[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Optional words."""
    return st.sampled_from([[], *alternatives])


def pairs(
    one: st.SearchStrategy[bytes], other: st.SearchStrategy[bytes]
) -> st.SearchStrategy[list[bytes]]:
    return st.lists(st.tuples(one, other), min_size=1, max_size=4).map(
        lambda found: [word for pair in found for word in pair]
    )


def several(one: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[bytes]]:
    return st.lists(one, min_size=1, max_size=4)


STRINGS = st.one_of(
    words(b"GET", STRING),
    words(
        b"SET",
        STRING,
        VALUE,
        some([b"NX"], [b"XX"]),
        some([b"GET"]),
        some(
            [b"KEEPTTL"],
            [b"EX", b"1000"],
            [b"PX", b"100000"],
            [b"EX", b"0"],
            [b"EX"],
            [b"EX", b"x"],
        ),
    ),
    words(b"SETNX", STRING, VALUE),
    words(b"SETEX", STRING, INTEGER, VALUE),
    words(b"STRLEN", STRING),
    words(b"MGET", several(STRING)),
    words(b"MSET", pairs(STRING, VALUE)),
    words(st.sampled_from([b"INCRBY", b"DECRBY"]), STRING, INTEGER),
)
HASHES = st.one_of(
    words(st.sampled_from([b"HSET", b"HMSET"]), HASH, pairs(WORD, VALUE)),
    words(b"HSETNX", HASH, WORD, VALUE),
    words(st.sampled_from([b"HGET", b"HEXISTS"]), HASH, WORD),
    words(st.sampled_from([b"HMGET", b"HDEL"]), HASH, several(WORD)),
    words(st.sampled_from([b"HGETALL", b"HLEN", b"HKEYS", b"HVALS", b"ZCARD"]), HASH),
    words(b"HINCRBY", HASH, WORD, INTEGER),
)
SORTED_SETS = st.one_of(
    words(
        b"ZADD",
        SORTED,
        some(
            [b"NX"],
            [b"XX"],
            [b"CH"],
            [b"NX", b"CH"],
            [b"GT", b"CH"],
            [b"XX", b"LT"],
            [b"NX", b"XX"],
            [b"NX", b"GT"],
        ),
        pairs(SCORE, WORD),
    ),
    words(b"ZADD", SORTED, some([b"XX"], [b"NX"], [b"GT"]), b"INCR", SCORE, WORD),
    words(b"ZREM", SORTED, several(WORD)),
    words(b"ZCARD", SORTED),
    words(b"ZSCORE", SORTED, WORD),
    words(
        b"ZRANGE",
        SORTED,
        st.sampled_from([b"0", b"1", b"-2", b"x"]),
        st.sampled_from([b"-1", b"2", b"511", b"-4"]),
        some([b"WITHSCORES"], [b"REV"], [b"REV", b"WITHSCORES"]),
    ),
)
KEYS = st.one_of(
    words(st.sampled_from([b"DEL", b"UNLINK", b"EXISTS"]), several(KEY)),
    words(st.sampled_from([b"INCR", b"DECR", b"TYPE", b"TTL", b"PTTL", b"PERSIST"]), KEY),
    words(
        st.sampled_from([b"EXPIRE", b"PEXPIRE"]),
        KEY,
        st.sampled_from([b"90000", b"70000", b"-1", b"0", b"x", b"9223372036854775807"]),
        some([b"NX"], [b"XX"], [b"GT"], [b"LT"], [b"no"]),
    ),
    words(b"KEYS", PATTERN),
    words(b"SCAN", b"0", b"MATCH", PATTERN, b"COUNT", b"2"),
    words(
        b"SCAN", b"0", some([b"TYPE", b"hash"], [b"TYPE", b"zset"], [b"MATCH"], [b"COUNT", b"0"])
    ),
    words(b"DBSIZE"),
    words(st.sampled_from([b"FLUSHALL", b"FLUSHDB"]), some([b"ASYNC"], [b"SYNC"], [b"NOW"])),
)
FAMILIES = {
    "strings": STRINGS | KEYS,
    "hashes": HASHES | STRINGS,
    "sorted sets": SORTED_SETS,
    "all": STRINGS | HASHES | SORTED_SETS | KEYS,
}


@pytest.fixture(scope="module", params=[2, 3], ids=["resp2", "resp3"])
def pair(
    request: pytest.FixtureRequest,
    module_server: Callable[..., ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """A connection to our server and one to a real Redis, speaking the same protocol."""
    with run_redis(tmp_path_factory.mktemp("redis")) as redis:
        ours = module_server().client()
        for client in (ours, redis):
            client.call("HELLO", request.param)
        yield ours, redis


@pytest.mark.parametrize("family", FAMILIES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_reply_is_that_of_redis(pair: Pair, family: str, data: st.DataObject) -> None:
    commands = data.draw(st.lists(FAMILIES[family], min_size=10, max_size=40))
    compare(pair, commands)


@pytest.mark.parametrize(
    "commands",
    [
        [(b"SET", b"k1", b"v" * 20_000), (b"SET", b"k1", b"x", b"GET"), (b"GET", b"k1")],
        [(b"SET", b"k1", b"v" * 20_000), (b"INCR", b"k1"), (b"MGET", b"k1", b"k2")],
        [
            (b"MSET", b"a", b"1", b"[", b"2", b"\\", b"3"),
            (b"KEYS", b"[^"),
            (b"KEYS", b"["),
            (b"KEYS", b"\\"),
        ],
        [(b"SET", b"k1", b"1", b"EX", b"9"), (b"INCR", b"k1"), (b"PTTL", b"k1")],
    ],
)
def test_what_went_wrong_elsewhere(pair: Pair, commands: list[Words]) -> None:
    compare(pair, commands)


def compare(pair: Pair, commands: list[Words]) -> None:
    """The same commands to both, on no keys at first: equal replies, equal keys at the end."""
    ours, redis = pair
    for client in pair:
        client.call("FLUSHALL")
    for command in commands:
        expected = reply_of(redis, command)
        assert reply_of(ours, command) == expected, command
    assert everything(ours) == everything(redis)


def everything(client: RawClient) -> dict[bytes, object]:
    """All keys with what they hold."""
    found = {}
    for key in client.call("KEYS", "*"):
        kind = client.call("TYPE", key)
        ask = {
            "string": (b"GET", key),
            "hash": (b"HGETALL", key),
            "zset": (b"ZRANGE", key, b"0", b"-1", b"WITHSCORES"),
        }[kind]
        found[key] = reply_of(client, ask)
    return found


@pytest.mark.parametrize(
    "command",
    [
        b"GET",
        b"SET",
        b"MGET",
        b"MSET",
        b"HSET",
        b"HMGET",
        b"ZADD",
        b"ZRANGE",
        b"SCAN",
        b"DEL",
        b"EXPIRE",
        b"TYPE",
        b"INCR",
    ],
)
def test_the_number_of_arguments_is_checked_as_in_redis(pair: Pair, command: bytes) -> None:
    ours, redis = pair
    for count in range(4):
        asked = (command, *[b"0"] * count)
        assert (reply_of(ours, asked) == ("refused", "ERR")) == (
            reply_of(redis, asked) == ("refused", "ERR")
        ), asked
