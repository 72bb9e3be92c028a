"""What the library knows about one cache class, and the registry of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import mlx.core as mx
import numpy as np

from .pieces import Leaf, RowPiece, UnsupportedCache, array_bytes, dtype_name

Cut: TypeAlias = tuple[dict[str, Any], RowPiece | None, RowPiece | None]


class Unsound(Exception):
    """A cache that is not in a state its class can be stored in; the message says why."""


class Misfit(Exception):
    """A leaf that does not fit the template's cache; the message says why."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A cache taken apart, its arrays not yet evaluated."""

    meta: dict[str, Any]
    keys: RowPiece | None = None
    values: RowPiece | None = None
    arrays: tuple[mx.array | None, ...] = ()


def refuse_cut(leaf: Leaf, tokens: int) -> Cut:
    """The `cut` of a class whose earlier states are gone."""
    raise Unsound(f"holds its state at {leaf.meta['offset']} tokens only, not at {tokens}")


@dataclass(frozen=True, slots=True)
class CacheClass:
    """One cache class: `module` and `name` identify it exactly, `kind` names it in an image.

    `route`: "kv", a row a token; "window", rows in ring order; "chunk", the last rows; "recurrent"
    and "opaque", arrays for a blob. `take(cache, tokens)`, for "kv" `take(cache, tokens, start)`,
    raises Unsound; `give(template, leaf, tokens, room)` makes a new cache or raises Misfit;
    `cut(leaf, tokens)` raises Unsound.
    """

    module: str
    name: str
    kind: str
    route: str
    take: Callable[..., Taken]
    give: Callable[[Any, Leaf, int, int], Any]
    cut: Callable[[Leaf, int], Cut] = refuse_cut

    registered: ClassVar[dict[str, CacheClass]] = {}

    def register(self) -> None:
        """Make the class known; a second one of the same kind is a mistake in the source."""
        if self.registered.setdefault(self.kind, self) != self:
            raise ValueError(f"two cache classes are called {self.kind}")


def known_class(cache: Any, path: Sequence[int]) -> CacheClass:
    """The entry of a cache's very class; UnsupportedCache for any other, subclass or namesake."""
    found = type(cache)
    for entry in CacheClass.registered.values():
        defined = getattr(sys.modules.get(entry.module), entry.name, None)
        if defined is found and found.__module__ == entry.module:
            return entry
    raise refusal(path, f"{found.__module__}.{found.__qualname__}", "an unknown class")


def class_named(kind: str, path: Sequence[int]) -> CacheClass:
    """The entry of that kind; raises UnsupportedCache."""
    if kind not in CacheClass.registered:
        raise refusal(path, kind, "an unknown class")
    return CacheClass.registered[kind]


def refusal(path: Sequence[int], kind: str, reason: str) -> UnsupportedCache:
    """The error for a cache that cannot be stored."""
    place = ".".join(map(str, path))
    return UnsupportedCache(f"{kind} (cache {place}): {reason}", known_caches())


def known_caches() -> tuple[str, ...]:
    """The kinds of cache that can be stored."""
    return (*sorted(CacheClass.registered), "CacheList")


def are_finite(arrays: Iterable[mx.array | None]) -> bool:
    """Whether no array has a NaN or an infinity; integers have none.

    By numpy, which takes a twentieth of the time MLX takes for it on a CPU.
    """
    return all(_is_finite(array) for array in arrays if array is not None)


def _is_finite(array: mx.array) -> bool:
    if array.dtype == mx.bfloat16:
        words = np.frombuffer(array_bytes(array), dtype=np.uint16)
        return bool(np.all(words & 0x7F80 != 0x7F80))
    if array.dtype in (mx.float32, mx.float16):
        words = np.frombuffer(array_bytes(array), dtype=np.dtype(dtype_name(array)))
        return bool(np.all(np.isfinite(words)))
    return True


def integer(meta: dict[str, Any], name: str, lowest: int, highest: int) -> int:
    """A field of a leaf's meta; raises Misfit unless it is an integer in that range."""
    value = meta.get(name)
    if type(value) is not int or not lowest <= value <= highest:
        raise Misfit(f"{name} is {value!r}, not an integer in {lowest}..{highest}")
    return value


def count_of(cache: Any, tokens: int) -> int:
    """The cache's own token count, which has to be `tokens`; raises Unsound."""
    if type(cache.offset) is not int:
        raise Unsound("offset is not an integer: a batch")
    if cache.offset != tokens:
        raise Unsound(f"holds {cache.offset} tokens, not {tokens}")
    return tokens


def check_count(meta: dict[str, Any], tokens: int) -> None:
    """Raise Misfit unless a leaf's state is that of `tokens` tokens."""
    if integer(meta, "offset", 0, 1 << 40) != tokens:
        raise Misfit(f"holds {meta['offset']} tokens, not {tokens}")
