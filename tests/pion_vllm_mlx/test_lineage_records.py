"""Manifests of segments, and how they are put together, without a server or a model."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pion_patches.pieces import RowLayout
from pion_vllm_mlx.lineage import Lineage
from pion_vllm_mlx.lineage.blocks import BLOCK, Scope
from pion_vllm_mlx.lineage.match import Asked, Stored, match_rows
from pion_vllm_mlx.lineage.records import (
    Segment,
    State,
    block_sums,
    next_trail,
    read_segment,
    read_state,
    write_segment,
    write_state,
)
from pion_vllm_mlx.manifest_fields import Blob, LeafEntry, ManifestError, Rows
from pion_vllm_mlx.transport.endpoint import Endpoint
from tests.pion_patches.zoo import build

MODEL = "a" * 64
ROOT = Scope(MODEL).root()
IDS_64 = base64.b64encode(b"".join(n.to_bytes(4, "little") for n in range(64))).decode()
LAYOUT = RowLayout("dense", ("float16",), (32,))


def leaf(tokens: int, *, state: bool) -> LeafEntry:
    rows = Rows(0, tokens, LAYOUT, "fp16", "")
    blob = Blob(1, 10, "b" * 16)
    if state:
        return LeafEntry((1,), "ArraysCache", {"offset": tokens}, None, None, blob)
    return LeafEntry((0,), "KVCache", {"offset": tokens, "rows": tokens}, rows, rows, None)


def segment(asked: Asked, start: int, end: int, before: Segment | None, **changes: Any) -> Segment:
    """A segment of `asked` as a capture makes it; its trail is made up from `changes`."""
    state = changes.pop("state", False)
    salt = changes.pop("salt", "")
    tokens = end - start
    base = "" if before is None else (before.trail_at(start) or "")
    trail: list[str] = []
    for block in range(tokens // BLOCK):
        trail.append(next_trail(trail[-1] if trail else base, f"{start}.{block}{salt}"))
    made = Segment(
        digest=(asked.digest_at(end) if state else asked.digest_after(start)).hex(),
        parent="" if before is None else before.digest,
        base=base,
        start=start,
        ids=tuple(asked.ids[start:end].tolist()),
        fingerprint=MODEL,
        leaves=(leaf(tokens, state=False), leaf(tokens, state=True))[: 2 if state else 1],
        sums=("c" * 16,) * -(-tokens // BLOCK),
        trail=tuple(trail),
        prefill_ms=7,
        prefill_step=512,
    )
    return dataclasses.replace(made, **changes)


IDS = [int(token) for token in np.random.RandomState(0).randint(0, 199, 400)]
ASKED = Asked.of(ROOT, IDS)
ONE = segment(ASKED, 0, 150, None)
TWO = segment(ASKED, 128, 300, ONE)


@pytest.mark.parametrize(
    "made",
    [
        ONE,
        TWO,
        segment(ASKED, 128, 256, ONE, state=True),
        Segment("d" * 64, "e" * 64, "", 64, tuple(IDS[:64]), MODEL),
    ],
)
def test_a_manifest_comes_back_as_it_was(made: Segment) -> None:
    assert read_segment(write_segment(made)) == made


@pytest.mark.parametrize("made", [State("d" * 64, MODEL), State("e" * 64, MODEL, anchor=True)])
def test_a_states_manifest_comes_back_as_it_was(made: State) -> None:
    blob = write_state(made)
    assert read_state(blob) == made
    body = blob.partition(b"\n")[2]
    for wrong in (body.replace(b"true", b"1").replace(b"false", b"0"), body.replace(b"d", b"g")):
        head = f"pion-state 1 {xxhash.xxh3_128_hexdigest(wrong)}\n".encode()
        with pytest.raises(ManifestError):
            read_state(head + wrong)
    with pytest.raises(ManifestError):
        read_state(write_segment(ONE))
    with pytest.raises(ManifestError):
        read_segment(blob)


def test_a_manifest_of_the_first_layout_is_still_read() -> None:
    """N04: its bytes, by hand; whoever changes what is written changes the layout's version."""
    body = (
        '{{"layout":"[token][head][dim] little-endian","digest":"{}","parent":"","base":"",'
        '"start":0,"tokens":64,"ids":"{}","model":"{}","leaves":[{{"path":[0],"kind":"KVCache",'
        '"meta":{{"offset":64,"rows":64}},"keys":{{"layer":0,"rows":64,"kind":"dense",'
        '"parts":[["float16",32]],"store":"fp16"}},"values":null,"blob":null}}],"sums":"{}",'
        '"trail":"{}","prefill_ms":7,"prefill_step":512}}'
    ).format("d" * 64, IDS_64, MODEL, "c" * 16, "e" * 16)
    head = f"pion-segment 1 {xxhash.xxh3_128_hexdigest(body.encode())}\n"
    read = read_segment((head + body).encode())
    assert read.ids == tuple(range(64))
    assert write_segment(read) == (head + body).encode()


