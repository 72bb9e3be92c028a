"""ATTEND.* on a real server: refusals without effect, windows, maps, drops, who waits for whom."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

from pion_server.attend import reference
from tests.attention_client import (
    AttentionClient,
    auto_fused_words,
    auto_words,
    fused_words,
    normal,
    query_words,
    sparse_words,
    store_words,
)
from tests.conftest import has_input

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

Start = Callable[..., "ServerProcess"]

HEADS, TOKENS, DIM = 2, 50, 32
K, V = normal(1, HEADS, TOKENS, DIM), normal(2, HEADS, TOKENS, DIM)
Q = normal(3, HEADS, 1, DIM)
NONE = normal(4, HEADS, 0, DIM)
SAME = bytes(range(HEADS))
BLOB = b"x" * 64


@pytest.fixture
def client(shared: ServerProcess) -> AttentionClient:
    """A client of a server that holds K, V as layer 0 of session `s`."""
    client = AttentionClient(shared)
    client.store("s", 0, K, V)
    return client


BAD: list[tuple[str, tuple[Any, ...]]] = [
    ("requires: <sid> <layer> <H> <N> <D> <K> <V>", ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 32, b"")),
    ("invalid H 0", ("ATTEND.PREFIX.STORE", "s", 0, 0, 1, 32, b"", b"")),
    ("invalid N -1", ("ATTEND.PREFIX.STORE", "s", 0, 1, -1, 32, b"", b"")),
    ("invalid integer for D", ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, "32x", b"", b"")),
    ("invalid layer_id -1", ("ATTEND.PREFIX.STORE", "s", -1, 1, 1, 32, b"", b"")),
    ("unsupported D 48", ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 48, b"x" * 192, b"x" * 192)),
    ("K has 127 bytes", ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 32, b"x" * 127, b"x" * 128)),
    ("V has 129 bytes", ("ATTEND.PREFIX.STORE", "s", 0, 1, 1, 32, b"x" * 128, b"x" * 129)),
    ("a sid must have 1 to 205", ("ATTEND.PREFIX.STORE", "", 0, 1, 1, 32, BLOB * 2, BLOB * 2)),
    ("invalid layer_id -1", ("ATTEND.PREFIX.LOOKUP", "s", -1)),
    ("invalid integer for layer_id", ("ATTEND.PREFIX.DROP", "s", "x")),
    ("session not found", query_words("missing", 0, Q)),
    ("session not found", query_words("s", 1, Q)),
    ("failed: the session has 2 heads of dimension 32", query_words("s", 0, Q[:1])),
    ("failed: the session has 2 heads of dimension 32", query_words("s", 0, normal(0, 2, 1, 64))),
    ("no positive multiple", ("ATTEND.PREFIX.QUERY", "s", 0, 2, 32, 1, b"")),
    ("no positive multiple", ("ATTEND.PREFIX.QUERY", "s", 0, 2, 32, 1, Q.tobytes()[:-1])),
    ("no positive multiple", ("ATTEND.PREFIX.QUERY", "s", 0, 2, 32, 1, Q.tobytes() + b"1234")),
    ("invalid top_k 0", ("ATTEND.PREFIX.QUERY", "s", 0, 2, 32, 0, Q.tobytes())),
    ("invalid integer for fa_window", (*query_words("s", 0, Q), "wide")),
    ("session not found", fused_words("missing", 0, Q, NONE, NONE, SAME)),
    ("no multiple of H_kv 2", fused_words("s", 0, normal(0, 3, 1, 32), NONE, NONE, b"\0\0\1")),
    ("no positive multiple", fused_words("s", 0, Q[:, :0], NONE, NONE, SAME)),
    ("head_map has 1 bytes", fused_words("s", 0, Q, NONE, NONE, b"\0")),
    ("head_map has 3 bytes", fused_words("s", 0, Q, NONE, NONE, b"\0\0\0")),
    ("head_map names kv head 2 of 2", fused_words("s", 0, Q, NONE, NONE, b"\0\2")),
    ("head_map names kv head 255 of 2", fused_words("s", 0, Q, NONE, NONE, b"\xff\0")),
    ("the session has 2 heads", fused_words("s", 0, Q, NONE[:1], NONE[:1], b"\0\0")),
    (
        "invalid S_suf -1",
        ("ATTEND.PREFIX.QUERY_FUSED", "s", 0, 2, 32, -1, 2, Q.tobytes(), b"", b"", SAME),
    ),
    (
        "K_suf has 64 bytes, 2x1x32 needs 256",
        ("ATTEND.PREFIX.QUERY_FUSED", "s", 0, 2, 32, 1, 2, Q.tobytes(), BLOB, BLOB, SAME),
    ),
    (
        "V_suf has 64 bytes",
        ("ATTEND.PREFIX.QUERY_FUSED", "s", 0, 2, 32, 1, 2, Q.tobytes(), BLOB * 4, BLOB, SAME),
    ),
    ("session not found", sparse_words("missing", 0, Q[:, 0], np.zeros((2, 1), "i4"), [1, 1])),
    (
        "invalid K_sparse_max 0",
        ("ATTEND.PREFIX.QUERY_SPARSE", "s", 0, 2, 32, 0, Q.tobytes(), b"", b""),
    ),
    (
        "indices has 12 bytes",
        ("ATTEND.PREFIX.QUERY_SPARSE", "s", 0, 2, 32, 2, Q.tobytes(), b"x" * 12, b"x" * 8),
    ),
    (
        "counts has 4 bytes",
        ("ATTEND.PREFIX.QUERY_SPARSE", "s", 0, 2, 32, 2, Q.tobytes(), b"x" * 16, b"x" * 4),
    ),
    ("session not found", auto_words("missing", 0, Q[:, 0], 2, (4, 1))),
    ("invalid B 0", auto_words("s", 0, Q[:, 0], 2, (0, 1))),
    ("invalid K_top 0", auto_words("s", 0, Q[:, 0], 2, (4, 0))),
    ("invalid H_kv 0", auto_words("s", 0, Q[:, 0], 0, (4, 1))),
    ("no multiple of H_kv", auto_words("s", 0, normal(0, 3, 32), 2, (4, 1))),
    ("head_map names kv head 2", auto_words("s", 0, Q[:, 0], 2, (4, 1), head_map=b"\0\2")),
    ("head_map has 3 bytes", auto_words("s", 0, Q[:, 0], 2, (4, 1), head_map=b"\0\0\0")),
    (
        "Q has 512 bytes",
        (*auto_words("s", 0, Q[:, 0], 2, (4, 1))[:8], BLOB * 8, b""),
    ),
    ("session not found", auto_fused_words("missing", 0, Q[:, 0], NONE, NONE, (4, 1))),
    (
        "K_suf has 0 bytes",
        (*auto_fused_words("s", 0, Q[:, 0], NONE, NONE, (4, 1))[:8], 3, Q.tobytes(), b"", b"", b""),
    ),
    (
        "head_map names kv head 255 of 2",
        auto_fused_words("s", 0, Q[:, 0], NONE, NONE, (4, 1), head_map=b"\1\xff"),
    ),
    (
        "head_map has 1 bytes",
        auto_fused_words("s", 0, Q[:, 0], NONE, NONE, (4, 1), head_map=b"\1"),
    ),
    ("invalid H 0", ("ATTEND.QUERYBATCH", 0, 1, 1, 1, b"", b"", b"")),
    ("invalid N 0", ("ATTEND.QUERYBATCH", 1, 0, 1, 1, b"", b"", b"")),
    ("invalid D 0", ("ATTEND.QUERYBATCH", 1, 1, 0, 1, b"", b"", b"")),
    ("invalid top_k 0", ("ATTEND.QUERYBATCH", 1, 1, 1, 0, b"1234", b"1234", b"1234")),
    ("K has 3 bytes", ("ATTEND.QUERYBATCH", 1, 1, 1, 1, b"1234", b"123", b"1234")),
    ("requires: <ns> <H> <D> [<attend_sid>]", ("KV.PREFIX.WARM", "s", 1)),
    ("invalid H 257", ("KV.PREFIX.WARM", "s", 257, 32)),
    ("invalid D 513", ("KV.PREFIX.WARM", "s", 1, 513)),
    ("unsupported D 33", ("KV.PREFIX.WARM", "s", 1, 33)),
    ("namespace not registered", ("KV.PREFIX.WARM", "s", 2, 32)),
    ("a sid must have 1 to 205", ("KV.PREFIX.WARM", "s", 2, 32, "")),
]


SUFFIX = normal(5, HEADS, 3, DIM), normal(6, HEADS, 3, DIM)
#: Every form of request, in order, behind the session `s`.
FORMS: dict[str, tuple[Any, ...]] = {
    "STORE": store_words("s", 0, K, V),
    "QUERY": query_words("s", 0, Q),
    "FUSED": fused_words("s", 0, Q, *SUFFIX, SAME),
    "SPARSE": sparse_words("s", 0, Q[:, 0], np.array([[1, 2], [3, 4]], np.int32), [2, 2**32 - 1]),
    "AUTO": auto_words("s", 0, Q[:, 0], HEADS, (4, 2), head_map=SAME),
    "AUTO_FUSED": auto_fused_words("s", 0, Q[:, 0], *SUFFIX, (4, 2), head_map=SAME),
    "QUERYBATCH": ("ATTEND.QUERYBATCH", *K.shape, 7, Q.tobytes(), K.tobytes(), V.tobytes()),
}
OFF_BY_ONE = [
    (form, place, change)
    for form, words in FORMS.items()
    for place, word in enumerate(words)
    if isinstance(word, bytes)
    for change in (1, -1)
]


@pytest.mark.parametrize(("form", "place", "change"), OFF_BY_ONE)
def test_a_blob_one_byte_too_long_or_too_short_is_refused(
    client: AttentionClient, form: str, place: int, change: int
) -> None:
    words = list(FORMS[form])
    before, good = client.info(), client.query("s", 0, Q)[0]
    words[place] = words[place] + b"\0" if change > 0 else words[place][:-1]
    assert " bytes, " in client.raw.error(*words)
    assert client.info() == before
    assert client.query("s", 0, Q)[0].tobytes() == good.tobytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_size_one_too_large_or_too_small_is_refused(client: AttentionClient, form: str) -> None:
    words = FORMS[form]
    good = client.query("s", 0, Q)[0]
    first = 1 if form == "QUERYBATCH" else 3
    sizes = range(first, next(i for i, word in enumerate(words) if isinstance(word, bytes)))
    free = {"QUERY": (5,), "AUTO": (5, 6), "AUTO_FUSED": (5, 6), "QUERYBATCH": (4,)}.get(form, ())
    for place in sizes:
        for change in (1, -1):
            if place in free:  # top_k, B and K_top fit anything
                continue
            odd = (*words[:place], words[place] + change, *words[place + 1 :])
            assert client.raw.error(*odd).startswith("ERR "), odd[:9]
    assert client.query("s", 0, Q)[0].tobytes() == good.tobytes()


@pytest.mark.parametrize("form", [form for form in FORMS if form != "STORE"])
def test_a_query_that_is_no_number_is_answered_so_and_changes_nothing(
    client: AttentionClient, form: str
) -> None:
    words, good = list(FORMS[form]), client.raw.call(*FORMS[form])
    bad = Q.copy()
    bad[0, 0, 3] = np.nan
    words[words.index(Q.tobytes())] = bad.tobytes()
    out = client.ask(tuple(words), *Q.shape)
    assert np.isnan(out[0]).all()
    assert client.raw.call(*FORMS[form]) == good


@pytest.mark.parametrize("form", ["QUERY", "FUSED", "SPARSE", "AUTO", "AUTO_FUSED"])
def test_a_window_longer_than_the_prefix_is_none(client: AttentionClient, form: str) -> None:
    good = client.raw.call(*FORMS[form], 0)
    for window in (TOKENS, TOKENS + 1, 2**31, 2**63):
        assert client.raw.call(*FORMS[form], window) == good
    assert client.raw.call(*FORMS[form], -(2**63)) == good == client.raw.call(*FORMS[form])


def test_one_token_sent_along_is_its_own_answer(client: AttentionClient) -> None:
    k, v = normal(8, 2, 1, 64), normal(9, 2, 1, 64)
    for top in (1, 2):
        words = "ATTEND.QUERYBATCH", 2, 1, 64, top, k.tobytes(), k.tobytes(), v.tobytes()
        np.testing.assert_allclose(client.ask(words, 2, 1, 64), v, atol=1e-6)


@pytest.mark.parametrize(("text", "words"), BAD, ids=[f"{w[0]}-{t}" for t, w in BAD])
def test_what_cannot_be_is_refused_and_changes_nothing(
    client: AttentionClient, text: str, words: tuple[Any, ...]
) -> None:
    before, info = client.query("s", 0, Q)[0], client.info()
    assert text in client.raw.error(*words)
    assert client.info() == info
    assert client.query("s", 0, Q)[0].tobytes() == before.tobytes()


FILLED: list[tuple[Any, ...]] = [
    query_words("filled_attn", 0, Q, 0),
    query_words("filled_attn", 0, Q),
    fused_words("filled_attn", 0, Q, NONE, NONE, SAME),
    sparse_words("filled_attn", 0, Q[:, 0], np.zeros((2, 1), "i4"), [1, 1]),
    auto_words("filled_attn", 0, Q[:, 0], 2, (4, 1)),
    auto_words("filled_attn", 0, Q[:, 0], 2, (4, 1), -1, 1),
    auto_fused_words("filled_attn", 0, Q[:, 0], NONE, NONE, (4, 1)),
]


@pytest.mark.parametrize("words", FILLED, ids=lambda words: f"{words[0]}-{len(words)}")
def test_a_query_that_names_a_fill_is_answered_by_that_one_only(
    client: AttentionClient, words: tuple[Any, ...]
) -> None:
    raw = client.raw
    fill = raw.call("KV.PREFIX.META", "filled", "BEGIN")
    raw.call("KV.PREFIX.META", "filled", "SET", fill, b"whole")
    raw.call(*store_words("filled_attn", 0, K, V), "GEN", fill)
    answer = raw.call(*words, "GEN", fill)
    assert answer == raw.call(*words)
    assert "session not found" in raw.error(*words, "GEN", fill + 1)
    for odd in (("GEN",), ("GEN", 0), ("GEN", "x"), ("GEN", -1), ("GEN", 1, 2)):
        assert raw.error(*words, *odd).startswith("ERR ")
    # Replaced under its name, by somebody who names no fill.
    client.store("filled_attn", 0, V, K)
    assert "session not found" in raw.error(*words, "GEN", fill)
    assert raw.call(*words) != answer


def test_rows_of_a_fill_that_is_over_are_not_taken(client: AttentionClient) -> None:
    raw = client.raw
    first = raw.call("KV.PREFIX.META", "over", "BEGIN")
    store = *store_words("over_attn", 0, K, V), "GEN"
    assert raw.error(*store, first).startswith("STALE ")
    raw.call("KV.PREFIX.META", "over", "SET", first, b"whole")
    assert raw.call(*store, first) == "OK"
    second = raw.call("KV.PREFIX.META", "over", "BEGIN")
    assert second > first
    assert raw.error(*store, first).startswith("STALE ")
    assert client.lookup("over_attn") == "MISS"


def test_a_window_shows_the_last_tokens_only(client: AttentionClient) -> None:
    for window, first in ((0, 0), (1, 49), (20, 30), (50, 0), (51, 0), (-1, 0), (2**31, 0)):
        wanted = reference.query(Q, K, V, first)[0]
        np.testing.assert_allclose(client.query("s", 0, Q, window)[0], wanted, atol=1e-5)
        found = client.ask(fused_words("s", 0, Q, NONE, NONE, SAME, window), *Q.shape)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_an_own_default_window_counts_where_none_is_named(server: Start) -> None:
    client = AttentionClient(server("--fa-window", "128"))
    k, v, q = normal(1, 1, 300, 32), normal(2, 1, 300, 32), normal(3, 1, 1, 32)
    client.store("s", 0, k, v)
    for window, first in ((None, 172), (-1, 172), (0, 0), (5, 295)):
        wanted = reference.query(q, k, v, first)[0]
        np.testing.assert_allclose(client.query("s", 0, q, window)[0], wanted, atol=1e-5)


def test_selectors_differ_and_unknown_ones_are_block_mean(client: AttentionClient) -> None:
    # Block 0 has the larger mean along q, block 1 the larger single key.
    k = np.zeros((1, 12, 32), np.float32)
    k[0, :4, 0] = 1.0
    k[0, 4, 0] = 3.0
    v = np.arange(12, dtype=np.float32).reshape(1, 12, 1).repeat(32, axis=2)
    q = np.zeros((1, 32), np.float32)
    q[0, 0] = 50.0
    client.store("blocks", 0, k, v)

    def ask(*options: int) -> float:
        return float(client.ask(auto_words("blocks", 0, q, 1, (4, 1), *options))[0])

    assert ask() == ask(-1) == ask(-1, 0) == ask(-1, 7) == ask(0, -3) == pytest.approx(1.5, 1e-3)
    assert ask(-1, 1) == pytest.approx(4.0, 1e-3)
    assert ask(2, 1) == pytest.approx(10.5, 1e-3)  # the window comes after the selection


def test_command_words_are_case_insensitive(client: AttentionClient) -> None:
    assert client.raw.call("attend.prefix.lookup", "s", 0) == "HIT"


def test_storing_again_takes_any_shape(client: AttentionClient) -> None:
    k, v, q = normal(5, 1, 1, 512), normal(6, 1, 1, 512), normal(7, 1, 1, 512)
    client.store("again", 3, K, V)
    client.store("again", 3, k, v)
    np.testing.assert_allclose(client.query("again", 3, q)[0], v, atol=1e-6)


def test_one_token_is_its_own_answer(client: AttentionClient) -> None:
    k, v = normal(8, 2, 1, 64), normal(9, 2, 1, 64)
    q = normal(10, 2, 1, 64, scale=30)
    none = normal(0, 2, 0, 64)
    client.store("one", 0, k, v)
    for words in (
        query_words("one", 0, q),
        fused_words("one", 0, q, none, none, SAME),
        sparse_words("one", 0, q[:, 0], np.zeros((2, 1), np.int32), [1, 1]),
        auto_words("one", 0, q[:, 0], 2, (64, 8)),
        auto_fused_words("one", 0, q[:, 0], none, none, (1, 1)),
    ):
        np.testing.assert_allclose(client.ask(words, 2, 1, 64), v, atol=1e-6)


def test_a_nan_query_harms_nobody_else(client: AttentionClient) -> None:
    bad = np.full_like(Q, np.nan)
    before = client.query("s", 0, Q)[0]
    assert np.isnan(client.query("s", 0, bad)[0]).all()
    assert np.isnan(client.ask(auto_words("s", 0, bad[:, 0], 2, (4, 2)))).all()
    assert client.query("s", 0, Q)[0].tobytes() == before.tobytes()


def test_nothing_left_to_see_is_zeros(client: AttentionClient) -> None:
    """WIRE.md section 17: an empty QUERY_SPARSE was NaN on the public server."""
    ids = np.array([[99, -1], [3, 4]], np.int32)
    found = client.ask(sparse_words("s", 0, Q[:, 0], ids, [2, 1], 0), HEADS, DIM)
    assert not found[0].any()
    np.testing.assert_allclose(found[1], V[1, 3], atol=1e-6)
    assert not client.ask(sparse_words("s", 0, Q[:, 0], ids, [2, 2], 5)).any()
    assert not client.ask(sparse_words("s", 0, Q[:, 0], ids, [0, 0])).any()


def test_drop_frees_a_layer_or_a_session(client: AttentionClient) -> None:
    for layer in range(3):
        client.store("dropped", layer, K, V)
    assert client.raw.call("ATTEND.PREFIX.DROP", "dropped", 1) == 1
    assert [client.lookup("dropped", layer) for layer in range(3)] == ["HIT", "MISS", "HIT"]
    assert client.raw.call("ATTEND.PREFIX.DROP", "dropped") == 2
    assert client.raw.call("ATTEND.PREFIX.DROP", "dropped") == 0
    assert "session not found" in client.raw.error(*query_words("dropped", 0, Q))


def test_dropping_a_prefix_frees_its_slots(client: AttentionClient) -> None:
    """WIRE.md 6.3: slots of ns and ns_attn go, though only the V-store's share is counted."""
    client.raw.call("KV.PREFIX.REGISTER", "held", 64, "fp16")
    for sid in ("held", "held_attn", "loose", "loose_attn", "held_attnx"):
        client.store(sid, 0, K, V)
    assert client.raw.call("KV.PREFIX.DROP", "held", "loose") == 1
    states = [client.lookup(s) for s in ("held", "held_attn", "loose", "loose_attn", "held_attnx")]
    assert states == ["MISS", "MISS", "MISS", "MISS", "HIT"]


