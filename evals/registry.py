"""Measurements by name: every module of a package is one, unless its name starts with ``_``."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType


def module_names(package: ModuleType) -> list[str]:
    """The measurements of `package`, in alphabetical order."""
    modules = pkgutil.iter_modules(package.__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def load_module(package: ModuleType, name: str) -> ModuleType:
    """Import one of them."""
    return importlib.import_module(f"{package.__name__}.{name}")


def title_of(module: ModuleType) -> str:
    """The first line of its docstring."""
    return (module.__doc__ or module.__name__).strip().splitlines()[0]
