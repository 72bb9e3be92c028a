"""Every mlx-lm cache class: to rows, arrays and meta, and back, bit for bit, or a refusal.

    image = dismantle(cache, tokens)                     # after prefilling `tokens` tokens
    data = image.leaves[0].keys.to_bytes()               # … store, fetch …
    keys = RowPiece.from_buffer(data, image.leaves[0].keys.layout, rows)
    cache = rebuild(make_prompt_cache(model), image)     # continues as if nothing had happened

One entry a class, in `attention_caches` and `recurrent_caches`; a class matches exactly, so a
subclass is unknown. Attributes are read by name, since the `state` tuples of mlx-lm 0.31 and 0.32
differ. Only rows that hold tokens are taken, never the padded buffer, and only of a batch of one
sequence. Rebuilt buffers have room, so that the first append copies nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from . import attention_caches, recurrent_caches
from .cache_class import (
    CacheClass,
    Misfit,
    Unsound,
    are_finite,
    class_named,
    known_caches,
    known_class,
    refusal,
)
from .folding import unfold_rows
from .pieces import (
    CacheImage,
    Leaf,
    RebuildError,
    RowLayout,
    RowPiece,
    UnsupportedCache,
)

__all__ = [
    "CacheImage",
    "Leaf",
    "RebuildError",
    "RowLayout",
    "RowPiece",
    "UnsupportedCache",
    "cut",
    "dismantle",
    "evaluate",
    "flatten",
    "known_caches",
    "rebuild",
]

#: Rows of room a rebuilt buffer has at least; mlx-lm grows its buffers in steps of as many.
ROOM = 256
_DEEPEST = 8

attention_caches.register()
recurrent_caches.register()


def flatten(
    cache: Sequence[Any], path: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The caches of a list, those inside a CacheList one by one, each with its path."""
    for place, item in enumerate(cache):
        if type(item) is CacheList and len(path) < _DEEPEST:
            yield from flatten(item.caches, (*path, place))
        else:
            yield (*path, place), item


def dismantle(
    cache: Sequence[Any], tokens: int, start: int = 0, *, wait: bool = True
) -> CacheImage:
    """Take a prompt cache of `tokens` tokens apart into evaluated copies.

    Without `wait` the rows are still to be copied, by `CacheImage.evaluate` in this very thread.

    With `start`, layers that have a row a token (route "kv") give only the rows from there on: a
    piece of a prefix, which `rebuild` refuses until somebody has put the rows before in front.

    Raises UnsupportedCache, before anything is returned, for a cache class that is not known, a
    batch, padding, a cache of another token count, or recurrent state that is missing, zero
    everywhere or not finite.
    """
    found = list(flatten(cache))
    classes = [known_class(item, path) for path, item in found]
    leaves = []
    for (path, item), cls in zip(found, classes, strict=True):
        try:
            taken = cls.take(item, tokens, *([start] if cls.route == "kv" else []))
        except Unsound as error:
            raise refusal(path, cls.kind, str(error)) from None
        leaves.append(Leaf(path, cls.kind, taken.meta, taken.keys, taken.values, taken.arrays))
    _check_counted(leaves, tokens)
    image = CacheImage(tokens, tuple(leaves))
    if wait:
        image.evaluate()
    for leaf, cls in zip(leaves, classes, strict=True):
        _check_state(leaf, cls, tokens)
    return image