def test_many_clients_get_their_own_answers(shared: ServerProcess) -> None:
    clients = [AttentionClient(shared) for _ in range(8)]
    data = [(normal(i, 1, 30, 32), normal(i + 100, 1, 30, 32)) for i in range(8)]
    q = normal(7, 1, 2, 32)
    for i, client in enumerate(clients):
        client.raw.send(client.raw.pack(*store_words(f"own{i}", 0, *data[i])))
        client.raw.send(client.raw.pack(*query_words(f"own{i}", 0, q)) * 5)
    for i, client in enumerate(clients):
        assert client.raw.read() == "OK"
        out, lse = reference.query(q, *data[i])
        wanted = np.concatenate([out.reshape(-1), lse.reshape(-1)])
        for _ in range(5):
            found = np.frombuffer(client.raw.read(), np.float32)
            np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_long_query_keeps_nobody_else_waiting(shared: ServerProcess) -> None:
    """Held together by order, not by time: the pongs are there before the answer is."""
    slow, quick = AttentionClient(shared), AttentionClient(shared)
    k, many = normal(1, 1, 4000, 32), normal(2, 1, 2000, 32)
    slow.store("long", 0, k, k)
    slow.raw.send(slow.raw.pack(*query_words("long", 0, many)))
    for _ in range(20):
        assert quick.raw.call("PING") == "PONG"
    assert quick.raw.call("V.CREATE", "meanwhile", 32) >= 0
    assert quick.lookup("long") == "HIT"
    assert not has_input(slow.raw.socket)
    assert len(slow.raw.read()) == 2000 * 33 * 4


