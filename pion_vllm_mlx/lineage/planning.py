"""What a store has to send: the records a server lacks of a capture, or why there are none."""

from __future__ import annotations

from typing import Final

from pion_vllm_mlx.lineage.blocks import BLOCK, floor_block
from pion_vllm_mlx.lineage.capture import Capture
from pion_vllm_mlx.lineage.drafts import Draft, draft_end, draft_rows, draft_state
from pion_vllm_mlx.lineage.match import Link
from pion_vllm_mlx.lineage.search import search, search_state
from pion_vllm_mlx.lineage.tails import tail_start
from pion_vllm_mlx.tier import Tier
from pion_vllm_mlx.transport import Lane, Patience

#: What `store` answers, and the counter each is added to.
OUTCOMES: Final = {
    "stored": "stores",
    #: The server has all of it, but for less than a block at most.
    "known": "stores_skipped",
    #: Another client is filling one of its records.
    "busy": "stores_skipped",
    #: What the captured rows rest on is not there (any more).
    "gap": "stores_failed",
    #: Another run's rows of these tokens are there, which differ from those in a few last bits.
    "other": "stores_skipped",
    #: The conversation alone exceeds the budget.
    "oversize": "oversize",
    "failed": "stores_failed",
}
#: A store waits behind the writes of others.
_UNHURRIED: Final = Patience(first_byte=2, stall=2, total=10)
#: Records to be written and the segments they rest on, or an outcome.
Planned = tuple[list[Draft], tuple[Link, ...]] | str


def plan_rows(lane: Lane, capture: Capture, tier: Tier, prefill_seconds: float) -> Planned:
    """The records the server lacks and the segments they rest on, or why there are none."""
    match = search(lane, capture.asked, capture.fingerprint, _UNHURRIED, stateful=False)
    start = floor_block(match.tokens)
    if start < capture.start:
        return "gap"
    if capture.tokens - start < BLOCK:
        free = None
        if match.tokens < capture.tokens:
            free = tail_start(lane, capture, _UNHURRIED)
        if free is None:
            return "known"
        start = free
    if match.trail_at(start) != capture.trail_at(start):
        return "other"
    parent = next((link.segment.digest for link in match.links if link.end >= start > 0), "")
    drafts = draft_rows(capture, start, parent, tier, prefill_seconds)
    return list(drafts), match.links


def plan_state(lane: Lane, capture: Capture, tier: Tier, prefill_seconds: float) -> Planned:
    """The same for a model with state, whose segments may have lost theirs."""
    stored = search_state(lane, capture.asked, capture.fingerprint, _UNHURRIED)
    before, there = stored.links_to(capture.start), stored.links_to(capture.tokens)
    if there is not None and capture.tokens in stored.states:
        return "known"
    if before is None:
        return "gap"
    if before and before[-1].segment.trail_at(capture.start) != capture.base:
        return "other"
    if there is not None:
        same = there[-1].segment.trail_at(capture.tokens) == capture.trail_at(capture.tokens)
        return ([draft_end(capture)], there) if same else "other"
    parent = before[-1].segment.digest if before else ""
    traced = stored.match().seen >= capture.tokens
    drafts = draft_state(capture, parent, tier, prefill_seconds, traced=traced)
    return list(drafts), before
