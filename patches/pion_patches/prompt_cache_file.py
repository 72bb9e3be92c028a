"""mlx-lm's own prompt cache files (``mlx_lm.cache_prompt``, ``save_prompt_cache``), both dialects.

    image, metadata = import_prompt_cache("prompt.safetensors", make_prompt_cache(model))
    export_prompt_cache("prompt.safetensors", make_prompt_cache(model), image, metadata)

mlx-lm 0.31 writes (info, metadata, classes), 0.32 (metadata, classes, scalars); loading one with
the other yields an empty list without a word, so the file is read here field by field, whichever
version is installed. A file is written in the dialect of the installed one, without padding.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_unflatten
from mlx_lm.models import cache as mlx_caches

from .cache_class import CacheClass
from .cache_rebuild import dismantle, rebuild
from .pieces import CacheImage, RebuildError, UnsupportedCache
from .safetensors_blob import read_safetensors

#: Attributes of each class in the order of its 0.32 state, and of its 0.31 state and meta_state.
_FIELDS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]] = {
    "KVCache": (("keys", "values", "offset"), ("keys", "values"), ()),
    "ConcatenateKVCache": (("keys", "values"), ("keys", "values"), ()),
    "QuantizedKVCache": (
        ("keys", "values", "offset", "group_size", "bits"),
        ("keys", "values"),
        ("offset", "group_size", "bits"),
    ),
    "RotatingKVCache": (
        ("keys", "values", "offset", "keep", "max_size", "_idx"),
        ("keys", "values"),
        ("keep", "max_size", "offset", "_idx"),
    ),
    "ChunkedKVCache": (
        ("keys", "values", "offset", "chunk_size", "start_position"),
        ("keys", "values"),
        ("chunk_size", "start_position"),
    ),
    "ArraysCache": (("cache", "left_padding", "lengths"), ("cache",), ()),
}


def import_prompt_cache(
    path: str | os.PathLike[str], template: Sequence[Any], tokens: int | None = None
) -> tuple[CacheImage, dict[str, str]]:
    """Read a prompt cache file into an image, with the metadata its writer gave it.

    `template` is ``make_prompt_cache(model)``. The file does not say how many tokens it is for if
    all layers are recurrent: then `tokens` has to. Raises RebuildError for a file that is not such
    a cache or not this model's, UnsupportedCache for what it holds, OSError.
    """
    arrays, flat = read_safetensors(Path(path).read_bytes())
    try:
        caches, metadata = _caches_in(arrays, flat)
        counts = set(_counts(caches))
        if tokens is None and len(counts) != 1:
            raise RebuildError(f"token count not told: {sorted(counts)}")
        # Attributes came from the file, so anything may be of a wrong type.
        image = dismantle(caches, counts.pop() if tokens is None else tokens)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise RebuildError(f"{os.fspath(path)}: no prompt cache: {error}") from error
    rebuild(template, image)
    return image, metadata


def export_prompt_cache(
    path: str | os.PathLike[str],
    template: Sequence[Any],
    image: CacheImage,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write an image as a prompt cache file that the installed mlx-lm loads; replaces `path` whole.

    Raises UnsupportedCache for caches its loader does not know, RebuildError as `rebuild`.
    """
    for leaf in image.leaves:
        if leaf.kind not in _FIELDS:
            raise UnsupportedCache(f"{leaf.kind} in a prompt cache file", tuple(_FIELDS))
    caches = rebuild(template, image, room=0)
    target = Path(path)
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.name}-", suffix=".safetensors"
    )
    os.close(handle)
    try:
        mlx_caches.save_prompt_cache(name, caches, dict(metadata or {}))
        os.replace(name, target)
    except (AttributeError, TypeError, ValueError) as error:
        os.unlink(name)
        raise UnsupportedCache(f"this in a prompt cache file: {error}", tuple(_FIELDS)) from error
    except BaseException:
        os.unlink(name)
        raise


