"""The one password check of all lanes, and what a wrong one costs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

from pion_server.errors import BadArgument, WrongPassword
from pion_server.payload import Buffer

# Seconds a connection waits for its refusal, and with it for everything it sent behind.
FAILURE_DELAY = 0.25
_LONGEST_NAME = 64


class Credentials:
    """The admin's password (None: everybody is admin) and the tenants' by name."""

    def __init__(self, password: str | None, tenants: Mapping[str, str]) -> None:
        self.password = password
        self._expected = (password or "").encode()
        self._salt = os.urandom(32)
        self._tenants = {name.encode(): word.encode() for name, word in tenants.items()}

    @property
    def needed(self) -> bool:
        """Whether anybody has to authenticate."""
        return self.password is not None

    def tenant(self, user: Buffer) -> bytes | None:
        """`user` if a tenant is called so; every other name stands for the admin."""
        name = bytes(user[: _LONGEST_NAME + 1])
        return name if name in self._tenants else None

    def check(self, tenant: bytes | None, *given: Buffer) -> Coroutine[Any, Any, NoReturn] | None:
        """None if one of `given` is the password of that tenant, or of the admin.

        Else what to await: it raises WrongPassword, late. Raises BadArgument at once where no
        password is set: a client that sends one is told so.
        """
        if self.password is None:
            raise BadArgument("Client sent AUTH, but no password is set")
        expected = self._expected if tenant is None else self._tenants[tenant]
        import hmac  # not at start-up: it brings OpenSSL

        # Every candidate is compared, as digests, which are all of one length: how long that takes
        # says nothing about which was right, how far, or how long the right one is.
        wanted = self._digest(expected)
        right = [hmac.compare_digest(self._digest(bytes(word)), wanted) for word in given]
        return None if any(right) else _refuse()

    def _digest(self, word: bytes) -> bytes:
        from hashlib import blake2b

        return blake2b(word, key=self._salt).digest()


async def _refuse() -> NoReturn:
    await asyncio.sleep(FAILURE_DELAY)
    raise WrongPassword("invalid username-password pair or user is disabled.")
