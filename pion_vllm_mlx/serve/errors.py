"""What a request may be refused for."""

from __future__ import annotations


class BadRequest(ValueError):
    """A request that means nothing here; the message says what is wrong with it."""
