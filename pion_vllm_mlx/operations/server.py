"""The server a subcommand is about: its options, its replies, its failures in one line.

What is about one prefix finds its way to the worker that has it; of what is about all of them each
worker of a server knows its own share, so `Server` asks every one.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Never

from pion_vllm_mlx.transport import Command, Patience, Reply, ServerError, TransportError
from pion_vllm_mlx.transport.address import DEFAULT_HOST, DEFAULT_PORT, VARIABLE, find_server
from pion_vllm_mlx.transport.homes import Worker

if TYPE_CHECKING:
    from rich.table import Table

#: Seconds to connect, and until an answer begins. A person waits here, not a request.
_CONNECT: Final = 5.0
ANSWER: Final = 10.0
#: A SAVE of a large store.
LONG: Final = 600.0
_WIDE: Final = 240


class Failed(Exception):
    """The command cannot be carried out; the message says what to do about it."""


def fail(command: str, reason: object) -> Never:
    """End the command with one line on stderr and status 1."""
    raise SystemExit(f"pion-vllm-mlx {command}: {' '.join(str(reason).split())}") from None


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and who asks."""
    group = parser.add_argument_group("server", f"also from the environment: {VARIABLE}=pion://…")
    group.add_argument("--host", help=f"default: {DEFAULT_HOST}")
    group.add_argument("--port", type=_port, help=f"default: {DEFAULT_PORT}")
    group.add_argument("--username", metavar="TENANT", help="for a server with tenants")
    group.add_argument("--tls", action="store_true", help="connect with TLS (pions:// does too)")
    group.add_argument(
        "--tls-ca", metavar="FILE", help="the same, trusting these certificates only"
    )
    group.add_argument("--password-file", metavar="FILE", help="the password is its first line")


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port from 1 to 65535")
    return int(text)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


class Server:
    """Asks one server; every trouble is `Failed`."""

    def __init__(self, options: argparse.Namespace) -> None:
        from pion_vllm_mlx.transport.endpoint import Endpoint
        from pion_vllm_mlx.transport.tls import client_context

        # One line of ours tells what went wrong; what the library logs is for applications.
        logging.getLogger("pion_vllm_mlx").setLevel(logging.ERROR)
        password = None
        if options.password_file is not None:
            password = read_text(options.password_file).partition("\n")[0].rstrip("\r")
        try:
            tls = options.tls_ca or options.tls or None
            where = find_server(options.host, options.port, options.username, password, tls)
            context = client_context(where.tls)
        except ValueError as error:
            raise Failed(error) from error
        self.name = f"{where.host}:{where.port}"
        self.lane = Endpoint(
            where.host,
            where.port,
            username=where.username,
            password=where.password,
            connect_timeout=_CONNECT,
            tls=context,
        )

    def workers(self) -> list[Worker]:
        """Its workers' numbers, for `worker=`; None alone where one process is all of it."""
        try:
            return self.lane.workers(Patience(first_byte=ANSWER))
        except ServerError as error:
            raise Failed(f"the server says: {error}") from error
        except TransportError as error:
            raise Failed(f"no answer from {self.name}: {error}") from error

    def ask(
        self, *words: str | bytes | int, patience: float = ANSWER, worker: Worker = None
    ) -> Reply:
        """One command's reply; its error reply is Failed."""
        (reply,) = self.ask_all([Command(words)], patience, worker)
        if isinstance(reply, ServerError):
            raise Failed(f"the server says: {reply}")
        return reply

    def ask_all(
        self, commands: Sequence[Command], patience: float = ANSWER, worker: Worker = None
    ) -> list[Reply]:
        """A pipeline's replies, error replies among them; from a worker, or who is concerned."""
        waiting = Patience(first_byte=patience, total=4 * LONG)
        try:
            return self.lane.exchange_at(worker, commands, waiting)
        except TransportError as error:
            raise Failed(f"no answer from {self.name}: {error}") from error

    def figures(self, *words: str, worker: Worker = None) -> dict[str, str]:
        """A reply of `name:value` lines, or a flat array of names and values."""
        reply = self.ask(*words, worker=worker)
        if isinstance(reply, list):
            texts = [text_of(word) for word in reply]
            return dict(zip(texts[::2], texts[1::2], strict=True))
        lines = text_of(reply).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


@contextmanager
def told_in_one_line(command: str) -> Iterator[None]:
    """Failures of the block end the command with one line and status 1."""
    try:
        yield
    except Failed as error:
        fail(command, error)


def read_text(path: str | Path) -> str:
    """A file's text. Raises Failed."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise Failed(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def text_of(reply: object) -> str:
    """A name or a figure as text; bytes that are no text are escaped."""
    if isinstance(reply, bytes | bytearray | memoryview):
        return bytes(reply).decode("utf-8", "backslashreplace")
    return str(reply)


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(table: Table) -> None:
    from rich.console import Console

    # Into a pipe or a file names must come whole: nothing there is 80 columns wide.
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


def size(nbytes: int) -> str:
    """Bytes for people: `47.2 MB`, in thousands."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A time span for people: `12 s`, `3 min`, `5 h`, `2 d`."""
    for most, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"