def test_the_server_ends_well_after_and_during_a_computation(server: Start) -> None:
    """MLX's CPU build can abort at exit once threads that computed are gone."""
    process = server()
    client = AttentionClient(process)
    k, many = normal(1, 1, 4000, 32), normal(2, 1, 2000, 32)
    client.store("s", 0, k, k)
    client.raw.send(client.raw.pack(*query_words("s", 0, many)))
    quick = process.client()
    while b"cmd=attend.prefix.query" not in quick.call("CLIENT", "LIST"):
        assert quick.call("PING") == "PONG"
    assert process.stop() == 0
    assert len(client.raw.read()) == 2000 * 33 * 4
    assert process.errors.read_text() == ""


NO_MLX = "import sys\nsys.modules['mlx'] = None\n"
BROKEN_MLX = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "mlx.core":
            raise ImportError("libmlx.so: cannot open shared object file")
sys.meta_path.insert(0, Broken())
"""


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (("--no-attention",), "", "--no-attention"),
        (("--metal-attention", "--no-attention", "--sdpa-auto-warm"), "", "--no-attention"),
        ((), NO_MLX, "MLX is not installed"),
        ((), BROKEN_MLX, "cannot open shared object"),
    ],
)
def test_without_an_engine_the_rest_works(
    server: Start, tmp_path: Path, flags: tuple[str, ...], code: str, why: str
) -> None:
    extra = tmp_path / "extra.py"
    extra.write_text(code)
    client = AttentionClient(server(*flags, extra=extra))
    client.raw.call("KV.PREFIX.REGISTER", "ns", 64, "fp16")
    rows = np.ones((2, 64), np.float32).tobytes()
    for side in ("ns_pk", "ns_pv"):
        client.raw.call("V.STOREBATCH", side, 0, 0, 2, rows)
    one = np.ones((1, 1), np.float32).tobytes()
    for words in (
        store_words("s", 0, K, V),
        ("ATTEND.QUERYBATCH", 1, 1, 1, 1, one, one, one),
        ("KV.PREFIX.WARM", "ns", 2, 32),
    ):
        said = client.raw.error(*words)
        assert said.startswith("ERR attention engine not available")
        assert why in said
    assert client.raw.call("KV.PREFIX.DROP", "ns") == 1
    assert client.info()["sdpa_warm"] == 0
    assert client.raw.call("PING") == "PONG"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mlx_is_loaded_by_the_first_command_that_needs_it(server: Start) -> None:
    process = server("--metal-attention")
    client = AttentionClient(process)
    maps = Path(f"/proc/{process.pid}/maps")
    client.raw.call("KV.PREFIX.LOOKUP", "ns")
    client.info()
    assert client.lookup("s") == "MISS"
    assert "libmlx" not in maps.read_text()
    client.store("s", 0, K, V)
    assert "libmlx" in maps.read_text()
