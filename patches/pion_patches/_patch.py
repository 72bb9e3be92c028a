"""What a patch is: guarded, idempotent, reversible, and usable as a context manager.

A patch has no import side effect. `install` first checks everything it relies on and raises
`UnsupportedVersion` or `PatchConflict` with nothing changed; installing twice is a no-op.
`uninstall` restores what `install` changed, or raises `PatchConflict` where somebody wrapped over
it since, again with nothing changed.
"""

from __future__ import annotations

import abc
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class UnsupportedVersion(Exception):
    """The installed package is not one the patch was tested with; nothing was changed."""

    def __init__(self, found: str, required: str) -> None:
        super().__init__(f"found {found}; required: {required}")
        self.found = found
        self.required = required


class PatchConflict(Exception):
    """Somebody else's patch stands in the way; nothing was changed."""


def require_version(package: str, found: str, low: str, below: str) -> None:
    """Raise `UnsupportedVersion` unless ``low <= found < below``."""
    if not _release(low) <= _release(found) < _release(below):
        raise UnsupportedVersion(f"{package} {found}", f"{package} >= {low}, < {below}")


def require_signature(function: Callable[..., Any], template: Callable[..., Any]) -> None:
    """Check that ``function`` takes the parameters of ``template``: names, kinds, order, defaults.

    Annotations are not compared: they differ between releases and change nothing.
    """
    found, required = _parameters(function), _parameters(template)
    if found != required:
        name = getattr(function, "__qualname__", repr(function))
        raise UnsupportedVersion(f"{name}{found}", f"{name}{required}")


def _parameters(function: Callable[..., Any]) -> str:
    """``(a, b, *, c=None)``, without annotations."""
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=empty))


def _release(version: str) -> tuple[int, ...]:
    """``"0.32.2.dev1"`` becomes ``(0, 32, 2)``: a development build counts as its release."""
    leading = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in leading.group().split(".")) if leading else ()


class Patch(abc.ABC):
    """One reversible change to somebody else's code. Subclasses fill in four methods."""

    name: ClassVar[str]

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @abc.abstractmethod
    def check(self) -> None:
        """Raise `UnsupportedVersion` or `PatchConflict` unless `apply` can work; change nothing."""

    @abc.abstractmethod
    def is_installed(self) -> bool:
        """Say whether the change is in force in this process, whoever made it."""

    @abc.abstractmethod
    def apply(self) -> None:
        """Make the change. Called once `check` has passed and only when not installed."""

    @abc.abstractmethod
    def revert(self) -> None:
        """Undo the change, or raise `PatchConflict` before touching anything."""

    def install(self) -> None:
        with self._lock:
            if self.is_installed():
                return
            self.check()
            self.apply()

    def uninstall(self) -> None:
        with self._lock:
            if self.is_installed():
                self.revert()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install for the length of a block; a patch that was there before stays afterwards."""
        with self._lock:
            was_installed = self.is_installed()
            self.install()
        try:
            yield
        finally:
            if not was_installed:
                self.uninstall()
