"""Names for prefixes and for models: the namespace contract, and what a model *is*.

Two different keys, on purpose. A namespace is chosen by the application and only finds a prefix;
the fingerprint says which model computed it. A manifest carries the fingerprint and the token ids,
so a namespace that names too much (two prompts, or new weights under an old name) is a miss.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import xxhash
from mlx.nn.layers.base import Module
from mlx.nn.layers.dropout import Dropout, Dropout2d, Dropout3d

from pion_vllm_mlx.fingerprint_file import FingerprintFile, file_identity

#: Hashing this much costs a few milliseconds, less than it is worth to rely on array identity.
_ALWAYS_HASHED: Final = 32 << 20
_PROBE: Final = 64
_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
#: Bookkeeping of `nn.Module` and of training; it changes no forward pass.
_NOT_STATE: Final = frozenset({"_no_grad", "_training"})


def make_namespace(*parts: object) -> str:
    """Return `sha256("|".join(parts))`, first 32 hex digits: the design's namespace contract.

    Name everything the prefix depends on: model, tokenizer, RoPE settings, format, adapter, prompt
    text. Parts that are no strings are taken as `str(part)`; bytes raise TypeError.

    The parts are joined, not length-prefixed, because other clients compute the same key: parts
    that contain "|" themselves can give one key for two meanings. Such a collision costs speed,
    never correctness: token ids and model fingerprint in the manifest turn it into a miss.
    """
    for part in parts:
        if isinstance(part, bytes | bytearray | memoryview):
            raise TypeError("namespace parts are text; decode bytes first")
    return hashlib.sha256("|".join(str(part) for part in parts).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """A model walked once: everything but weights as one digest, and its tensors by path."""

    structure: str
    tensors: tuple[tuple[str, mx.array], ...]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(array.nbytes for _, array in self.tensors)


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    model: weakref.ref[Module]
    structure: str
    arrays: tuple[weakref.ref[mx.array], ...]
    fingerprint: str

    def still_holds(self, model: Module, survey: Survey) -> bool:
        return (
            self.model() is model
            and self.structure == survey.structure
            and len(self.arrays) == len(survey.tensors)
            and all(
                ref() is array for ref, (_, array) in zip(self.arrays, survey.tensors, strict=True)
            )
        )


_known: dict[int, _Known] = {}


def model_fingerprint(model: Module, source: str | Path | None = None) -> str:
    """Return the sha256 hex of what decides a model's K/V: code, configuration, RoPE, weights.

    Every field is tagged and length-prefixed: module classes, their plain attributes (RoPE base
    and scaling, LoRA scales, …), configuration dataclasses, and name, shape, dtype and xxh3-128
    of the bytes of every tensor, adapters and private tables included.

    The answer is remembered for the model object as long as it holds the very same arrays.
    Models under 32 MB are hashed anew each time; in a larger one a weight written *in place*
    (`weight[0] = x`) goes unseen: call `forget_fingerprint(model)` after such a write.

    `source`: the folder or file the weights were loaded from. Then the answer is also kept in
    the user's cache folder under the files' identity (path, size, mtime, inode) and samples of
    every tensor, so that the next process does not read gigabytes again.
    """
    survey = survey_model(model)
    small = survey.nbytes <= _ALWAYS_HASHED
    known = _known.get(id(model))
    if known is not None and not small and known.still_holds(model, survey):
        return known.fingerprint
    fingerprint = _hash_model(survey, None if small else source)
    _known[id(model)] = _Known(
        weakref.ref(model, functools.partial(_forget_id, id(model))),
        survey.structure,
        tuple(weakref.ref(array) for _, array in survey.tensors),
        fingerprint,
    )
    return fingerprint


def forget_fingerprint(model: Module) -> None:
    """Have the next `model_fingerprint(model)` hash the weights again."""
    _known.pop(id(model), None)


def _forget_id(key: int, _: object) -> None:
    _known.pop(key, None)


def _hash_model(survey: Survey, source: str | Path | None) -> str:
    if source is None:
        return _fingerprint(survey)
    identity = file_identity(Path(source))
    if identity is None:
        return _fingerprint(survey)
    # Samples of the weights in memory tie the key to *this* model, not merely to these files.
    probes = "".join(_probe(array) for _, array in survey.tensors)
    key = hashlib.sha256(_netstrings(("source", identity, survey.structure, probes))).hexdigest()
    shelf = FingerprintFile()
    kept = shelf.get(key)
    if kept is not None:
        return kept
    fingerprint = _fingerprint(survey)
    shelf.put(key, fingerprint)
    return fingerprint


def _fingerprint(survey: Survey) -> str:
    digest = hashlib.sha256(_netstrings(("pion-model", "1", "structure", survey.structure)))
    for path, array in survey.tensors:
        content = xxhash.xxh3_128_hexdigest(tensor_bytes(array))
        digest.update(_netstrings(("tensor", path, _shape_of(array), content)))
    return digest.hexdigest()


def survey_model(model: Module) -> Survey:
    """Walk a model: its structure as one hex digest, and its tensors in a stable order."""
    fields: list[str] = []
    tensors: list[tuple[str, mx.array]] = []
    _walk("", model, fields, tensors, {})
    structure = hashlib.sha256(_netstrings(fields)).hexdigest()
    return Survey(structure, tuple(tensors))


def _walk(
    path: str,
    value: Any,
    fields: list[str],
    tensors: list[tuple[str, mx.array]],
    seen: dict[int, str],
) -> None:
    """Append `value` to `fields` as tagged text; `seen` says where an object was met first."""
    if isinstance(value, mx.array):
        fields += ("tensor", path, _shape_of(value))
        tensors.append((path, value))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        fields += (type(value).__name__, path, repr(value))
    elif callable(value) and not isinstance(value, Module):
        fields += ("code", path, getattr(value, "__qualname__", _class_of(value)))
    elif id(value) in seen:
        fields += ("same", path, seen[id(value)])
    else:
        fields += ("object", path, _class_of(value))
        # Plain containers are compared by content: which equal tuples are one object is chance.
        if isinstance(value, Module) or not isinstance(value, _CONTAINERS):
            seen[id(value)] = path
        for name, part in _parts(value):
            _walk(f"{path}.{name}", part, fields, tensors, seen)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """The named parts of a container or an object, in an order no hash seed can change."""
    if isinstance(value, Module):
        state = {**vars(value), **value}
        if isinstance(value, Dropout | Dropout2d | Dropout3d):
            state["training"] = value.training
        return sorted((name, part) for name, part in state.items() if name not in _NOT_STATE)
    if isinstance(value, Mapping):
        return sorted((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, set | frozenset):
        return enumerate_parts(sorted(value, key=repr))
    if isinstance(value, list | tuple):
        return enumerate_parts(value)
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return sorted(getattr(value, "__dict__", {}).items())


def enumerate_parts(values: Iterable[Any]) -> list[tuple[str, Any]]:
    """Pair each value with its position, as a path component."""
    return [(str(position), value) for position, value in enumerate(values)]


def tensor_bytes(array: mx.array) -> memoryview:
    """The bytes of an array in row-major order, as a flat view (bf16 included); evaluates it."""
    if array.size == 0:
        return memoryview(b"")
    flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
    mx.eval(flat)
    return memoryview(cast(Any, flat))  # the buffer protocol is missing in MLX's type stubs


def _probe(array: mx.array) -> str:
    """A few bytes from the start, the middle and the end of a tensor, hashed."""
    view = tensor_bytes(array)
    middle = len(view) // 2
    sample = bytes(view[:_PROBE]) + bytes(view[middle : middle + _PROBE]) + bytes(view[-_PROBE:])
    return xxhash.xxh3_64_hexdigest(sample)


def _shape_of(array: mx.array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _netstrings(fields: Iterable[str]) -> bytes:
    """Length-prefixed fields: no two different lists of fields give the same bytes."""
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return b"".join(b"%d:%b," % (len(text), text) for text in encoded)
