"""Conversations as a tree of segments: any stored prefix of a token list is found and restored.

    lineage = Lineage(model, lane)
    match = lineage.find(ids)                    # one round trip
    cache = lineage.restore(match)               # a cache of the first match.tokens ids, or None
    …                                            # compute the rest
    capture = lineage.capture(ids, cache)        # in the model's thread
    lineage.store(capture)                       # in any thread

`blocks`, `records`, `match` and `tree` are pure; `search`, `fetching`, `filling` and `eviction`
talk to the server; `index` puts them together. docs/lineage.md has the bytes.
"""

from pion_vllm_mlx.lineage.blocks import BLOCK, Scope
from pion_vllm_mlx.lineage.capture import Capture
from pion_vllm_mlx.lineage.index import Lineage
from pion_vllm_mlx.lineage.match import Match

__all__ = ["BLOCK", "Capture", "Lineage", "Match", "Scope"]
