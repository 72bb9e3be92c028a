"""What the words behind flags mean: each reader turns one into a value, or raises ConfigError."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

MB = 1024 * 1024


class ConfigError(Exception):
    """The command line cannot be served; `str(error)` is one line for the user."""


def number(low: int, high: int) -> Callable[[str], int]:
    """A reader of whole numbers within `[low, high]`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", text) or not low <= int(text) <= high:
            raise ConfigError(f"wants a whole number from {low} to {high}, not {text!r}")
        return int(text)

    return read


_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {f"{unit}b": 1024**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


def size(text: str) -> int:
    """`1048576`, `512mb`, `4gb`, `1.5g`: kb, mb, gb, tb count 1024s; k, m, g, t count 1000s."""
    match = re.fullmatch(r"([0-9]{1,18})(\.[0-9]{1,6})?([a-z]*)", text.strip().lower())
    if match is None or match[3] not in _UNITS:
        raise ConfigError(f"wants a size such as 512mb or 4gb, not {text!r}")
    unit = _UNITS[match[3]]
    return int(match[1]) * unit + int(float(match[2] or 0) * unit)


def size_or_none(text: str) -> int | None:
    """A size; 0 stands for no limit."""
    return size(text) or None


def buffer_size(text: str) -> int:
    """A size below which the protocol itself would not fit."""
    if size(text) < MB:
        raise ConfigError(f"wants at least 1mb, not {text!r}")
    return size(text)


def fsync_policy(text: str) -> str:
    if text.lower() not in ("always", "everysec", "no"):
        raise ConfigError(f"wants always, everysec or no, not {text!r}")
    return text.lower()


def log_format(text: str) -> str:
    if text.lower() not in ("text", "json"):
        raise ConfigError(f"wants text or json, not {text!r}")
    return text.lower()


def password(text: str) -> str:
    if not text:
        raise ConfigError("wants a password, not an empty word")
    return text


def password_file(text: str) -> str:
    """The file's first line, without its line end."""
    try:
        first = Path(text).read_bytes().split(b"\n")[0].rstrip(b"\r").decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {text}: {error}") from None
    if not first:
        raise ConfigError(f"{text} holds no password")
    return first


def name_prefix(text: str) -> bytes:
    if not 1 <= len(text.encode()) <= 128:
        raise ConfigError("wants a prefix of 1 to 128 bytes")
    return text.encode()
