"""Who may talk to a server that listens on this machine: no page of another site.

A page can have its own name resolve to 127.0.0.1 and then ask as if it were us (DNS rebinding), or
simply send a request here and not care that it may not read the answer. The first shows in the
Host header, the second in Origin.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping


class Guard:
    """`hosts`: names beside localhost and every address; `origins`: pages that may ask, `*` all."""

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = {"localhost", *(host.lower() for host in hosts)}
        self._origins = set(origins)

    def refusal(self, host: str | None, origin: str | None) -> str | None:
        """Why a request is refused, or None."""
        if host is None or not self._is_known(host):
            return f"the Host header {host!r} is not this server's; see --allowed-host"
        if origin is None or self._allows(origin) or origin.partition("://")[2] == host:
            return None
        return f"pages of {origin} may not use this server; see --cors-origin"

    def headers(self, origin: str | None) -> Mapping[str, str]:
        """What a browser wants to see before it lets a page read the answer."""
        if origin is None or not self._allows(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if "*" in self._origins else origin,
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": "*",
            "Vary": "Origin",
        }

    def _allows(self, origin: str) -> bool:
        return "*" in self._origins or origin in self._origins

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        name = name.lower().removesuffix(".")
        try:
            # An address is nobody's to rebind: only names are resolved.
            ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        except ValueError:
            return name in self._hosts
        return True
