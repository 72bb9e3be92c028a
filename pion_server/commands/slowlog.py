"""SLOWLOG: the last commands that took longer than `--slowlog-ms`."""

from __future__ import annotations

from pion_server.commands.arguments import word
from pion_server.commands.registry import Access, Args, Context, command
from pion_server.errors import BadArgument, printable

_DEFAULT_COUNT = 10
_HELP = [
    "SLOWLOG <subcommand>. Subcommands are:",
    "GET [count]: the last slow commands, newest first; 10 of them, -1: all",
    "LEN: how many are kept; RESET: forget them",
    "An entry: number, Unix time, microseconds, command and arguments, address, client name.",
    "The time is from a request's turn to its reply: waiting for other writers is in it.",
]


@command("SLOWLOG", access=Access.TENANT, min_args=1, max_args=2)
def slowlog(ctx: Context, args: Args) -> object:
    """SLOWLOG GET [count] | LEN | RESET | HELP

    A tenant sees its own commands only, and so does the admin.
    """
    log = ctx.state.slowlog
    match word(args[0]), args[1:]:
        case "GET", rest:
            count = _read_count(bytes(rest[0][:16])) if rest else _DEFAULT_COUNT
            newest = list(log.entries)[::-1]
            return [
                [
                    entry.number,
                    entry.ended_at,
                    entry.microseconds,
                    [text.encode() for text in entry.words],
                    entry.address.encode(),
                    entry.client.encode(),
                ]
                for entry in (newest if count < 0 else newest[:count])
            ]
        case "LEN", []:
            return len(log.entries)
        case "RESET", []:
            log.entries.clear()
            return "OK"
        case "HELP", []:
            return [line.encode() for line in _HELP]
    raise BadArgument(
        f"unknown subcommand or wrong number of arguments for '{printable(args[0])}'. "
        "Try SLOWLOG HELP."
    )


def _read_count(text: bytes) -> int:
    if text == b"-1":
        return -1
    if not text.isdigit():
        raise BadArgument("count should be greater than or equal to -1")
    return int(text)
