"""Caches of attention layers, as rows: plain, quantised, windowed, chunked, concatenated.

Meta of every class: `offset`, tokens the cache has seen; `rows`, rows stored; `unused`, true where
the cache was never written to; else `keys` and `values`, for each side its `heads`, the `widths`
of its tensors a head and their `dtypes`. Those suffice to make a side again that has no bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .cache_class import CacheClass, Cut, Misfit, Taken, Unsound, check_count, count_of, integer
from .pieces import (
    ITEMSIZE,
    NATIVE_FORMAT,
    HeadPiece,
    Leaf,
    RowPiece,
    dtype_name,
    dtype_named,
)

_STEP = 256
_MODULE = "mlx_lm.models.cache"
_MOST_ROWS = 1 << 30
_WIDEST = 1 << 20
Tensors = tuple[mx.array, ...]


def take_rows(cache: Any, tokens: int, rows: Callable[[mx.array], mx.array], **meta: Any) -> Taken:
    """Both sides of a cache; `rows` picks those to store from a tensor `[1, H, L, D]`."""
    if cache.keys is None and cache.values is None and count_of(cache, 0) == 0:
        return Taken({**meta, "offset": 0, "rows": 0, "unused": True})
    meta = {"offset": count_of(cache, tokens), **meta}
    sides = {}
    for side in ("keys", "values"):
        tensors = getattr(cache, side)
        tensors = tensors if isinstance(tensors, tuple | list) else (tensors,)
        if any(tensor.ndim != 4 or tensor.shape[0] != 1 for tensor in tensors):
            raise Unsound(f"{side} are {[tuple(t.shape) for t in tensors]}, not one sequence")
        sides[side] = tuple(rows(tensor) for tensor in tensors)
    counts = {int(tensor.shape[2]) for tensors in sides.values() for tensor in tensors}
    if len(counts) != 1:
        raise Unsound(f"tensors hold {sorted(counts)} rows")
    meta |= {"rows": counts.pop()} | {side: _shape(tensors) for side, tensors in sides.items()}
    fmt = _format(cache, sides)
    return Taken(meta, _piece(sides["keys"], fmt), _piece(sides["values"], fmt))


def _shape(tensors: Tensors) -> dict[str, Any]:
    heads = {int(tensor.shape[1]) for tensor in tensors}
    if len(heads) != 1:
        raise Unsound("tensors of one side differ in heads")
    dtypes = [dtype_name(tensor) for tensor in tensors]
    if not ITEMSIZE.keys() >= set(dtypes):
        raise Unsound(f"no row has dtypes {dtypes}")
    widths = [int(tensor.shape[3]) for tensor in tensors]
    return {"heads": heads.pop(), "widths": widths, "dtypes": dtypes}


def _format(cache: Any, sides: dict[str, Tensors]) -> str:
    """One format for both sides: see `RowLayout.fmt`."""
    dtypes = [[dtype_name(tensor) for tensor in tensors] for tensors in sides.values()]
    if all(len(names) == 1 and names[0] in NATIVE_FORMAT for names in dtypes):
        return "dense"
    fours = getattr(cache, "bits", None) == 4 and getattr(cache, "group_size", None) == 32
    if fours and all(names == ["uint32", "float16", "float16"] for names in dtypes):
        return "mlx4g32"
    return "raw"


def _piece(tensors: Tensors, fmt: str) -> RowPiece | None:
    """Rows `[N, H*D]` copied from `[1, H, N, D]` tensors; None where they have no bytes."""
    if not all(tensor.size for tensor in tensors):
        return None
    parts = []
    for tensor in tensors:
        _, heads, count, width = tensor.shape
        rows = tensor[0].swapaxes(0, 1).reshape(count, heads * width)
        # Reordering several heads copies; otherwise MLX might share the live cache's buffer.
        parts.append(mx.array(rows) if 1 in (heads, count) else mx.contiguous(rows))
    return RowPiece(tuple(parts), fmt)


def give_rows(leaf: Leaf, tokens: int, buffer: Callable[[int], int]) -> tuple[Tensors, Tensors]:
    """Both sides as tensors `[1, H, buffer(rows), D]`, zero after the rows; raises Misfit.

    A HeadPiece gives its own tensors, which end with the rows or with the room behind them.
    """
    check_count(leaf.meta, tokens)
    if leaf.arrays:
        raise Misfit(f"{len(leaf.arrays)} arrays beside its rows")
    count = integer(leaf.meta, "rows", 0, _MOST_ROWS)
    keys = _tensors(leaf, "keys", leaf.keys, count, buffer(count))
    return keys, _tensors(leaf, "values", leaf.values, count, buffer(count))


def _tensors(leaf: Leaf, side: str, piece: RowPiece | None, rows: int, buffer: int) -> Tensors:
    shape = leaf.meta.get(side)
    if not isinstance(shape, dict) or shape.keys() != {"heads", "widths", "dtypes"}:
        raise Misfit(f"no shape of its {side}")
    heads = integer(shape, "heads", 0, _WIDEST)
    widths, dtypes = shape["widths"], shape["dtypes"]
    if not isinstance(widths, list) or not isinstance(dtypes, list) or not widths:
        raise Misfit(f"no widths of its {side}")
    if any(type(w) is not int or not 0 <= heads * w <= _WIDEST for w in widths):
        raise Misfit(f"widths {widths} a head")
    if len(widths) != len(dtypes) or any(name not in ITEMSIZE for name in dtypes):
        raise Misfit(f"dtypes {dtypes} of {len(widths)} tensors")
    if piece is None:
        if rows * heads * min(widths):
            raise Misfit(f"its {side} are missing")
        return tuple(
            mx.zeros((1, heads, buffer, width), dtype=dtype_named(dtype))
            for width, dtype in zip(widths, dtypes, strict=True)
        )
    if isinstance(piece, HeadPiece):
        length = rows + piece.room
        wanted = [(d, 1, heads, length, w) for d, w in zip(dtypes, widths, strict=True)]
        return _as_they_are(piece, side, wanted, buffer)
    found = [(dtype_name(part), *part.shape) for part in piece.parts]
    if found != [(d, rows, heads * w) for d, w in zip(dtypes, widths, strict=True)]:
        raise Misfit(f"its {side} are {found}, not {rows} rows of {heads} x {widths} {dtypes}")
    return tuple(_padded(part, heads, buffer) for part in piece.parts)


def _as_they_are(
    piece: HeadPiece, side: str, wanted: Sequence[tuple[str | int, ...]], buffer: int
) -> Tensors:
    """Tensors that are turned already, `buffer` rows at most, as arrays of the caller's own."""
    found = [(dtype_name(part), *part.shape) for part in piece.parts]
    if found != wanted:
        raise Misfit(f"its {side} are {found}, not {wanted}")
    if piece.room and piece.rows + piece.room > buffer:
        return tuple(part[:, :, :buffer] for part in piece.parts)
    # A new object at no cost; MLX copies the shared memory when one of the two is written to.
    return tuple(part.reshape(part.shape) for part in piece.parts)


