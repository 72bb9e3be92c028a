"""The command ``pion-vllm-mlx``. A subcommand is one module, named in `SUBCOMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import FrameType
from typing import Protocol, cast

#: Name to module. Their imports must be cheap: all are loaded to print the help.
SUBCOMMANDS: Mapping[str, str] = {
    "demo": "pion_vllm_mlx.demo",
    "drop": "pion_vllm_mlx.operations.drop",
    "export": "pion_vllm_mlx.cli_export",
    "import": "pion_vllm_mlx.cli_import",
    "inspect": "pion_vllm_mlx.operations.inspect",
    "ls": "pion_vllm_mlx.operations.ls",
    "pin": "pion_vllm_mlx.operations.pin",
    "save": "pion_vllm_mlx.operations.save",
    "serve": "pion_vllm_mlx.serve.command",
    "stats": "pion_vllm_mlx.operations.stats",
    "warm": "pion_vllm_mlx.operations.warm",
}

_EXIT_STATUS = "exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted"


class Subcommand(Protocol):
    """What a subcommand's module offers; its docstring's first line is the help text.

    A failure the user can act on is `raise SystemExit("one line that says what to do")`.
    """

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the subcommand's own arguments."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it and return the exit status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the command line) and run one subcommand; returns the exit status."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.subcommand is None:
        parser.print_help(sys.stderr)
        return 2
    # A terminated command cleans up as an interrupted one does: children, temporary folders.
    previous = signal.signal(signal.SIGTERM, _exit_on_signal)
    logger = logging.getLogger("pion_vllm_mlx")
    level = logger.level
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader left (`… | head`). Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)
        logger.setLevel(level)
    return status


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx",
        description="Memory for LLMs: a prompt prefix computed once is served to every process.",
        epilog=_EXIT_STATUS,
    )
    version = f"%(prog)s {metadata.version('pion-vllm-mlx')}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(subcommand=None)
    group = parser.add_subparsers(title="commands", dest="subcommand", metavar="COMMAND")
    for name, module_name in SUBCOMMANDS.items():
        module = cast(Subcommand, importlib.import_module(module_name))
        text = (module.__doc__ or "").strip()
        command = group.add_parser(
            name,
            help=text.partition("\n")[0].rstrip("."),
            description=text,
            epilog=_EXIT_STATUS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
