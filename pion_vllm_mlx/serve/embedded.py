"""A pion-server of serve's own: started with it, started again when it dies, shared by two serves.

    with Embedded(folder) as server:
        lane = server.endpoint

The folder is the user's alone. It holds the server's data, its log, and a file with the port and
the password, by which a second serve on the same folder finds the server the first one started.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pion_vllm_mlx.local_server import LocalServer, ServerDidNotStart
from pion_vllm_mlx.transport import Command, Patience, TransportError
from pion_vllm_mlx.transport.endpoint import Endpoint

log = logging.getLogger("pion_vllm_mlx")

#: Each stored prefix has two sessions; an empty slot costs the server next to nothing.
SESSIONS: Final = 65536
#: Seconds the server of a serve that was killed may take to end.
_ENDING: Final = 15.0
#: Seconds between two looks at the server.
_LOOK: Final = 1.0
_QUICK: Final = Patience(first_byte=1, stall=1, total=2)


class Embedded:
    """Raises ServerDidNotStart on entry; later trouble is told and tried again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._place = folder / "server.json"
        self._server: LocalServer | None = None
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="pion-embedded", daemon=True)

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        port, password, owner = self._known()
        self.endpoint = Endpoint("127.0.0.1", port, password=password)
        if not (port and _is_alive(owner) and self._answers()):
            self._start_behind(port, password)
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watcher.join()
        if self._server is not None:
            self._server.stop()

    @property
    def pid(self) -> int | None:
        """The process of the server, where it is ours."""
        server = self._server
        return server.pid if server is not None and server.running else None

    def _start_behind(self, port: int, password: str) -> None:
        """Start one, waiting for the server of a serve that was killed to end in order."""
        deadline = time.monotonic() + (_ENDING if port else 0)
        while True:
            try:
                self._start(password, port, 0)
            except ServerDidNotStart:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def _start(self, password: str, *ports: int) -> None:
        """Start one on the first of the ports that can be had; 0 is any."""
        flags = ("--vstore-sessions", str(SESSIONS), "--no-attention")
        for wanted in ports:
            self._server = LocalServer(
                self.folder / "data",
                self.folder / "server.log",
                flags,
                port=wanted,
                password=password,
                tied=True,
            )
            try:
                self._server.start()
            except ServerDidNotStart:
                if wanted == ports[-1]:
                    raise
                continue
            self.endpoint.port = self._server.port
            self._note(self._server.port, password)
            return

    def _known(self) -> tuple[int, str, int]:
        """Port, password and owner of the last server here; ports and owners are 0 without one."""
        try:
            noted = json.loads(self._place.read_text())
            return int(noted["port"]), str(noted["password"]), int(noted["owner"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, secrets.token_urlsafe(24), 0

    def _note(self, port: int, password: str) -> None:
        partial = self._place.with_suffix(".partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            json.dump({"port": port, "password": password, "owner": os.getpid()}, file)
        partial.replace(self._place)

    def _answers(self) -> bool:
        """Whether a server that knows the password is on the port."""
        probe = self.endpoint.twin()
        try:
            return probe.exchange([Command(("PING",))], _QUICK)[0] in ("PONG", b"PONG")
        except TransportError:
            return False
        finally:
            probe.close()

    def _watch(self) -> None:
        told = False
        while not self._ended.wait(_LOOK):
            if self._server is not None and self._server.running:
                told = False
                continue
            if self._server is None and self._answers():
                continue
            try:
                port, password, _ = self._known()
                # On the same port: connections are made to it by those who know no other.
                self._start(password, port)
                log.warning("pion-server had ended and was started again")
            except (ServerDidNotStart, OSError) as error:
                self._server = None
                if not told:
                    told = True
                    log.warning("pion-server has ended and does not start: %s", error)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0
