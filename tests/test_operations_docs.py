"""What docs/operations.md and docs/gateway.md tell people to copy, or not to try, is true."""

from __future__ import annotations

import configparser
import plistlib
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pion_server.config import parse

DOCS = Path(__file__).parents[1] / "docs"


def block(kind: str, within: str) -> str:
    """The first code block of a kind that has these words."""
    blocks: list[str] = re.findall(
        rf"```{kind}\n(.*?)```", (DOCS / "operations.md").read_text(), re.DOTALL
    )
    return next(text for text in blocks if within in text)


def test_the_systemd_unit_starts_a_server_that_takes_its_flags() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(block("ini", "[Unit]"))
    service = unit["Service"]
    program, *flags = shlex.split(service["ExecStart"])
    assert program.endswith("/pion-server")
    name, _, word = service["Environment"].partition("=")
    config = parse(flags, {name: word})
    assert config.password == word
    assert str(config.directory) == f"/var/lib/{service['StateDirectory']}"
    assert service["ProtectSystem"] == "strict"  # only the state directory may be written to


def test_the_launchd_job_starts_a_server_that_takes_its_flags() -> None:
    text = block("xml", "<plist")
    job = plistlib.loads(text[text.index("<?xml") :].encode())
    program, *flags = job["ProgramArguments"]
    assert program.endswith("/pion-server")
    assert parse(flags, {}).directory == Path("/Users/me/Library/Application Support/Pion")
    assert job["KeepAlive"] == {"SuccessfulExit": False}  # a server told to stop stays so


def test_what_the_gateways_document_leaves_out_is_unknown(server: Callable[..., Any]) -> None:
    text = (DOCS / "gateway.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(table) >= 4
    client = server("--no-attention").client()
    for name in re.findall(r"`([A-Z.]+[A-Z*])`", " ".join(line.split("|")[1] for line in table)):
        asked = name.replace("*", "GET")
        assert client.error(asked, "x") == f"ERR unknown command '{asked}'"
    stats = client.call("PION.STATS")
    figures = dict(zip(stats[::2], stats[1::2], strict=True))
    for name in re.findall(r"`([a-z_]+_(?:hits|misses|queries))`", text):
        assert figures[name.encode()] == 0