def rebuild(template: Sequence[Any], image: CacheImage, *, room: int = ROOM) -> list[Any]:
    """Make the caller's own caches from an image, evaluated; `template` stays as it is.

    `template` is ``make_prompt_cache(model)``, converted with ``to_quantized`` where the image
    holds quantised caches. Buffers get room for `room` more rows at least, and a multiple of 256
    in all; with 0 they hold the rows and no more. Raises RebuildError if the image has other
    caches than the template, or does not add up; UnsupportedCache for an unknown template.
    """
    found = list(flatten(template))
    classes = [known_class(item, path) for path, item in found]
    if [path for path, _ in found] != [leaf.path for leaf in image.leaves]:
        raise RebuildError(f"{len(image.leaves)} stored caches for {len(found)} of another shape")
    caches: dict[tuple[int, ...], Any] = {}
    for (path, item), cls, leaf in zip(found, classes, image.leaves, strict=True):
        if leaf.kind != cls.kind:
            raise RebuildError(f"cache {leaf.place} is a {cls.kind}, stored is a {leaf.kind}")
        try:
            caches[path] = _give(cls, item, unfold_rows(leaf), image.tokens, room)
        except Misfit as error:
            raise RebuildError(f"cache {leaf.place}, {leaf.kind}: {error}") from None
    evaluate(caches.values())
    return _nest(template, (), caches)


def evaluate(caches: Iterable[Any]) -> None:
    """Evaluate every array of every cache, so that any thread may go on with them."""
    mx.eval(_tensors([vars(item) for _, item in flatten(list(caches))]))


def cut(image: CacheImage, tokens: int) -> CacheImage:
    """The image of the first `tokens` tokens, every leaf or none; rows are shared, not copied.

    Raises UnsupportedCache where a leaf no longer holds that state: recurrent layers, windows
    that have wrapped, chunked caches.
    """
    if not 0 <= tokens <= image.tokens:
        raise ValueError(f"cannot cut {image.tokens} tokens to {tokens}")
    if tokens == image.tokens:
        return image
    leaves = []
    for leaf in image.leaves:
        cls = class_named(leaf.kind, leaf.path)
        try:
            whole = unfold_rows(leaf)
            meta, keys, values = cls.cut(whole, tokens)
        except (Misfit, Unsound) as error:
            raise refusal(leaf.path, leaf.kind, str(error)) from None
        leaves.append(dataclasses.replace(whole, meta=meta, keys=keys, values=values))
    return CacheImage(tokens, tuple(leaves))


def _give(cls: CacheClass, item: Any, leaf: Leaf, tokens: int, room: int) -> Any:
    if not are_finite(leaf.arrays):
        raise Misfit("state is not finite")
    return cls.give(item, leaf, tokens, room)


def _check_counted(leaves: Sequence[Leaf], tokens: int) -> None:
    """An unused cache holds nothing to check, so only a neighbour that counts may vouch for it."""
    counted = {leaf.path[:-1] for leaf in leaves if not leaf.meta.get("unused")}
    for leaf in leaves:
        alone = len(leaf.path) == 1 or leaf.path[:-1] not in counted
        if tokens and leaf.meta.get("unused") and alone:
            raise refusal(leaf.path, leaf.kind, f"holds 0 tokens, not {tokens}")
    if tokens and not leaves:
        raise UnsupportedCache("a model without caches", known_caches())


def _check_state(leaf: Leaf, cls: CacheClass, tokens: int) -> None:
    arrays = [array for array in leaf.arrays if array is not None]
    if not are_finite(arrays):
        raise refusal(leaf.path, leaf.kind, "state is not finite")
    floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating) and array.size]
    # A state nobody captured is a zero-filled block; one computed from tokens is not.
    if tokens and cls.route == "recurrent" and floats and not any(mx.any(a).item() for a in floats):
        raise refusal(leaf.path, leaf.kind, "state is zero everywhere")


def _tensors(waiting: list[Any]) -> list[mx.array]:
    """Every array in nested lists, tuples and dictionaries."""
    found: list[mx.array] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, mx.array):
            found.append(value)
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    return found


def _nest(
    template: Sequence[Any], path: tuple[int, ...], caches: dict[tuple[int, ...], Any]
) -> list[Any]:
    nested: list[Any] = []
    for place, item in enumerate(template):
        here = (*path, place)
        nested.append(
            caches[here] if here in caches else type(item)(*_nest(item.caches, here, caches))
        )
    return nested
