"""Walking a model: what decides its K/V, as text and tensors, or quickly, as a list to compare."""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.dropout import Dropout, Dropout2d, Dropout3d

_CONTAINERS: Final = (list, tuple, dict, set, frozenset)
_PLAIN: Final = (bool, int, float, complex, str, bytes)
#: Bookkeeping of `nn.Module` and of training; it changes no forward pass.
_NOT_STATE: Final = frozenset({"_no_grad", "_training"})
#: What modules keep of their first call: computed from weights that count already. A model that has
#: been called is the model it was.
_MEMOS: Final = {"mlx_lm.models.plamo3.RMSNorm": frozenset({"_scale", "_scale_weight"})}


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """A model walked once: everything but weights as one digest, and its tensors by path."""

    structure: str
    tensors: tuple[tuple[str, mx.array], ...]

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(array.nbytes for _, array in self.tensors)


def survey_model(model: Module) -> Survey:
    """Walk a model: its structure as one hex digest, and its tensors in a stable order."""
    fields: list[str] = []
    tensors: list[tuple[str, mx.array]] = []
    _walk("", model, fields, tensors, {})
    structure = hashlib.sha256(netstrings(fields)).hexdigest()
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
        fields += ("tensor", path, shape_of(value))
        tensors.append((path, value))
    elif value is None or isinstance(value, _PLAIN):
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
        state = dict(_state(value))
        if _drops(value):
            state["training"] = value.training
        return sorted(state.items())
    if isinstance(value, Mapping):
        return sorted((f"[{key!r}]", part) for key, part in value.items())
    if isinstance(value, set | frozenset):
        return _numbered(sorted(value, key=repr))
    if isinstance(value, list | tuple):
        return _numbered(value)
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    return sorted(getattr(value, "__dict__", {}).items())


def _numbered(values: Iterable[Any]) -> list[tuple[str, Any]]:
    return [(str(position), value) for position, value in enumerate(values)]


def _state(module: Module) -> Iterable[tuple[str, Any]]:
    """The attributes of a module that decide what it computes, arrays last."""
    ignored = _NOT_STATE | _MEMOS.get(_class_of(module), frozenset())
    attributes = (*vars(module).items(), *module.items())
    return ((name, part) for name, part in attributes if name not in ignored)


def _drops(module: Module) -> bool:
    """Whether training mode changes what this module computes."""
    return isinstance(module, Dropout | Dropout2d | Dropout3d) and module._p_1 < 1


class Glance:
    """The arrays and plain values of a model, in the order they lie in it.

    Taking one and comparing it costs a millisecond or two and reads no weights. It refers to
    arrays weakly, so it keeps none alive and no new one can be taken for an old one.
    """

    def __init__(self, model: Module) -> None:
        arrays, self._plain = _glance_at(model)
        self._model = weakref.ref(model)
        self._arrays = [weakref.ref(array) for array in arrays]

    def arrays(self) -> list[mx.array]:
        """The arrays that are still alive."""
        return [array for ref in self._arrays if (array := ref()) is not None]

    def still_shows(self, model: Module) -> bool:
        """Whether this very model holds the same array objects and equal plain values."""
        arrays, plain = _glance_at(model)
        return (
            self._model() is model
            and len(arrays) == len(self._arrays)
            and all(ref() is array for ref, array in zip(self._arrays, arrays, strict=True))
            and plain == self._plain
        )


def _glance_at(model: Module) -> tuple[list[mx.array], list[Any]]:
    """Arrays, and plain values, in a model, its containers and its configuration objects."""
    arrays: list[mx.array] = []
    plain: list[Any] = []
    seen: set[int] = set()
    waiting: list[Any] = [model]
    while waiting:
        value = waiting.pop()
        if isinstance(value, mx.array):
            arrays.append(value)
        elif value is None or isinstance(value, _PLAIN):
            plain.append(value)
        elif isinstance(value, Module):
            plain += (type(value), _drops(value) and value.training)
            waiting += (part for _, part in _state(value))
        elif isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif not callable(value) and id(value) not in seen:
            seen.add(id(value))
            waiting += getattr(value, "__dict__", {}).values()
    return arrays, plain


def tensor_bytes(array: mx.array) -> memoryview:
    """The bytes of an array in row-major order, as a flat view (bf16 included); evaluates it."""
    if array.size == 0:
        return memoryview(b"")
    view = memoryview(cast(Any, array))  # the buffer protocol is missing in MLX's type stubs
    if not view.c_contiguous:
        view = memoryview(cast(Any, mx.contiguous(array)))
    return view.cast("B")


def shape_of(array: mx.array) -> str:
    """Dtype and shape as one text."""
    return f"{array.dtype}{list(array.shape)}"


def _class_of(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def netstrings(fields: Iterable[str]) -> bytes:
    """Length-prefixed fields: no two different lists of fields give the same bytes."""
    encoded = (field.encode("utf-8", "surrogatepass") for field in fields)
    return b"".join(b"%d:%b," % (len(text), text) for text in encoded)
