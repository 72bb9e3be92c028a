"""Rows that cannot go to the V-store as rows travel as arrays of a blob; this turns one into other.

Meta of a folded leaf adds `folded`: the row format of each side that has rows.
"""

from __future__ import annotations

import dataclasses

from .cache_class import Misfit
from .pieces import Leaf, RowPiece


def fold_rows(leaf: Leaf) -> Leaf:
    """The same leaf with its rows as arrays, K's parts first."""
    sides = {"keys": leaf.keys, "values": leaf.values}
    pieces = {side: piece for side, piece in sides.items() if piece is not None}
    meta = {**leaf.meta, "folded": {side: piece.fmt for side, piece in pieces.items()}}
    arrays = tuple(part for piece in pieces.values() for part in piece.parts)
    return dataclasses.replace(leaf, meta=meta, keys=None, values=None, arrays=arrays)


def unfold_rows(leaf: Leaf) -> Leaf:
    """The leaf with its rows as rows again, or as it is; raises Misfit if that cannot be."""
    folded = leaf.meta.get("folded")
    if folded is None:
        return leaf
    if not isinstance(folded, dict) or not {"keys", "values"} >= folded.keys():
        raise Misfit(f"folded is {folded!r}")
    pieces, arrays = {}, list(leaf.arrays)
    for side in ("keys", "values"):
        shape = leaf.meta.get(side)
        if side not in folded:
            continue
        count = len(shape["widths"]) if isinstance(shape, dict) and "widths" in shape else 0
        parts = [part for part in arrays[:count] if part is not None and part.ndim == 2]
        if not parts or len(parts) != count:
            raise Misfit(f"its {side} are missing")
        pieces[side] = RowPiece(tuple(parts), str(folded[side]))
        del arrays[:count]
    if arrays or leaf.keys is not None or leaf.values is not None:
        raise Misfit("both folded and unfolded rows")
    meta = {name: value for name, value in leaf.meta.items() if name != "folded"}
    keys, values = pieces.get("keys"), pieces.get("values")
    return dataclasses.replace(leaf, meta=meta, keys=keys, values=values, arrays=())
