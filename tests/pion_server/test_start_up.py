"""What a start loads and what it leaves for later."""

from __future__ import annotations

import importlib
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import pion_server

LATER = (
    *("numpy", "mlx", "pion_server.attend.engine", "pion_server.formats.fp16"),
    *("ctypes", "hashlib", "hmac", "secrets", "prometheus_client"),
)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """Waits for the process; does not, if the test has failed."""
    try:
        yield
    except BaseException:
        process.kill()
        raise
    finally:
        process.wait()


def test_a_server_is_ready_before_it_loads_numpy_and_loads_it_before_anybody_asks(
    tmp_path: Path,
) -> None:
    """Read off the interpreter's own list of imports, in which the ready line has its place."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "pion_server",
            "-p",
            "0",
            "--dir",
            str(tmp_path),
            "--metrics-port",
            "0",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    with ended(process), process.stdout:
        loaded: list[str] = []
        for line in process.stdout:
            if line.startswith("pion-server ready"):
                break
            loaded.append(line.rpartition("|")[2].strip())
        assert "pion_server.serving" in loaded
        assert not {name for name in loaded if name.startswith(LATER)}
        assert any(line.rstrip().endswith(" numpy") for line in process.stdout)
        process.terminate()
        assert process.stdout.read().count("Traceback") == 0
    assert process.returncode == 0


def test_a_request_that_comes_before_numpy_finds_what_it_needs(tmp_path: Path) -> None:
    """All of it in one write, the moment the port is known: the server imports as it goes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pion_server", "-p", "0", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with ended(process), process.stdout:
        ready = next(line for line in process.stdout if line.startswith("pion-server ready"))
        port = int(ready.split()[3].rpartition(":")[2])
        blob = bytes(range(256)) * 512
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(
                b"V.CREATE s 32 VQUANT fp32\r\n"
                + b"*6\r\n$12\r\nV.STOREBATCH\r\n$1\r\ns\r\n$1\r\n0\r\n$1\r\n0\r\n$4\r\n1024\r\n"
                + b"$%d\r\n%s\r\n" % (len(blob), blob)
                + b"V.FETCH s 0 RANGE 0 1024\r\nCOMMAND COUNT\r\n"
            )
            wanted = b":0\r\n+OK\r\n$%d\r\n%s\r\n:" % (len(blob), blob)
            answer = b""
            while len(answer) < len(wanted) + 4:
                answer += client.recv(1 << 16)
        assert answer.startswith(wanted)
        process.terminate()
    assert process.returncode == 0


def _modules() -> list[str]:
    return [m.name for m in pkgutil.walk_packages(pion_server.__path__, "pion_server.")]


@pytest.mark.parametrize("name", _modules())
def test_every_module_can_be_imported(name: str) -> None:
    """What is loaded on demand must not first be found broken by a user's command."""
    importlib.import_module(name)
