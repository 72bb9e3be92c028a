"""The server as a process: start, files it leaves, refusals to start, exit."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pion_server import __version__

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

Start = Callable[..., "ServerProcess"]


def run(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pion_server", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environ,
        check=False,
    )


def refusal(*flags: str) -> str:
    """The single line of a server that does not start."""
    done = run(*flags)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("pion-server: ")
    return lines[0].removeprefix("pion-server: ")


def read_status(server: ServerProcess) -> dict[str, str]:
    text = (server.directory / f"pion-{server.port}.status").read_text()
    return dict(line.split("=", 1) for line in text.splitlines())


def test_version_and_help_print_and_end() -> None:
    assert run("-v").stdout == f"pion-server {__version__}\n"
    done = run("--help", "--bind", "0.0.0.0")
    assert done.returncode == 0
    assert "--vstore-sessions N" in done.stdout


def test_refusals_to_start_are_one_line(tmp_path: Path) -> None:
    assert "did you mean --port?" in refusal("--prot", "1")
    assert "without a password" in refusal("--bind", "0.0.0.0")
    file = tmp_path / "file"
    file.write_text("x")
    assert "cannot open the data" in refusal("-p", "0", "--dir", str(file))


def test_a_port_in_use_is_one_line(server: Start, tmp_path: Path) -> None:
    running = server()
    text = refusal("-p", str(running.port), "--dir", str(tmp_path / "other"))
    assert text == f"127.0.0.1:{running.port} is in use by another program; choose another --port"


def test_a_directory_in_use_is_one_line(server: Start) -> None:
    running = server()
    assert str(running.directory) in refusal("-p", "0", "--dir", str(running.directory))
    assert running.client().call("PING") == "PONG"


def test_the_server_imports_no_mlx_before_attention_is_asked_for(
    server: Start, tmp_path: Path
) -> None:
    extra = tmp_path / "extra.py"
    extra.write_text(
        "import sys\n"
        "from pion_server.commands.registry import Access, command\n"
        "@command('T.MODULES', access=Access.TENANT, min_args=0)\n"
        "def modules(ctx, args):\n"
        "    'T.MODULES'\n"
        "    return [name.encode() for name in sys.modules]\n"
    )
    running = server("--kvcache", "--metal-attention", "-w", "1", extra=extra)
    modules = running.client().call("T.MODULES")
    assert b"pion_server.wire.server" in modules
    assert not [name for name in modules if name.split(b".")[0] in (b"mlx", b"mlx_lm")]


def test_files_are_private(server: Start, tmp_path: Path) -> None:
    running = server(directory=tmp_path / "fresh")
    running.client().call("PING")
    files = list(running.directory.iterdir())
    assert files
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_a_missing_directory_is_made_private(tmp_path: Path) -> None:
    home = tmp_path / "a" / "b"
    with subprocess.Popen(
        [sys.executable, "-m", "pion_server", "-p", "0", "--dir", str(home)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any("ready on" in line for line in iter(process.stdout.readline, ""))
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        process.terminate()


def test_the_heartbeat_tells_what_the_server_is_doing(server: Start) -> None:
    running = server()
    status = read_status(running)
    assert status["state"] == "running"
    assert status["pid"] == str(running.pid)
    assert int(status["rss_bytes"]) > 1 << 20
    assert int(status["total_ram_bytes"]) > int(status["rss_bytes"])
    deadline = time.monotonic() + 20
    while int(read_status(running)["ticks"]) <= int(status["ticks"]):
        assert time.monotonic() < deadline, "no second heartbeat"
        time.sleep(0.1)
    assert running.stop() == 0
    assert read_status(running)["state"] == "stopped"


def test_the_crash_log_tells_starts_exits_and_losses(server: Start) -> None:
    running = server()
    log = running.directory / f"pion-{running.port}.crash.log"
    first = running.pid
    running.kill()
    running.restart()
    assert running.stop() == 0
    lines = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
    assert [line.split()[0] for line in lines] == ["start", "lost", "start", "exit"]
    assert lines[1].startswith(f"lost pid={first} state=running rss_bytes=")
    assert "code=0 reason=SIGTERM" in lines[3]


def test_reports_go_where_they_are_told(server: Start, tmp_path: Path) -> None:
    status, log = tmp_path / "my.status", tmp_path / "my.log"
    running = server("--status-file", str(status), "--crash-log", str(log))
    assert "state=running" in status.read_text()
    assert " start pid=" in log.read_text()
    running.stop()
    quiet = server("--no-crash-log")
    assert not list(quiet.directory.glob("*.crash.log"))


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_listening_on_ipv6(server: Start) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 loopback here")
    running = server("--bind", "::1")
    assert running.client().call("PING") == "PONG"
    assert b"addr=[::1]:" in running.client().call("CLIENT", "INFO")


def test_every_address_of_localhost_answers_on_one_port(server: Start) -> None:
    running = server("--bind", "localhost")
    addresses = {entry[4][0] for entry in socket.getaddrinfo("localhost", None)}
    for address in addresses:
        running.host = str(address)
        assert running.client().call("PING") == "PONG"


def test_the_password_may_come_from_the_environment(
    server: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PION_REQUIREPASS", "from-env")
    client = server().client()
    assert client.error("PING").startswith("NOAUTH")
    assert client.call("AUTH", "from-env") == "OK"


def test_a_reader_of_its_output_may_go_away(tmp_path: Path) -> None:
    """A supervisor that closes both pipes must not stop the server, nor spoil its exit status."""
    with subprocess.Popen(
        [sys.executable, "-m", "pion_server", "-p", "0", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        ready = next(line for line in process.stdout if "ready on" in line)
        process.stdout.close()
        process.stderr.close()
        port = int(ready.split(" ready on ")[1].split()[0].rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"SHUTDOWN\r\n")
            assert client.recv(1) == b""
        assert process.wait(30) == 0