def _caches_in(
    arrays: dict[str, mx.array], flat: dict[str, str]
) -> tuple[list[Any], dict[str, str]]:
    if not flat:
        raise RebuildError("a safetensors file without mlx-lm's metadata")
    recent = flat.get("2.0") == ""
    if recent:
        values: dict[str, Any] = {**arrays, **_scalars(arrays, flat)}
        states = tree_unflatten(list(values.items()))
        info: Any = [None] * len(states)
    else:
        states = tree_unflatten(list(arrays.items()))
        info = _tree(flat, "0.")
    classes = _tree(flat, "1." if recent else "2.")
    # What the writer said of its own is no tree: names may have dots.
    metadata = _under(flat, "0." if recent else "1.")
    if not isinstance(classes, list) or not len(states) == len(classes) == len(info):
        raise RebuildError(f"{len(states)} states and {len(classes)} classes")
    pairs = zip(classes, states, info, strict=True)
    return [_cache_in(*each, recent) for each in pairs], metadata


def _tree(flat: dict[str, str], prefix: str) -> Any:
    return tree_unflatten(list(_under(flat, prefix).items()))


def _under(flat: dict[str, str], prefix: str) -> dict[str, str]:
    return {name[len(prefix) :]: text for name, text in flat.items() if name.startswith(prefix)}


def _scalars(arrays: dict[str, mx.array], flat: dict[str, str]) -> dict[str, Any]:
    """The state's values that 0.32 stores as arrays, by their place."""
    marks: dict[str, dict[str, str]] = {}
    for name, text in flat.items():
        place = name.split(".")
        if place[0] == "2" and len(place) == 3:
            marks.setdefault(place[1], {})[place[2]] = text
    values: dict[str, Any] = {}
    for mark in marks.values():
        where, kind = mark["0"], mark["1"]
        if kind == "none":
            values[where] = None
        elif kind == "string":
            values[where] = "".join(map(chr, _numbers(arrays[where])))
        elif kind == "scalar":
            values[where] = arrays[where].item()
        else:
            raise RebuildError(f"a state value of kind {kind!r}")
    return values


def _numbers(array: mx.array) -> list[int]:
    numbers: Any = array.reshape(-1).tolist()
    return list(numbers)


def _cache_in(name: str, state: Any, info: Any, recent: bool) -> Any:
    if name == "CacheList":
        cache_list: Any = mlx_caches.CacheList
        if recent:
            return cache_list(*(_cache_in(inner, s, None, recent) for s, inner in state))
        inners = zip(info[0], state, info[1], strict=True)
        return cache_list(*(_cache_in(inner, s, i, recent) for inner, s, i in inners))
    if name not in _FIELDS or name not in CacheClass.registered:
        raise UnsupportedCache(f"{name} in a prompt cache file", tuple(_FIELDS))
    cls: Any = getattr(mlx_caches, name)
    made = cls.__new__(cls)
    now, then, numbers = _FIELDS[name]
    if recent:
        _assign(made, now, state)
    else:
        _assign(made, then, [state] if name == "ArraysCache" else state)
        _assign(made, numbers, [int(text) for text in info or ()])
    if name in ("KVCache", "ConcatenateKVCache", "ChunkedKVCache") and "offset" not in vars(made):
        made.offset = 0 if made.keys is None else int(made.keys.shape[-2])
        if vars(made).get("start_position", 0):
            raise RebuildError("mlx-lm 0.31 does not write where a trimmed chunk ends")
    if name == "ArraysCache":
        made.left_padding = vars(made).get("left_padding")
        made.lengths = vars(made).get("lengths")
    return made


def _assign(made: Any, names: Sequence[str], values: Sequence[Any]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(made, name, value)


def _counts(caches: Sequence[Any]) -> list[int]:
    counts: list[int] = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is not None:
            counts += _counts(inner)
        elif getattr(cache, "keys", None) is not None:
            counts.append(cache.offset)
    return counts