def _padded(part: mx.array, heads: int, buffer: int) -> mx.array:
    rows = int(part.shape[0])
    tensor = part.reshape(rows, heads, -1).swapaxes(0, 1)[None]
    if buffer == rows:
        return mx.array(mx.contiguous(tensor))
    return mx.pad(tensor, [(0, 0), (0, 0), (0, buffer - rows), (0, 0)])


def roomy(rows: int, room: int) -> int:
    """Buffer rows for `rows` and `room` more, in mlx-lm's steps; no room, no steps."""
    return -(-(rows + room) // _STEP) * _STEP if room else rows


def _single(sides: tuple[Tensors, Tensors]) -> tuple[mx.array, mx.array]:
    if any(len(tensors) != 1 for tensors in sides):
        raise Misfit("quantised rows for a plain cache")
    return sides[0][0], sides[1][0]


def cut_rows(leaf: Leaf, tokens: int) -> Cut:
    """The first rows, of a class that has a row a token."""
    if leaf.meta.get("unused"):
        return leaf.meta, None, None
    sides = [piece and piece.first(tokens) for piece in (leaf.keys, leaf.values)]
    keys, values = (side if tokens else None for side in sides)
    return {**leaf.meta, "offset": tokens, "rows": tokens}, keys, values


def take_plain(cache: Any, tokens: int, start: int = 0) -> Taken:
    """KVCache, ConcatenateKVCache: the first `offset` rows of the buffer, or those from `start`."""
    return take_rows(cache, tokens, lambda tensor: tensor[..., start : cache.offset, :])


def give_plain(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new KVCache with room to append."""
    return _fill(type(template)(), leaf, tokens, lambda rows: roomy(rows, room))


def _fill(made: Any, leaf: Leaf, tokens: int, buffer: Callable[[int], int]) -> Any:
    if not _is_unused(leaf, tokens):
        made.keys, made.values = _single(give_rows(leaf, tokens, buffer))
        made.offset = tokens
    return made


def _is_unused(leaf: Leaf, tokens: int) -> bool:
    unused = leaf.meta.get("unused", False)
    if unused is True and (leaf.keys is not None or leaf.values is not None or leaf.arrays):
        raise Misfit("unused, yet it has rows")
    if unused not in (True, False) or (unused and integer(leaf.meta, "rows", 0, 0)):
        raise Misfit(f"unused is {unused!r}")
    return bool(unused)


def give_concatenated(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new ConcatenateKVCache, whose tensors are never longer than its rows."""
    return _fill(type(template)(), leaf, tokens, lambda rows: rows)


def take_quantized(cache: Any, tokens: int, start: int = 0) -> Taken:
    """QuantizedKVCache: codes, scales and biases as they are; meta adds `group_size`, `bits`."""
    meta = {"group_size": int(cache.group_size), "bits": int(cache.bits)}
    return take_rows(cache, tokens, lambda tensor: tensor[..., start : cache.offset, :], **meta)


def give_quantized(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new QuantizedKVCache of the template's bits and group size."""
    for name in ("group_size", "bits"):
        if integer(leaf.meta, name, 1, 1 << 16) != getattr(template, name):
            raise Misfit(f"{name} {leaf.meta[name]}, not {getattr(template, name)}")
    made = type(template)(group_size=template.group_size, bits=template.bits)
    if not _is_unused(leaf, tokens):
        keys, values = give_rows(leaf, tokens, lambda rows: roomy(rows, room))
        if {len(keys), len(values)} != {3}:
            raise Misfit("plain rows for a quantised cache")
        made.keys, made.values, made.offset = keys, values, tokens
    return made


def take_window(cache: Any, tokens: int) -> Taken:
    """RotatingKVCache: the window's rows in ring order.

    Meta adds `keep`, `max_size` and `idx`, the ring position. A prefill in blocks leaves more rows
    than the window has; those fall off at the next append, so they are dropped here (the same
    `_trim`), and one state has one image.
    """
    keep, size, idx = cache.keep, cache.max_size, cache._idx
    meta = {"keep": keep, "max_size": size, "idx": idx}
    if cache.keys is None:
        return take_rows(cache, tokens, lambda tensor: tensor, **meta)
    seen, length = count_of(cache, tokens), int(cache.keys.shape[2])
    sound = 0 <= idx <= length and length >= min(seen, size)
    if not sound or (seen <= length and idx != seen) or (length > size and idx != length):
        raise Unsound(f"ring position {idx} of {length} rows after {seen} tokens")
    if length > size and seen > size:
        old = length - size
        meta["idx"] = size
        return take_rows(
            cache,
            tokens,
            lambda tensor: mx.concatenate(
                [tensor[..., :keep, :], tensor[..., old + keep :, :]], axis=2
            ),
            **meta,
        )
    return take_rows(cache, tokens, lambda tensor: tensor[..., : min(seen, length), :], **meta)


def give_window(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new RotatingKVCache of the template's window, its ring as it was."""
    for name in ("keep", "max_size"):
        if integer(leaf.meta, name, 0, _MOST_ROWS) != getattr(template, name):
            raise Misfit(f"{name} {leaf.meta[name]}, not {getattr(template, name)}")
    size = template.max_size
    made = type(template)(max_size=size, keep=template.keep)
    if _is_unused(leaf, tokens):
        return made
    rows = integer(leaf.meta, "rows", min(tokens, size), min(tokens, size))
    whole = rows if tokens <= size else 0
    made._idx = integer(leaf.meta, "idx", whole, rows)
    sides = give_rows(leaf, tokens, lambda count: max(count, min(size, roomy(count, room))))
    made.keys, made.values = _single(sides)
    made.offset = tokens
    return made


def cut_window(leaf: Leaf, tokens: int) -> Cut:
    """The first rows, as long as none has left the window."""
    if leaf.meta["offset"] > leaf.meta["rows"] and not leaf.meta.get("unused"):
        raise Unsound(f"its window of {leaf.meta['max_size']} has wrapped")
    meta, keys, values = cut_rows(leaf, tokens)
    return {**meta, "idx": meta["offset"]}, keys, values


def take_chunk(cache: Any, tokens: int) -> Taken:
    """ChunkedKVCache: the rows after `start_position`.

    Meta adds `chunk_size`, `start` and `buffer`: mlx-lm 0.31 trims by the buffer's length, so that
    length is part of the state.
    """
    start = int(cache.start_position)
    valid = 0 if cache.keys is None else count_of(cache, tokens) - start
    length = 0 if cache.keys is None else int(cache.keys.shape[2])
    if not 0 <= valid <= length:
        raise Unsound(f"holds {length} rows from {start} after {tokens} tokens")
    meta = {"chunk_size": int(cache.chunk_size), "start": start, "buffer": length}
    return take_rows(cache, tokens, lambda tensor: tensor[..., :valid, :], **meta)


def give_chunk(template: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    """A new ChunkedKVCache of the template's chunk size, with the buffer it had."""
    size = template.chunk_size
    if integer(leaf.meta, "chunk_size", 0, _MOST_ROWS) != size:
        raise Misfit(f"chunk_size {leaf.meta['chunk_size']}, not {size}")
    made = type(template)(size)
    if _is_unused(leaf, tokens):
        return made
    made.start_position = integer(leaf.meta, "start", 0, tokens)
    rows = integer(leaf.meta, "rows", tokens - made.start_position, tokens - made.start_position)
    length = integer(leaf.meta, "buffer", rows, rows + 2 * _STEP)
    leaf = dataclasses.replace(leaf, keys=_turned(leaf.keys), values=_turned(leaf.values))
    return _fill(made, leaf, tokens, lambda _: length if room else rows)


def _turned(piece: RowPiece | None) -> RowPiece | None:
    """Rows that can be put into a buffer of another length."""
    return piece.turned() if isinstance(piece, HeadPiece) else piece


_CLASSES: Sequence[tuple[str, str, Any, Any, Any]] = (
    ("KVCache", "kv", take_plain, give_plain, cut_rows),
    ("ConcatenateKVCache", "kv", take_plain, give_concatenated, cut_rows),
    ("QuantizedKVCache", "kv", take_quantized, give_quantized, cut_rows),
    ("RotatingKVCache", "window", take_window, give_window, cut_window),
    ("ChunkedKVCache", "chunk", take_chunk, give_chunk, None),
)


def register() -> None:
    """Make these classes known."""
    for name, route, take, give, cut in _CLASSES:
        entry = CacheClass(_MODULE, name, name, route, take, give, **({"cut": cut} if cut else {}))
        entry.register()
