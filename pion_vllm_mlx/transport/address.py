"""Where a server is and who asks: `pion://user:password@host:port`, from a word or `PION_URL`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit

from pion_vllm_mlx.transport.tls import Tls

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 1974
VARIABLE: Final = "PION_URL"
#: With a TLS connection or without.
SCHEMES: Final = {"pion": False, "pions": True}


@dataclass(frozen=True, slots=True)
class Address:
    """A server's place, and the credentials for it."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls = False


def parse_url(url: str) -> Address:
    """`pion://[user[:password]@]host[:port]`, with TLS `pions://`; percent-encoded.

    Raises ValueError, which does not show the password.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError("a server's URL begins with pion:// or pions://")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("a server's URL ends with its port")
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError("a server's URL has a port from 1 to 65535") from error
    if not parts.hostname or port == 0:
        raise ValueError("a server's URL names a host, and a port from 1 to 65535")
    user, word = parts.username, parts.password
    return Address(
        parts.hostname,
        port or DEFAULT_PORT,
        unquote(user) if user else None,
        unquote(word) if word is not None else None,
        SCHEMES[parts.scheme],
    )


def find_server(
    host: str | None = None,
    port: int | None = None,
    username: str | None = None,
    password: str | None = None,
    tls: Tls = None,
    environ: Mapping[str, str] = os.environ,
) -> Address:
    """What was given, else what `PION_URL` says, else 127.0.0.1:1974.

    Credentials of the URL go only to the server of the URL: with another host or port given they
    are left out. Raises ValueError for a URL that is none.
    """
    known = parse_url(environ[VARIABLE]) if environ.get(VARIABLE) else Address()
    if host not in (None, known.host) or port not in (None, known.port):
        known = Address(host or DEFAULT_HOST, port or DEFAULT_PORT)
    return Address(
        known.host,
        known.port,
        username if username is not None else known.username,
        password if password is not None else known.password,
        known.tls if tls is None else tls,
    )
