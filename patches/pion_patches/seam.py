"""The one function all of mlx-lm's attention goes through, and how its body is exchanged.

Models bind ``mlx_lm.models.base.scaled_dot_product_attention`` by name when they are imported, so
setting the attribute of ``base`` reaches only models imported later. We exchange the function's
``__code__`` instead: the function *object* stays the one everybody holds. That reaches models
imported before and after, models loaded from a ``model_file`` (which never enter ``sys.modules``,
so no sweep could find them, nor put them back), and wrappers of other patchers around it. It is one
assignment either way, and a call that is under way in another thread keeps the body it started
with. Rebinding by an identity sweep has none of these.

The exchanged body uses nothing but builtins: it asks ``keys`` for a method ``pion_attend`` and
otherwise calls the original body. So two copies of this package in one process agree.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from ._patch import PatchConflict, UnsupportedVersion, require_signature

BASE = "mlx_lm.models.base"
NAME = "scaled_dot_product_attention"
STATE = "__pion_seam__"
PROTOCOL = 1


def signature_template(  # type: ignore[no-untyped-def]
    queries, keys, values, cache, scale, mask, sinks=None
) -> Any:
    """The parameters the seam must have, in this order."""


def seam_body(  # type: ignore[no-untyped-def]
    queries, keys, values, cache, scale, mask, sinks=None, *, _pion_original
) -> Any:
    """Keys that carry their own attention use it; everything else runs the original, untouched."""
    attend = getattr(keys, "pion_attend", None)
    if attend is None:
        return _pion_original(queries, keys, values, cache, scale, mask, sinks)
    return attend(queries, values, scale=scale, mask=mask, sinks=sinks)


def is_seam(value: object) -> bool:
    """Say whether ``value`` is mlx-lm's own attention function, its body exchanged or not."""
    # The globals say where it was defined; `functools.wraps` can forge every other sign.
    return (
        type(value) is FunctionType
        and value.__globals__.get("__name__") == BASE
        and value.__name__ == NAME
        and not value.__dict__.get("__pion_original__", False)
    )


def is_exchanged(seam: Callable[..., Any]) -> bool:
    return STATE in getattr(seam, "__dict__", {})


def find_seams() -> list[FunctionType]:
    """All attention functions of mlx-lm in use: one, or more once ``base`` was reloaded.

    Looks at what ``base`` holds, behind wrappers of other patchers, and at every module's values.
    """
    found = {id(f): f for f in chain(bound_function()) if is_seam(f)}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if is_seam(value):
                found[id(value)] = value
    return list(found.values())


def bound_function() -> Any:
    """What a model imported now would bind: the seam, or somebody's replacement of it."""
    return getattr(importlib.import_module(BASE), NAME, None)


def current_seam() -> FunctionType | None:
    """The seam behind `bound_function`, else any that models imported earlier hold."""
    reached = next((f for f in chain(bound_function()) if is_seam(f)), None)
    return reached or next(iter(find_seams()), None)


def chain(value: object, depth: int = 8) -> Iterator[Any]:
    """``value`` and the callables it wraps.

    Follows ``__wrapped__``, partials, closed-over functions, and globals that hold the seam.
    """
    pending, seen = [(value, depth)], set()
    while pending:
        item, left = pending.pop()
        if id(item) in seen or not callable(item):
            continue
        seen.add(id(item))
        yield item
        if left == 0 or is_seam(item):
            continue
        inner = [getattr(item, "__wrapped__", None)]
        if isinstance(item, functools.partial):
            inner.append(item.func)
        for cell in getattr(item, "__closure__", None) or ():
            try:
                inner.append(cell.cell_contents)
            except ValueError:  # a cell that is not filled yet
                continue
        if isinstance(item, FunctionType):
            globals_used = (item.__globals__.get(name) for name in item.__code__.co_names)
            inner += [value for value in globals_used if is_seam(value)]
        pending += [(one, left - 1) for one in inner]


def find_wrappers() -> dict[str, Callable[..., Any]]:
    """Modules whose ``scaled_dot_product_attention`` is somebody's wrapper around the seam.

    In mlx-lm's own module anything but the seam counts, even if what it wraps cannot be seen.
    """
    wrappers = {}
    for name, module in list(sys.modules.items()):
        value = getattr(module, "__dict__", {}).get(NAME)
        if value is None or is_seam(value) or not callable(value):
            continue
        if name == BASE or any(is_seam(f) for f in chain(value)):
            wrappers[name] = value
    return wrappers


def check_bound() -> None:
    """Raise unless `bound_function` is the seam or leads to it."""
    bound = bound_function()
    if any(is_seam(f) for f in chain(bound)):
        return
    if not callable(bound):
        raise UnsupportedVersion(f"mlx-lm without {BASE}.{NAME}", "mlx-lm with it")
    require_signature(bound, signature_template)
    raise PatchConflict(
        f"{BASE}.{NAME} was replaced by {bound!r}, which hides the original; "
        "install this patch before that one"
    )


def check_seam(seam: FunctionType) -> None:
    """Raise unless the body of ``seam`` can be exchanged for ours."""
    require_signature(seam, signature_template)
    if seam.__closure__ or seam.__kwdefaults__:
        raise PatchConflict(f"{BASE}.{NAME} is not the plain function mlx-lm ships")


def exchange(seam: FunctionType, wrappers: dict[str, Callable[..., Any]]) -> None:
    """Put our body into ``seam``; ``wrappers`` are those that were around it already."""
    original = FunctionType(seam.__code__, seam.__globals__, NAME, seam.__defaults__)
    original.__annotations__ = seam.__annotations__
    original.__doc__ = seam.__doc__
    original.__dict__["__pion_original__"] = True
    seam.__dict__[STATE] = {
        "protocol": PROTOCOL,
        "original": original,
        "code": seam_body.__code__,
        "wrappers": wrappers,
    }
    # `__wrapped__` keeps the signature other tools see; keyword defaults go in before the body
    # that needs them, and come out after it, so no call ever meets one without the other.
    seam.__dict__["__wrapped__"] = original
    seam.__kwdefaults__ = {"_pion_original": original}
    seam.__code__ = seam_body.__code__


def restore(seam: FunctionType) -> None:
    state = seam.__dict__[STATE]
    seam.__code__ = state["original"].__code__
    seam.__kwdefaults__ = None
    del seam.__dict__["__wrapped__"], seam.__dict__[STATE]


def check_restorable(seam: FunctionType) -> None:
    """Raise `PatchConflict` where somebody changed or wrapped ``seam`` since `exchange`."""
    state = seam.__dict__[STATE]
    if seam.__code__ is not state["code"]:
        raise PatchConflict(f"the body of {BASE}.{NAME} was exchanged again; undo that first")
    for module, wrapper in find_wrappers().items():
        if state["wrappers"].get(module) is wrapper:
            continue
        if module == BASE or any(f is seam for f in chain(wrapper)):
            raise PatchConflict(f"{module}.{NAME} was wrapped over by {wrapper!r}; undo that first")
