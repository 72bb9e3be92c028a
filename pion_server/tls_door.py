"""The ports for TLS clients, beside the plain ones of `doors`; ssl is imported only with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pion_server.config import Config
from pion_server.doors import Doors, bind_tls_doors, start_listening
from pion_server.flag_values import ConfigError

if TYPE_CHECKING:
    from pion_server.wire.lane import Lane
    from pion_server.wire.server import Server


@dataclass(slots=True)
class TlsDoor:
    """Bound sockets, and the certificate to show there."""

    config: Config
    doors: Doors
    context: Any

    @classmethod
    def of(cls, config: Config, doors: Doors | None = None) -> TlsDoor | None:
        """What `--tls-port` asks for, or None. Raises ConfigError for files that will not do.

        `doors`: sockets that are bound already.
        """
        if config.tls_port is None:
            return None
        import ssl

        from pion_server.wire.tls import server_context

        files = (config.tls_cert, config.tls_key, config.tls_ca)
        try:
            context = server_context(*(None if one is None else str(one) for one in files))  # type: ignore[arg-type]
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or getattr(error, "reason", None) or error
            where = getattr(error, "filename", None) or "--tls-cert, --tls-key, --tls-ca"
            raise ConfigError(f"cannot use the certificate ({where}): {reason}") from None
        doors = doors or bind_tls_doors(config)
        assert doors is not None
        return cls(config, doors, context)

    def open(self, server: Server, resp: Lane, binary: Lane) -> None:
        """Let TLS clients in, to RESP and, one port above, to the binary lane."""
        from pion_server.wire.tls import TlsListener

        start_listening(self.config, self.doors)
        for sockets, lane in ((self.doors.resp, resp), (self.doors.binary, binary)):
            tls = TlsListener(server, lane, self.context)
            for listener in sockets:
                tls.listen(listener)
