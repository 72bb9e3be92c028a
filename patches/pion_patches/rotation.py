"""Moving stored keys: rotate them from the positions they were computed at to others.

    turns = require_rotation(model)            # one Turn a layer, or CannotRotate with the reason
    keys = turns[layer].move(keys, delta)      # [B, H, N, D], `delta` positions further on

A key is RoPE's rotation of a vector that knows no position, so moving it is one more rotation by
the difference: R(p + d) k = R(d) R(p) k. What a model rotates by is not read from its
configuration but watched: during a short forward pass on caches without rows, the very call of
`mx.fast.rope` whose result reaches the cache is recorded for every layer. So dimensions, layout,
base, scaled frequencies and layers without RoPE are the model's own; factors a model multiplies
its keys by beforehand (YaRN, SuScaled) are in the stored keys already and not applied again.

A move is then proven before it is believed: keys computed at a distance are compared with moved
ones, once a model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from .prefix_entry import model_name

_cache: Any = mlx_lm_cache  # mlx-lm is not typed

#: How far the proof moves keys. The short way comes first: a model with a table of positions
#: fails there, before anything is looked up beyond the table's end.
PROOF_DISTANCES: Final = (8, 1000)
#: The largest error of a moved key of the first layer, by dtype. Right geometries stay below an
#: eighth of it, wrong ones are a thousand times above.
TOLERANCE: Final = {mx.float32: 1e-3, mx.bfloat16: 0.05, mx.float16: 0.05}
#: A position where frequencies that depend on the length have long left those of a short text.
_FAR: Final = 1_000_000
_PROBE_TOKENS: Final = 6

_verdicts: dict[int, tuple[weakref.ref[Any], tuple[Turn, ...] | str]] = {}
_lock = threading.Lock()


class CannotRotate(ValueError):
    """A model whose stored keys cannot be moved to other positions; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """How one layer rotates its keys: the arguments of its own `mx.fast.rope` call.

    `dims` 0: the layer gives its keys no position, and a move leaves them as they are.
    """

    dims: int = 0
    traditional: bool = False
    base: float | None = None
    scale: float = 1.0
    freqs: mx.array | None = None

    def move(self, keys: mx.array, delta: int) -> mx.array:
        """`keys` `[B, H, N, D]` of any positions, each `delta` further on (or back, below 0)."""
        if not self.dims or not delta:
            return keys
        # A row each: `mx.fast.rope` counts positions along the axis before the last.
        rows = keys.reshape(-1, 1, 1, keys.shape[-1])
        turned = mx.fast.rope(
            rows,
            self.dims,
            traditional=self.traditional,
            base=self.base,
            scale=self.scale,
            offset=delta,
            freqs=self.freqs,
        )
        return turned.reshape(keys.shape)

    def same(self, other: Turn) -> bool:
        """Whether both rotate alike."""
        plain = (self.dims, self.traditional, self.base, self.scale)
        if plain != (other.dims, other.traditional, other.base, other.scale):
            return False
        if self.freqs is None or other.freqs is None:
            return self.freqs is other.freqs
        return bool(mx.array_equal(self.freqs, other.freqs))


def require_rotation(model: Any) -> tuple[Turn, ...]:
    """One `Turn` a cache of `model`, proven; the answer is kept for as long as the model lives.

    Raises CannotRotate for a model with other caches than plain K/V, whose keys are not what RoPE
    returned, whose frequencies depend on the length, or that fails the proof. The first call
    costs a few forward passes of six tokens.
    """
    with _lock:
        known = _verdicts.get(id(model))
        if known is None or known[0]() is not model:
            known = weakref.ref(model), _try(model)
            for key in [k for k, (alive, _) in _verdicts.items() if alive() is None]:
                del _verdicts[key]
            _verdicts[id(model)] = known
    if isinstance(known[1], str):
        raise CannotRotate(f"{model_name(model)} cannot have its keys moved: {known[1]}")
    return known[1]


