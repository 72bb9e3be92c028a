"""Formats by name and by tag."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import pion_server.formats
from pion_server.formats.base import Format
from pion_server.modules import import_modules

_BY_NAME: dict[str, type[Format]] = {}
_BY_TAG: dict[int, type[Format]] = {}

FormatClass = TypeVar("FormatClass", bound=type[Format])


def register(cls: FormatClass) -> FormatClass:
    """Class decorator: make a format known. A name or tag already taken raises ValueError."""
    if cls.name in _BY_NAME:
        raise ValueError(f"two formats named {cls.name}")
    if cls.tag in _BY_TAG:
        raise ValueError(f"formats {_BY_TAG[cls.tag].name} and {cls.name} share tag {cls.tag}")
    _BY_NAME[cls.name] = cls
    _BY_TAG[cls.tag] = cls
    return cls


@cache
def load_formats() -> None:
    """Register every format of this package; two of the same name or tag fail here."""
    import_modules(pion_server.formats)


def make_format(name: str, dim: int, rope: int = 0) -> Format:
    """The format of this name (any case) for rows of `dim` numbers (raw: bytes).

    Raises ValueError for an unknown name, listing the known ones, or a width it cannot hold.
    """
    load_formats()
    cls = _BY_NAME.get(name.lower())
    if cls is None:
        raise ValueError(f"unknown format, not one of {', '.join(format_names())}")
    return cls(dim, rope)


def format_by_tag(tag: int, dim: int, rope: int = 0) -> Format:
    """The format stored under this tag. Raises ValueError for an unknown tag or a bad width."""
    load_formats()
    cls = _BY_TAG.get(tag)
    if cls is None:
        raise ValueError(f"unknown format tag {tag}")
    return cls(dim, rope)


def format_names() -> tuple[str, ...]:
    """All names, by tag."""
    load_formats()
    return tuple(_BY_TAG[tag].name for tag in sorted(_BY_TAG))
