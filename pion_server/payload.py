"""Replies too large to build at once: bytes made while they are sent, and work done off the loop.

The vocabulary the stores, the commands and the wire share; it knows neither sockets nor tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class OpenFile(Protocol):
    """A file kept open as long as anyone refers to it; its bytes, once written, never change."""

    def fileno(self) -> int: ...


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes `[offset, offset + length)` of an open file, sent without passing through memory."""

    file: OpenFile
    offset: int
    length: int


Chunk: TypeAlias = Buffer | FileSpan


@dataclass(frozen=True, slots=True)
class Payload:
    """A bulk string of `nbytes` bytes, produced by `chunks()` while it is written out.

    Holding one costs no memory beyond its references, so any number can wait in a queue. If
    `chunks()` raises or yields another length, the connection is closed: a reader sees an
    incomplete frame, never wrong bytes.
    """

    nbytes: int
    chunks: Callable[[], Iterator[Chunk]]


@dataclass(frozen=True, slots=True)
class Handover:
    """A reply that an open file's descriptor goes along with, on a socket that can carry one."""

    value: object
    file: OpenFile


@dataclass(frozen=True, slots=True)
class Offload:
    """A command's remaining work, to be run in a thread so that other clients are not kept waiting.

    `work()` returns the reply value or raises CommandError.
    """

    work: Callable[[], Any]
