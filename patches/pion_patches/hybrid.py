"""Mixed models: which piece of which cache goes where.

A model's cache list may hold one cache a layer, fewer (layers that share K/V) or more; plain and
windowed attention, recurrent layers, and pairs of both. So nothing is guessed from layer numbers:
the caches themselves are routed.

    image = dismantle(cache, len(ids))
    image = fit_to_store(image)                  # what the V-store has no place for becomes blobs
    routing = route(image)
    routing.uniform                              # ("bf16", 512): KV.PREFIX.REGISTER ns 512 bf16
    routing.key_specs, routing.value_specs       # or ("fmt=bf16,dim=512", …): REGISTER.SCHEMA
    for lane, leaf in zip(routing.lanes, image.leaves):
        leaf.keys.to_bytes()                     # → V.STOREBATCH ns_pk lane.rank … FMT PACKED
        pack_arrays(leaf.kind, leaf.arrays, image.tokens)       # → SSM.PREFIX.STORE ns lane.blob

and back, with each leaf's path, kind, meta, layouts and numbers of rows kept in the manifest:

    keys = RowPiece.from_buffer(data, layout, rows)
    arrays = unpack_arrays(kind, blob, tokens)
    image = CacheImage(tokens, (Leaf(path, kind, meta, keys, values, arrays), …))
    cache = rebuild(make_prompt_cache(model), image)

A pure recurrent model has no rows at all: only a manifest and blobs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .cache_class import class_named, known_class
from .cache_rebuild import flatten
from .folding import fold_rows
from .pieces import CacheImage, Leaf, RowLayout

#: What the V-store holds: layers a session, dim a row.
MOST_LAYERS: Final = 256
WIDEST_ROW: Final = 8192
#: Declared for a side that has no rows while the other has; nothing is ever stored there.
_NO_ROWS: Final = "fmt=raw,dim=1"


@dataclass(frozen=True, slots=True)
class Slot:
    """One cache of a template: its place, class, and the way its state goes.

    `route`: "kv", "window", "chunk" (rows for the V-store), "recurrent" or "opaque" (a blob).
    """

    path: tuple[int, ...]
    kind: str
    route: str


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a leaf's pieces go: V-store layer `rank`, SSM layer `blob`, either None if unused."""

    slot: Slot
    rank: int | None
    blob: int | None


@dataclass(frozen=True, slots=True)
class Routing:
    """All leaves of an image. `keys`, `values`: row layouts by rank, None for a side without."""

    lanes: tuple[Lane, ...]
    keys: tuple[RowLayout | None, ...]
    values: tuple[RowLayout | None, ...]

    @property
    def uniform(self) -> tuple[str, int] | None:
        """V-store format and dim, if K and V of all ranks have the same; else None."""
        layouts = (*self.keys, *self.values)
        specs = {(each.store_format, each.store_dim) for each in layouts if each is not None}
        return specs.pop() if len(specs) == 1 and None not in layouts else None

    @property
    def key_specs(self) -> tuple[str, ...]:
        """One layer specification a rank, for the K side of a schema."""
        return tuple(map(_spec, self.keys))

    @property
    def value_specs(self) -> tuple[str, ...]:
        """One layer specification a rank, for the V side of a schema."""
        return tuple(map(_spec, self.values))


def classify(cache: Sequence[Any]) -> tuple[Slot, ...]:
    """Route each cache of a template or a live list; UnsupportedCache for an unknown one."""
    found = [(path, known_class(item, path)) for path, item in flatten(cache)]
    return tuple(Slot(path, cls.kind, cls.route) for path, cls in found)


def is_hybrid(slots: Sequence[Slot]) -> bool:
    """Whether some state exists only at the token where it was captured."""
    return any(slot.route in ("recurrent", "opaque") for slot in slots)


def route(image: CacheImage) -> Routing:
    """Number the leaves: V-store layer = rank among leaves with rows, SSM layer = leaf index."""
    lanes: list[Lane] = []
    keys: list[RowLayout | None] = []
    values: list[RowLayout | None] = []
    for index, leaf in enumerate(image.leaves):
        has_rows = leaf.keys is not None or leaf.values is not None
        slot = Slot(leaf.path, leaf.kind, class_named(leaf.kind, leaf.path).route)
        lanes.append(Lane(slot, len(keys) if has_rows else None, index if leaf.arrays else None))
        if has_rows:
            keys.append(None if leaf.keys is None else leaf.keys.layout)
            values.append(None if leaf.values is None else leaf.values.layout)
    return Routing(tuple(lanes), tuple(keys), tuple(values))


def fit_to_store(
    image: CacheImage, *, widest: int = WIDEST_ROW, most_layers: int = MOST_LAYERS
) -> CacheImage:
    """The same image, with rows the V-store has no place for turned into arrays for a blob.

    Those are rows wider than `widest` and the leaves after the first `most_layers` with rows.
    `rebuild` takes either form.
    """
    leaves: list[Leaf] = []
    ranks = 0
    for leaf in image.leaves:
        pieces = [piece for piece in (leaf.keys, leaf.values) if piece is not None]
        wide = any(piece.layout.store_dim > widest for piece in pieces)
        if pieces and (wide or ranks == most_layers):
            leaves.append(fold_rows(leaf))
            continue
        ranks += bool(pieces)
        leaves.append(leaf)
    return dataclasses.replace(image, leaves=tuple(leaves))


def _spec(layout: RowLayout | None) -> str:
    return f"fmt={layout.store_format},dim={layout.store_dim}" if layout is not None else _NO_ROWS
