"""What dispatch checks for every dotted command before it has any effect (WIRE.md 0, 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pion_server.commands.dispatch import load_commands
from pion_server.commands.registry import COMMANDS, NAMESPACE_LIMIT, SID_LIMIT, Command
from tests.pion_server.commands.checks import Word, refuse

if TYPE_CHECKING:
    from tests.conftest import RawClient

load_commands()
DOTTED = sorted((c for c in COMMANDS.values() if c.dotted), key=lambda c: c.name)


@pytest.mark.parametrize("command", DOTTED, ids=lambda c: c.name)
def test_another_number_of_arguments_is_refused_with_what_it_requires(
    client: RawClient, command: Command
) -> None:
    counts = [command.min_args - 1] if command.min_args else []
    counts += [command.max_args + 1] if command.max_args is not None else []
    # Anything but RESET behind PION.STATS is tolerated.
    assert counts or command.name == "PION.STATS"
    for count in counts:
        said = refuse(client, command.name.lower(), *["1"] * count, text="requires: ")
        assert said.startswith(f"ERR {command.name} requires: ")


@pytest.mark.parametrize("command", DOTTED, ids=lambda c: c.name)
def test_names_that_are_empty_or_too_long_are_refused(client: RawClient, command: Command) -> None:
    given = ["1"] * max(command.min_args, 1)
    for positions, limit, kind in (
        (command.names, NAMESPACE_LIMIT, "a namespace must have"),
        (command.sids, SID_LIMIT, "a sid must have"),
    ):
        if positions is None:
            continue
        if callable(positions):
            given = ["1"] * (command.max_args or command.min_args)
            chosen = [*positions(given)]  # type: ignore[arg-type]
        else:
            chosen = [0] if positions == "first" else [0, 2]
            given += ["1"] * (len(given) <= chosen[-1]) * 2
        for position in chosen:
            for name in (b"", b"n" * (limit + 1), b"\0" * 70_000):
                words: list[Word] = [*given[:position], name, *given[position + 1 :]]
                refuse(client, command.name, *words, text=kind)


def test_every_command_that_takes_a_prefix_or_session_says_which_argument_it_is() -> None:
    families = {"PION.STATS", "KV.PREFIX.INFO", "KV.PREFIX.LIST"}
    whole = {"KV.PREFIX.SAVE", "KV.PREFIX.COMMIT", "ATTEND.QUERYBATCH"}
    assert {c.name for c in DOTTED if c.names is None and c.sids is None} == families | whole