class _Probe:
    """A cache that says it stands at `offset`, keeps nothing, and remembers the keys it got.

    The tokens of the pass see one another only: wherever they stand, a model that knows relative
    positions alone computes the same for them.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.rows = keys, values
        return self.rows

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:  # noqa: N803
        return _cache.create_attention_mask(
            N, offset=0, return_array=return_array, window_size=window_size
        )


def _try(model: Any) -> tuple[Turn, ...] | str:
    try:
        template = list(_cache.make_prompt_cache(model))
    except Exception as error:
        return f"it makes no cache ({type(error).__name__})"
    for one in template:
        if type(one) is not _cache.KVCache:
            return f"its cache is a {type(one).__name__}, and only plain K/V rows can be moved"
    if not template:
        return "it has no attention cache"
    try:
        home = _watch(model, len(template), 0)
        for distance in PROOF_DISTANCES:
            there = _watch(model, len(template), distance)
            for place, (near, moved) in enumerate(zip(home, there, strict=True)):
                _prove(place, near, moved, distance)
        far = _watch(model, len(template), _FAR)
        if not all(a.turn.same(b.turn) for a, b in zip(home, far, strict=True)):
            return "its RoPE frequencies depend on the length of the text"
    except CannotRotate as error:
        return str(error)
    except Exception as error:
        first_line = str(error).partition("\n")[0][:120]
        return f"its forward pass cannot be watched ({type(error).__name__}: {first_line})"
    return tuple(seen.turn for seen in home)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a layer gave its cache, `[1, H, N, D]`, and the rotation its keys came from."""

    turn: Turn
    keys: mx.array
    values: mx.array


def _watch(model: Any, caches: int, offset: int) -> list[_Seen]:
    """A pass of a few tokens that stand at `offset`, and see one another only."""
    probes = [_Probe(offset) for _ in range(caches)]
    tokens = mx.arange(1, _PROBE_TOKENS + 1)[None]
    seen = []
    with _record_rope() as calls:
        model(tokens, cache=probes)
    for place, probe in enumerate(probes):
        if probe.rows is None:
            raise CannotRotate(f"its layer {place} never used its cache")
        keys, values = probe.rows
        # Identity, not equality: these keys are what that call returned, untouched.
        turn = next((turn for result, turn in calls if result is keys), Turn())
        seen.append(_Seen(turn, keys, values))
    mx.eval([(each.keys, each.values) for each in seen])
    return seen


@contextmanager
def _record_rope() -> Iterator[list[tuple[mx.array, Turn]]]:
    """Every call of `mx.fast.rope` meanwhile, with its result, which is kept alive for that."""
    fast: Any = mx.fast
    original = fast.rope
    calls: list[tuple[mx.array, Turn]] = []

    def recorded(a: mx.array, dims: int, **options: Any) -> mx.array:
        result: mx.array = original(a, dims, **options)
        turn = Turn(
            dims,
            options["traditional"],
            options["base"],
            options["scale"],
            options.get("freqs"),
        )
        calls.append((result, turn))
        return result

    fast.rope = recorded
    try:
        yield calls
    finally:
        fast.rope = original


def _prove(place: int, near: _Seen, there: _Seen, distance: int) -> None:
    """Moved keys are those computed there, values are the same everywhere; else CannotRotate."""
    wrong = _distance(near.turn.move(near.keys, distance), there.keys)
    # Beyond the first layer rounding has gone through whole layers: there only what no rounding
    # explains, a quarter of the largest key, is an error.
    most = TOLERANCE.get(near.keys.dtype, 0.05) if place == 0 else 0.25 * _size(there.keys)
    if not wrong <= most:
        why = "" if near.turn.dims else ", and they are not what mx.fast.rope returned"
        raise CannotRotate(
            f"keys of layer {place} moved by {distance} positions are {wrong:.2g} off "
            f"those computed there ({most:.2g} allowed){why}"
        )
    if not _distance(near.values, there.values) <= 0.25 * _size(there.values):
        raise CannotRotate(f"values of layer {place} depend on the position (latent attention)")


def _distance(one: mx.array, other: mx.array) -> float:
    return float(mx.max(mx.abs(one.astype(mx.float32) - other.astype(mx.float32))))


def _size(array: mx.array) -> float:
    return float(mx.max(mx.abs(array.astype(mx.float32))))
