"""The one password check of all lanes, and what a wrong one costs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn

from pion_server.errors import BadArgument, WrongPassword
from pion_server.payload import Buffer

# Seconds a connection waits for its refusal, and with it for everything it sent behind.
FAILURE_DELAY = 0.25


def check_password(password: str | None, *given: Buffer) -> Coroutine[Any, Any, NoReturn] | None:
    """None if one of `given` is the password; else what to await: it raises WrongPassword, late.

    Raises BadArgument at once where no password is set: a client that sends one is told so.
    """
    if password is None:
        raise BadArgument("Client sent AUTH, but no password is set")
    import hmac

    expected = password.encode()
    # Every candidate is compared: how long that takes says nothing about which was right.
    right = [hmac.compare_digest(bytes(word), expected) for word in given]
    return None if any(right) else _refuse()


async def _refuse() -> NoReturn:
    await asyncio.sleep(FAILURE_DELAY)
    raise WrongPassword("invalid username-password pair or user is disabled.")