REFUSED: dict[str, dict[str, Any]] = {
    "a start within a block": {"start": 1, "base": "1" * 16},
    "a base at the start": {"base": "1" * 16},
    "no base behind the start": {"start": 64},
    "less than a block": {"ids": tuple(IDS[:63])},
    "a checksum too few": {"sums": ("c" * 16,)},
    "a trail too few": {"trail": ()},
    "rows of another number of tokens": {"leaves": (leaf(64, state=False),)},
    "two leaves in one place": {"leaves": (leaf(150, state=False),) * 2},
    "no model": {"fingerprint": "a"},
    "no digest": {"digest": ""},
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_manifest_that_does_not_add_up_is_refused(why: str) -> None:
    with pytest.raises(ManifestError):
        read_segment(write_segment(dataclasses.replace(ONE, **REFUSED[why])))


def test_damage_is_refused_and_so_are_manifests_of_other_kinds() -> None:
    """E18: cut short, one bit flipped, something else altogether."""
    blob = write_segment(TWO)
    for at in range(0, len(blob), 7):
        for wrong in (blob[:at], blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :]):
            with pytest.raises(ManifestError):
                read_segment(wrong)
    for wrong in (
        b"",
        b"pion-prefix 1 00\n{}",
        b"\0" * 100,
        blob.replace(b"segment 1", b"segment 2"),
    ):
        with pytest.raises(ManifestError):
            read_segment(wrong)


