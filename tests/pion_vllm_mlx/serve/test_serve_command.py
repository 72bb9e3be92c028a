"""``pion-vllm-mlx serve`` as a process, and its flags."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.serve.options import add_arguments, size
from tests.pion_patches.serving import chat_model, server_flags

#: Ours mean something else on purpose: no page may ask, and the memory has a limit.
CHOSEN_OTHERWISE = {"allowed_origins"}


@dataclass
class Process:
    """A running ``serve``, its port, and the file with what it says."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Process]:
    """The process once it is ready; killed at the end of the block."""
    command = [sys.executable, "-m", "pion_vllm_mlx.cli", "serve", "--model", str(folder)]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen([*command, "--port", "0", *flags], stderr=log)
        running = Process(process, Path(log.name))
        try:
            deadline = time.monotonic() + 120
            while not (ready := re.search(r"ready on http://\S+?:(\d+) ", running.said)):
                assert process.poll() is None, running.said
                assert time.monotonic() < deadline, running.said
                time.sleep(0.02)
            running.port = int(ready[1])
            yield running
        finally:
            process.kill()
            process.wait()


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, raw)
    response = connection.getresponse()
    try:
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("serve") / "model", "llama")


def test_it_serves_until_it_is_terminated(folder: Path) -> None:
    with started(folder, "--no-pion") as serve:
        assert ask(serve.port, "/health")[0] == 200
        body = {"prompt": list(range(10, 60)), "max_tokens": 5}
        answers = [ask(serve.port, "/v1/completions", body)[1] for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 49
        serve.process.send_signal(signal.SIGTERM)
        serve.process.wait(30)
        assert "loaded" in serve.said
        assert "Traceback" not in serve.said


def test_a_model_that_is_not_there_ends_it_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    ended = _run("--model", str(tmp_path), "--port", "0", "--no-pion")
    assert ended.returncode == 1
    assert f"cannot load {tmp_path}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_ends_it_before_a_model_is_loaded(folder: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = _run("--model", str(folder), "--port", port, "--no-pion")
    assert ended.returncode == 1
    assert "cannot listen on" in ended.stderr
    assert "loading" not in ended.stderr


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pion_vllm_mlx.cli", "serve", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser


def test_every_flag_of_mlx_lm_server_is_one_of_ours_with_its_default() -> None:
    stock = vars(server_flags("--model", "m"))
    ours = vars(_parser().parse_args(["--model", "m"]))
    assert set(stock) <= set(ours)
    for name in set(stock) - CHOSEN_OTHERWISE:
        assert ours[name] == stock[name], name


@pytest.mark.parametrize(
    "flags",
    [
        ["--temp", "0.5", "--top-k", "3", "--max-tokens", "9", "--kv-bits", "4"],
        ["--prompt-cache-bytes", "8GB", "--prompt-cache-size", "3", "--pipeline"],
        ["--chat-template-args", '{"enable_thinking": false}', "--draft-model", "d"],
        ["--allowed-origins", "https://a.example,https://b.example"],
    ],
)
def test_flags_are_read_as_mlx_lm_server_reads_them(flags: Sequence[str]) -> None:
    stock = vars(server_flags("--model", "m", *flags))
    ours = vars(_parser().parse_args(["--model", "m", *flags]))
    changed = {name: value for name, value in stock.items() if name not in CHOSEN_OTHERWISE}
    assert {name: ours[name] for name in changed} == changed
    if "--allowed-origins" in flags:
        assert ours["allowed_origins"] == stock["allowed_origins"]


def test_a_size_has_a_unit_or_none() -> None:
    assert [size(text) for text in ("8GB", "500M", "1.5 g", "77")] == [
        8 * 10**9,
        5 * 10**8,
        15 * 10**8,
        77,
    ]
    for text in ("", "8TB", "many"):
        with pytest.raises(argparse.ArgumentTypeError):
            size(text)


def test_the_help_has_groups() -> None:
    text = _parser().format_help()
    titles = re.findall(r"^(\S.*):$", text, re.M)
    assert len(titles) >= 6
    assert "usage: " in text.splitlines()[0]
    assert len(text.splitlines()[0]) < 80
