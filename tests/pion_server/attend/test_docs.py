"""What docs/attention.md says can be typed, and that it names what there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pion_server.attend import reference
from pion_server.attend.requests import DIMS
from pion_server.commands.dispatch import load_commands
from pion_server.commands.registry import COMMANDS
from pion_server.flags import FLAGS

if TYPE_CHECKING:
    from tests.conftest import ServerProcess

PAGE = (Path(__file__).parents[3] / "docs" / "attention.md").read_text(encoding="utf-8")


def test_the_example_runs(server: Callable[..., ServerProcess]) -> None:
    pytest.importorskip("mlx.core")
    code, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code.replace("port=1974", f"port={server().port}"), names)
    wanted, _ = reference.query(names["q"], names["k"], names["v"])
    np.testing.assert_allclose(names["out"], wanted, atol=1e-6)


def test_every_command_flag_and_dimension_is_named() -> None:
    load_commands()
    words = set(re.findall(r"[A-Za-z0-9_.-]+", PAGE))
    commands = [name.decode() for name in COMMANDS if name.startswith(b"ATTEND.")]
    assert len(commands) == 11
    assert [c for c in commands if c not in words and c.rpartition(".")[2] not in words] == []
    flags = [f.names for f in FLAGS if f.group.startswith("Attention engine")]
    assert len(flags) == 9
    assert [flag for flag in flags if flag not in words] == []
    assert ", ".join(map(str, DIMS)) in " ".join(PAGE.split())
