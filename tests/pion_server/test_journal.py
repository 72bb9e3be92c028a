"""`--log-format`: the same events as lines for people and as one JSON object a line."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pion_server.config import parse
from pion_server.flag_values import ConfigError

EXTRA = Path(__file__).parent / "wire" / "extra_commands.py"
Server = Any


def events(server: Server) -> list[dict[str, Any]]:
    """Every line of stderr; one that is no object with the four fields fails."""
    found = [json.loads(line) for line in server.errors.read_text().splitlines()]
    for event in found:
        assert event.keys() >= {"time", "level", "event", "message"}
        assert datetime.fromisoformat(event["time"]).tzinfo is not None
        assert event["level"] in ("info", "warning", "error")
    return found


def test_every_line_of_stderr_is_an_object(server: Callable[..., Server], tmp_path: Path) -> None:
    directory = tmp_path / "store"
    running = server("--log-format", "json", "--io-threads", "4", extra=EXTRA, directory=directory)
    client = running.client()
    for how in ("here", "thread", "task"):
        assert client.error("T.RAISE", how).startswith("ERR internal error in T.RAISE")
    client.send(client.pack("T.BROKEN"))
    assert client.socket.recv(1 << 16)
    assert running.stop() == 0
    found = events(running)
    kinds = [event["event"] for event in found]
    assert kinds == ["flag", "replayed", "ready", *["internal error"] * 3, "client", "stopped"]
    ready, failure, broken = found[2], found[3], found[6]
    assert (ready["port"], ready["level"]) == (running.port, "info")
    assert f"pion-server ready on {running.host}:{running.port} " in ready["message"]
    assert (failure["command"], failure["level"]) == ("T.RAISE", "error")
    assert "RuntimeError" in failure["traceback"]
    assert broken["address"] == ":".join(map(str, client.socket.getsockname()))
    # Programs that wait for the ready line find it where it always was.
    assert f"pion-server ready on {running.host}:{running.port} (pid " in running.ready_line


def test_lines_for_people_are_what_they_were(server: Callable[..., Server]) -> None:
    running = server("--io-threads", "4", extra=EXTRA)
    running.client().error("T.RAISE", "here")
    text = running.errors.read_text()
    assert text.startswith(
        "pion-server: --io-threads means nothing to this server and is ignored\n"
    )
    assert "internal error in T.RAISE:\nTraceback (most recent call last):\n" in text
    assert text.endswith("RuntimeError: planned\n+OK\n")


def test_a_start_that_fails_is_an_event(tmp_path: Path) -> None:
    """After the flags are read; what is wrong with them is said in a line for people."""
    import subprocess
    import sys

    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ["--port", str(taken.getsockname()[1]), "--dir", str(tmp_path)]
        command = [sys.executable, "-m", "pion_server", *words, "--log-format", "json"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert json.loads(ended.stderr)["event"] == "refused"
    with pytest.raises(ConfigError, match="--log-format wants text or json, not 'xml'"):
        parse(["--log-format", "xml"], {})
