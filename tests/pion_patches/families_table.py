"""Writes docs/model_families.md from the zoo: what of each family is stored where.

python -m tests.pion_patches.families_table > docs/model_families.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from pion_patches.cache_rebuild import dismantle, known_caches
from pion_patches.hybrid import Routing, classify, fit_to_store, is_hybrid, route
from tests.pion_patches.shipping import feed
from tests.pion_patches.zoo import build, families, left_out

HEAD = """# Model families

What a prompt cache of each mlx-lm model family becomes when a prefix is stored. The table is made
from tiny random models, of four layers where that is possible, of every family the installed mlx-lm
can build:

    python -m tests.pion_patches.families_table > docs/model_families.md

A test holds it to them. Another continues each of them from its stored cache: the largest
difference of any logit from continuing without the store is exactly 0.0 in float32, and in float16
and bfloat16 wherever the family runs in those on a CPU.

* **rows**: K and V in the V-store, in the cache's own dtype. *kv*: one row a token. *window*: the
  window's rows in ring order, with the ring position in the manifest. *chunk*: the rows since the
  chunk began. Where K and V, or layers, differ in width, they are registered by
  `KV.PREFIX.REGISTER.SCHEMA`; all others are *uniform*, `KV.PREFIX.REGISTER`.
* **blobs**: *recurrent* or private (*opaque*) state, one `SSM.PREFIX` blob a cache. It exists only
  at the token where it was captured, so such a prefix is reused whole or not at all.
* **shorter prefixes**: whether a stored prefix also serves its own first tokens.

Refused (`UnsupportedCache`, and the caller prefills): a cache class not listed here, a subclass of
one that is, a batch of several sequences or with padding, state that is missing, zero everywhere or
not finite, a cache of another token count. Known classes:

{known}

With `kv_bits`, attention caches become `QuantizedKVCache`, stored as the codes they are: `mlx4g32`
rows at 4 bits, groups of 32 and fp16 scales, `raw` rows otherwise. Rows wider than 8192 values, and
layers after the 256th, go as blobs.

| family | caches | rows | blobs | registered | shorter prefixes | restored |
|---|---|---|---|---|---|---|
"""
TOKENS = 20


def table() -> str:
    """The whole page."""
    known = "\n".join(f"* `{name}`" for name in known_caches())
    rows = [_family(name) for name in families]
    rows += [_left_out(name, reason) for name, reason in left_out.items()]
    count = f"{len(families)} families are exact, {len(left_out)} are not run."
    return HEAD.format(known=known) + "\n".join(sorted(rows)) + f"\n\n{count}\n"


def _family(name: str) -> str:
    model: Any = build(name)
    cache = make_prompt_cache(model)
    feed(name, model, cache, 0, TOKENS)
    routing = route(fit_to_store(dismantle(cache, TOKENS)))
    return _row(name, cache, _registered(routing), "exact")


def _left_out(name: str, reason: str) -> str:
    return _row(name, make_prompt_cache(build(name)), "not known", f"not run: {reason}")


def _row(name: str, cache: list[Any], registered: str, restored: str) -> str:
    slots = classify(cache)
    rows = _counted(slot.route for slot in slots if slot.route in ("kv", "window", "chunk"))
    blobs = _counted(slot.route for slot in slots if slot.route in ("recurrent", "opaque"))
    shorter = "yes"
    if is_hybrid(slots) or "chunk" in rows:
        shorter = "no"
    elif "window" in rows:
        shorter = "until the window wraps"
    caches = _counted(slot.kind for slot in slots)
    return f"| {name} | {caches} | {rows} | {blobs} | {registered} | {shorter} | {restored} |"


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items()) or "none"


def _registered(routing: Routing) -> str:
    if not routing.keys:
        return "nothing: no rows"
    if routing.uniform is not None:
        return "uniform"
    same = len(set(routing.keys)) == len(set(routing.values)) == 1
    return "K ≠ V" if same else "layers differ"


if __name__ == "__main__":
    print(table(), end="")
