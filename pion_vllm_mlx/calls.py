"""Calls of an event loop that would block it, made by a thread instead, one at a time."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
_Calls: TypeAlias = "SimpleQueue[tuple[Future[Any], Callable[[], Any]]]"

#: Threads without an owner. None of them ever ends: MLX's CPU build aborts an interpreter that
#: outlives a thread that computed.
_spare: list[_Calls] = []


class Abandoned(Exception):
    """Nobody waits for the call any more."""


class Ticket:
    """Says to a call whether anybody still waits for it."""

    def __init__(self) -> None:
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """Nobody does."""
        self._abandoned.set()

    def check(self) -> None:
        """Raise Abandoned if nobody does."""
        if self._abandoned.is_set():
            raise Abandoned


class CallThread:
    """One thread for one owner, from the first call until the owner is gone."""

    def __init__(self) -> None:
        self._pid = 0
        self._calls: _Calls | None = None

    async def run(self, call: Callable[[Ticket], T]) -> T:
        """Await `call(ticket)`, made in the thread after the calls before it.

        Cancelled while it waits for its turn, it is never made; cancelled later, its result or
        exception goes nowhere, and `ticket.check()` raises.
        """
        ticket = Ticket()
        future: Future[T] = Future()
        self._queue().put((future, lambda: call(ticket)))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            ticket.abandon()
            raise

    def _queue(self) -> _Calls:
        if self._calls is None or self._pid != os.getpid():  # a forked child has no threads
            try:
                self._calls = _spare.pop()
            except IndexError:
                self._calls = SimpleQueue()
                threading.Thread(
                    target=_work, args=(self._calls,), name="pion-calls", daemon=True
                ).start()
            self._pid = os.getpid()
            weakref.finalize(self, _release, self._calls, self._pid).atexit = False
        return self._calls


def _release(calls: _Calls, pid: int) -> None:
    if pid == os.getpid():
        _spare.append(calls)


def _work(calls: _Calls) -> None:
    while True:
        future, call = calls.get()
        if future.set_running_or_notify_cancel():
            _settle(future, call)
        del future, call  # and with them caches and models, before the wait for the next one


def _settle(future: Future[T], call: Callable[[], T]) -> None:
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


os.register_at_fork(after_in_child=_spare.clear)
