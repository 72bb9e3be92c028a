"""docs/wire.md names every command of the registry; run as a program, this brings it up to date."""

from __future__ import annotations

from pathlib import Path

from pion_server.commands.dispatch import load_commands
from pion_server.commands.registry import COMMANDS, Command

DOCS = Path(__file__).parents[3] / "docs" / "wire.md"
BEGIN, END = "<!-- commands -->\n", "<!-- /commands -->\n"
FAMILIES = {
    "Prefixes": ("KV.PREFIX.",),
    "Sessions": ("V.",),
    "Recurrent state": ("SSM.PREFIX.",),
    "Attention": ("ATTEND.",),
    "Keyspace": (),
    "Server and connection": ("",),
}


def family(command: Command) -> str:
    if ".keyspace_" in command.handler.__module__:
        return "Keyspace"
    return next(f for f, starts in FAMILIES.items() if command.name.startswith(starts))


def row(command: Command) -> str:
    _, _, rest = (command.handler.__doc__ or "").strip().partition("\n")
    text = " ".join(rest.split())
    return "| `{}` | {} |\n".format(*(cell.replace("|", "\\|") for cell in (command.syntax, text)))


def table() -> str:
    """Every command as Markdown, one table a family."""
    load_commands()
    parts = []
    for title in FAMILIES:
        rows = sorted(row(command) for command in COMMANDS.values() if family(command) == title)
        parts.append(f"\n### {title}\n\n| command | |\n|---|---|\n{''.join(rows)}")
    return "".join(parts) + "\n"


def test_the_documentation_lists_every_command_with_its_syntax() -> None:
    text = DOCS.read_text()
    load_commands()
    missing = [c.name for c in COMMANDS.values() if row(c).split("` | ")[0] not in text]
    assert missing == [], f"run: python {Path(__file__).relative_to(DOCS.parents[1])}"


def test_every_dotted_command_says_what_it_does() -> None:
    load_commands()
    silent = [c.name for c in COMMANDS.values() if c.dotted and row(c).endswith("|  |\n")]
    assert silent == []


if __name__ == "__main__":
    document = DOCS.read_text()
    head, tail = document[: document.index(BEGIN) + len(BEGIN)], document[document.index(END) :]
    DOCS.write_text(head + table() + tail)
