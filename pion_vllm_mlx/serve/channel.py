"""The queue between a request's own thread and the one that computes, and how to give up on it."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from mlx_lm.server import GenerationContext


class ClientGone(Exception):
    """Whoever asked has closed the connection."""


class Channel(SimpleQueue[Any]):
    """What mlx_lm.server puts into a request's queue: a context, progress, tokens, None at the end.

    `sequential`: set on the path that serves one request at a time, where an exception out of
    `put` ends this request only. On the other path it would end the server.
    """

    def __init__(self) -> None:
        super().__init__()
        #: mlx_lm.server's GenerationContext, once it has made one.
        self.context: Any = None
        self.cancelled = False
        self.sequential = False
        self._answers = False

    @property
    def prefilling(self) -> bool:
        """Whether the prompt is still being computed, for somebody."""
        return not (self._answers or self.cancelled)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if isinstance(item, GenerationContext):
            # `cancel` sets its flag before it looks here, so one of the two stops the context.
            self.context = item
            if self.cancelled:
                self.context.stop()
        elif self.cancelled and self.sequential and isinstance(item, tuple):
            raise ClientGone
        elif not isinstance(item, tuple):
            self._answers = True
        super().put(item)

    def cancel(self) -> None:
        """Have the generation stopped at the next step it gets to."""
        self.cancelled = True
        if self.context is not None:
            self.context.stop()
