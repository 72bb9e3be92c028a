"""Whether a model was touched at all since it was last looked at: a tenth of the price of a look.

A snapshot remembers which objects a model's modules hold, and their plain values. Where those are
the very same, nothing a look might see has changed; where one is not, somebody has to look.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from itertools import chain
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

_PLAIN: Final = (bool, int, float, complex, str, bytes)
#: Which parameters train: it changes no forward pass.
_FROZEN: Final = "_no_grad"
_DEEPEST: Final = 8


class NoSnapshot(Exception):
    """The model keeps something whose changes do not show this way."""


class Snapshot:
    """The modules of a model, and what they held when it was taken. Keeps no weight alive."""

    def __init__(self, model: Module) -> None:
        """Raises NoSnapshot for a model with parts of other kinds than models usually have."""
        #: References whose object has died. Until then no new object can have an old one's id.
        self._died: list[Any] = []
        #: Module, key and ids of the elements of each list of modules or arrays.
        self._lists: list[tuple[int, str, tuple[int, ...]]] = []
        #: Lists and dictionaries of plain values, and what was in them.
        self._containers: list[tuple[Any, Any]] = []
        #: Settings objects, and what was in them.
        self._settings: list[tuple[Any, dict[str, Any]]] = []
        self._modules: list[weakref.ref[Module]] = []
        modules = self._reach(model)
        self._arrays = [self._watch(part) for part in _arrays_of(modules)]
        self._modules = [self._watch(module) for module in modules]
        seen: set[int] = set()
        for number, module in enumerate(modules):
            self._take_items(number, module)
            self._take_settings(module, seen)
        self._attributes = [dict(vars(module)) for module in modules]
        self._names = list(chain.from_iterable(modules))
        self._parts = _ids_of(modules)
        self._sizes = list(map(len, modules))

    def still_shows(self, model: Module) -> bool:
        """Whether this very model holds the very objects and equal plain values."""
        modules: list[Any] = [reference() for reference in self._modules]
        return (
            not self._died
            and modules[0] is model
            and list(map(vars, modules)) == self._attributes
            and _ids_of(modules) == self._parts
            and list(map(len, modules)) == self._sizes
            and list(chain.from_iterable(modules)) == self._names
            and all(tuple(map(id, modules[at][key])) == ids for at, key, ids in self._lists)
            and all(vars(one) == plain for one, plain in self._settings)
            and all(one == plain for one, plain in self._containers)
        )

    def _watch(self, part: Any) -> weakref.ref[Any]:
        return weakref.ref(part, self._died.append)

    def _reach(self, model: Module) -> list[Module]:
        """Every module once, the model first."""
        found: dict[int, Module] = {}
        waiting: list[Any] = [model]
        while waiting:
            module = waiting.pop()
            if id(module) not in found:
                found[id(module)] = module
                waiting += (part for part in _elements(module) if isinstance(part, Module))
        return list(found.values())

    def _take_items(self, number: int, module: Module) -> None:
        for key, value in module.items():
            if isinstance(value, mx.array | Module):
                continue
            if _is_plain(value):
                self._containers.append((value, copy.deepcopy(value)))
            elif isinstance(value, list | tuple) and all(
                isinstance(part, mx.array | Module) for part in value
            ):
                self._lists.append((number, key, tuple(map(id, value))))
            else:
                raise NoSnapshot(f"{key} of a {type(module).__name__}")

    def _take_settings(self, module: Module, seen: set[int]) -> None:
        for name, value in vars(module).items():
            if name == _FROZEN or isinstance(value, _PLAIN) or value is None or id(value) in seen:
                continue
            seen.add(id(value))
            if _is_plain(value):
                self._containers.append((value, copy.deepcopy(value)))
            elif callable(value):
                # What it is bound to is no setting, and might be a model.
                if isinstance(getattr(value, "__self__", None), Module):
                    raise NoSnapshot(f"{name} of a {type(module).__name__}")
            elif _is_settings(value):
                self._settings.append((value, copy.deepcopy(vars(value))))
            else:
                raise NoSnapshot(f"{name} of a {type(module).__name__}")


def _ids_of(modules: list[Any]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, modules))))


def _elements(module: Module) -> list[Any]:
    """The parts of a module, those of its lists among them."""
    found: list[Any] = []
    for value in module.values():
        found += value if isinstance(value, list | tuple) else (value,)
    return found


def _arrays_of(modules: list[Module]) -> list[mx.array]:
    return [part for one in modules for part in _elements(one) if isinstance(part, mx.array)]


def _is_settings(value: Any) -> bool:
    """An object of plain attributes only, equal to itself and to copies of itself."""
    compare: Any = type(value).__eq__
    by_field = dataclasses.is_dataclass(value) or compare is object.__eq__
    return by_field and hasattr(value, "__dict__") and _is_plain(vars(value))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Plain values, or containers of nothing else."""
    if value is None or isinstance(value, _PLAIN):
        return True
    if depth > _DEEPEST or isinstance(value, Module):
        return False
    if isinstance(value, dict):
        return all(_is_plain(part, depth + 1) for part in chain(value, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(part, depth + 1) for part in value)
    return False