JSON = st.recursive(
    st.none() | st.integers() | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@example("\x80", "ids")
@given(JSON, st.sampled_from(sorted(json.loads(write_segment(ONE).partition(b"\n")[2]))))
def test_any_other_value_of_any_field_is_refused_or_read_as_another_segment(
    value: Any, name: str
) -> None:
    fields = json.loads(write_segment(ONE).partition(b"\n")[2])
    if value == fields[name] and type(value) is type(fields[name]):
        return
    body = json.dumps(fields | {name: value}, separators=(",", ":")).encode()
    blob = b"pion-segment 1 %s\n%s" % (xxhash.xxh3_128_hexdigest(body).encode(), body)
    try:
        read = read_segment(blob)
    except ManifestError:
        return
    assert read != ONE


def test_a_checksum_covers_one_block_of_every_piece() -> None:
    pieces = [bytes(np.random.RandomState(n).bytes(150 * 8)) for n in range(3)]
    sums = block_sums([memoryview(piece) for piece in pieces], 150)
    assert len(sums) == 3
    for number, piece in enumerate(pieces):
        for at in range(0, len(piece), 97):
            wrong = piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
            changed = [*pieces[:number], wrong, *pieces[number + 1 :]]
            found = block_sums([memoryview(each) for each in changed], 150)
            block = at // 8 // BLOCK
            assert [one != other for one, other in zip(sums, found, strict=True)] == [
                n == block for n in range(3)
            ]


# --- matching ----------------------------------------------------------------------------------


def test_a_match_is_exact_to_the_token() -> None:
    """A07, L01: whatever the common prefix is, no block more and no token less."""
    for shared in (0, 1, 63, 64, 65, 127, 128, 149, 150, 200, 299, 300, 301, 400):
        ids = [*IDS[:shared], *([198] * (400 - shared))]
        ids[shared : shared + 1] = [(IDS[shared] + 1) % 199] if shared < 400 else []
        asked = Asked.of(ROOT, ids)
        found = {
            each.start: each
            for each in (ONE, TWO)
            if each.start // BLOCK < len(asked.digests)
            and asked.digest_after(each.start).hex() == each.digest
        }
        match = match_rows(asked, found)
        # The second segment is found by its first block, tokens 128 to 191.
        whole = min(shared, 300 if shared >= 192 else 150)
        assert match.tokens == (whole if shared >= BLOCK else 0)
        at = 0
        for link in match.links:
            assert link.segment.start == at
            at += link.used
        assert at == match.tokens


def test_a_gap_ends_the_match_and_so_does_a_segment_of_another_run() -> None:
    three = segment(ASKED, 256, 384, TWO)
    assert match_rows(ASKED, {0: ONE, 128: TWO, 256: three}).tokens == 384
    assert match_rows(ASKED, {0: ONE, 256: three}).tokens == 150
    assert match_rows(ASKED, {128: TWO, 256: three}).tokens == 0
    other = segment(ASKED, 0, 150, None, salt="x")
    assert match_rows(ASKED, {0: other, 128: TWO}).tokens == 150
    assert match_rows(ASKED, {0: ONE, 128: dataclasses.replace(TWO, parent="f" * 64)}).tokens == 150


def test_a_stateful_match_ends_at_the_last_checkpoint_with_all_it_rests_on() -> None:
    """C04, C05: a checkpoint counts only if everything below it is there."""
    first = segment(ASKED, 0, 128, None, state=True)
    second = segment(ASKED, 128, 256, first, state=True)
    third = segment(ASKED, 256, 384, second, state=True)

    def matched(segments: dict[int, Segment], *gone: int, **more: Any) -> tuple[int, int]:
        traces, states = more.get("traces", {}), segments.keys() - set(gone)
        match = Stored(ASKED, segments, traces, dict.fromkeys(states, 1)).match()
        return match.tokens, match.seen

    whole = {128: first, 256: second, 384: third}
    assert matched(whole) == (384, 384)
    assert matched(whole, 384) == (256, 256)
    assert matched(whole, 256) == (384, 384)
    assert matched(whole, 128, 256, 384) == (0, 0)
    assert matched({128: first, 384: third}) == (128, 128)
    assert matched({256: second, 384: third}) == (0, 0)
    other = segment(ASKED, 0, 128, None, state=True, salt="x")
    assert matched({128: other, 256: second}) == (128, 128)
    trace = Segment("d" * 64, "", "", 128, (*IDS[128:200], 5, 5, 5), MODEL)
    assert matched({128: first}, traces={128: trace}) == (128, 200)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_is_found_the_links_are_one_beginning_of_the_ids(data: st.DataObject) -> None:
    """Segments of several runs, overlapping, with gaps: what is put together is contiguous, of the
    very ids, and each rests on the one before."""
    made: list[Segment] = []
    for number in range(data.draw(st.integers(1, 8))):
        before = data.draw(st.sampled_from([None, *made]))
        low = 0 if before is None else before.start // BLOCK + 1
        high = 0 if before is None else before.end // BLOCK
        start = BLOCK * data.draw(st.integers(low, max(low, high)))
        end = start + data.draw(st.integers(BLOCK, 150))
        if end <= len(IDS) and (before is None or start <= before.end):
            made.append(segment(ASKED, start, end, before, salt=str(number)))
    found = {each.start: each for each in data.draw(st.permutations(made))}
    match = match_rows(ASKED, found)
    at = 0
    for number, link in enumerate(match.links):
        assert link.segment.start == at
        assert link.segment.base == (
            "" if not number else match.links[number - 1].segment.trail_at(at)
        )
        assert list(link.segment.ids[: link.used]) == IDS[at : at + link.used]
        at += link.used
    assert at == match.tokens
    assert match.tokens >= BLOCK or 0 not in found


def test_a_stateful_prefill_pauses_at_block_ends() -> None:
    """Where asked for, every 1,024 tokens, and at the last whole block; nowhere without state."""
    index = Lineage(build("qwen3_5"), Endpoint("127.0.0.1", 1))
    assert index.stateful
    assert index.checkpoints(0, 63) == ()
    assert index.checkpoints(0, 64) == (64,)
    assert index.checkpoints(0, 150, at=[147, 100, 3]) == (64, 128)
    assert index.checkpoints(128, 150) == ()
    assert index.checkpoints(100, 2500) == (1024, 2048, 2496)
    assert index.checkpoints(1024, 2100, at=[1024, 9999]) == (2048,)
    plain = Lineage(build("llama"), Endpoint("127.0.0.1", 1))
    assert not plain.stateful
    assert plain.checkpoints(0, 2500, at=[147]) == ()
