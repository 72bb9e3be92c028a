"""Certificates for tests, of an authority made on the spot; and where a server has TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trustme

from tests.conftest import READY


class Papers:
    """A certificate authority and what it has signed, as files."""

    def __init__(self, folder: Path, *names: str) -> None:
        authority = trustme.CA()
        signed = authority.issue_cert(*(names or ("localhost", "127.0.0.1")))
        client = authority.issue_cert("client@example.org")
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self.client = folder / "client.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        signed.private_key_pem.write_to_path(str(self.key))
        for number, blob in enumerate(signed.cert_chain_pems):
            blob.write_to_path(str(self.cert), append=number > 0)
        client.private_key_and_cert_chain_pem.write_to_path(str(self.client))

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--tls-port", "0", "--tls-cert", str(self.cert), "--tls-key", str(self.key))


def tls_port(server: Any) -> int:
    """The ready line says where TLS is."""
    word = server.ready_line.rpartition("TLS on 127.0.0.1:")[2].partition(",")[0]
    assert READY.search(server.ready_line)
    return int(word.rstrip(")\n"))
