"""Which worker of a server holds a prefix, as far as its replies have told.

A server of several workers answers what is asked of the wrong one with `… lives on worker N …`;
worker N also listens on a port of its own, the shared one plus 2 + N.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from pion_vllm_mlx.transport import Command, Reply, ServerError

#: A worker's number; None for the shared port, behind which any of them may be.
Worker: TypeAlias = "int | None"

#: The shared port plus this plus its number: a worker's own port.
FIRST_WORKER_PORT: Final = 2
_LIVES_ON: Final = re.compile(r"lives on worker (\d{1,3})\b")
_SUFFIXES: Final = (b"_pk", b"_pv", b"_attn")
#: Names remembered; beyond, they are learned again.
_MOST: Final = 65_536


class Homes:
    """The workers of prefixes. All lanes to one server may share it, in any thread."""

    def __init__(self) -> None:
        self._workers: dict[bytes, int] = {}

    def of(self, command: Command) -> Worker:
        """Where to send a command."""
        if not self._workers or len(command.words) < 2:
            return None
        return self.of_name(name_of(command))

    def of_name(self, name: bytes) -> Worker:
        """Where a namespace, one of its sides or its attention session lives."""
        return self._workers.get(_key(name))

    def remember(self, name: bytes, worker: int) -> None:
        """It lives there."""
        if len(self._workers) >= _MOST:
            self._workers.clear()
        self._workers[_key(name)] = worker

    def grouped(
        self, commands: Sequence[Command], wanted: Iterable[int]
    ) -> dict[Worker, list[int]]:
        """The indices of commands by where to send them, each worker's in order."""
        groups: dict[Worker, list[int]] = {}
        for index in wanted:
            groups.setdefault(self.of(commands[index]), []).append(index)
        return groups

    def learn(self, command: Command, reply: Reply) -> bool:
        """Whether the reply names another worker than the one that was asked."""
        if not isinstance(reply, ServerError) or len(command.words) < 2:
            return False
        found = _LIVES_ON.search(str(reply))
        if found is None:
            return False
        self.remember(name_of(command), int(found[1]))
        return True

    def forget(self, worker: int) -> None:
        """Nothing is known to be on `worker` any more."""
        for key in [key for key, home in list(self._workers.items()) if home == worker]:
            self._workers.pop(key, None)


def name_of(command: Command) -> bytes:
    """The first argument, which is what a command is about."""
    word = command.words[1]
    return bytes(word) if isinstance(word, bytes | bytearray | memoryview) else str(word).encode()


def _key(name: bytes) -> bytes:
    """What a namespace, its two sides and its attention session have in common."""
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name
