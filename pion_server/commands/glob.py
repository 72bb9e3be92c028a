r"""Redis' key patterns: `*`, `?`, `[abc]`, `[^a-z]`, `\x`.

Each `*` matches as little as the text between it and the next one allows and is never tried again,
so that no pattern takes more than one pass for each of its parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


@lru_cache(maxsize=256)
def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """Whether a key matches the whole pattern."""
    if pattern.strip(b"*") == b"" and pattern:
        return lambda key: True
    parts = _parts(pattern)
    first, *others = parts
    source = first
    if others:
        *inner, last = others
        source += b"".join(b"(?>.*?" + part + b")" for part in inner if part) + b".*" + last
    compiled = re.compile(source, re.DOTALL)
    return lambda key: compiled.fullmatch(key) is not None


def _parts(pattern: bytes) -> list[bytes]:
    """Regular expressions of what stands between the stars."""
    parts, at = [b""], 0
    while at < len(pattern):
        char = pattern[at : at + 1]
        if char == b"*":
            parts.append(b"")
            at += 1
            continue
        if char == b"?":
            piece, at = b".", at + 1
        elif char == b"[":
            piece, at = _class(pattern, at + 1)
        else:
            at += char == b"\\" and at + 1 < len(pattern)
            piece, at = re.escape(pattern[at : at + 1]), at + 1
        parts[-1] += piece
    return parts


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """A bracket expression as one, and the place behind it; without its end it goes to the end."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    members: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            members.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            members.update(range(low, high + 1))
            at += 3
        else:
            members.add(pattern[at])
            at += 1
    chosen = set(range(256)) - members if negated else members
    inside = b"".join(b"\\x%02x" % byte for byte in sorted(chosen))
    return (b"[" + inside + b"]" if inside else b"(?!)"), at + 1
