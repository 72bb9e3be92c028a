"""What the design's test scripts share: flags, and a model that may be named.

Run by pytest such a file is a test of seconds on tiny models; run as a script, with the flags the
design prints, it is the measurement itself on the small real model or on the one named.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from evals.findings import Findings
from evals.setting import Setting


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with `--model` and the flags that say which server."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", help="for mlx_lm.load (default: SmolLM2-135M in float32)")
    parser.add_argument("--port", type=int, default=1974, help="of a server (default: %(default)s)")
    parser.add_argument(
        "--start", action="store_true", help="start a server of one's own instead, and end it"
    )
    return parser


def port_of(options: argparse.Namespace) -> int | None:
    """The port to use; None to start a server. Ends the program where nothing answers there."""
    if options.start:
        return None
    from pion_vllm_mlx.transport import Command, Patience, TransportError
    from pion_vllm_mlx.transport.resp import RespConnection

    try:
        connection = RespConnection("127.0.0.1", options.port, deadline=time.monotonic() + 2)
        connection.exchange([Command.of("PING")], Patience(first_byte=2))
        connection.close()
    except TransportError as error:
        raise SystemExit(
            f"no pion-server answers on port {options.port} ({error});"
            " start one, name its --port, or give --start"
        ) from None
    return int(options.port)


def setting_of(options: argparse.Namespace) -> Setting:
    """The full run on the model that was named."""
    return Setting(options.model)


def run_script(measure: Callable[[], Findings]) -> None:
    """Measure, print what was found, and exit 0 unless a bar that decides was missed."""
    from evals.report import render_findings

    findings = measure()
    print(render_findings(findings.as_document()))
    for bar in findings.failures():
        print(f"MISSED: {bar.what}: {bar.measured}, wanted {bar.least}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # MLX's CPU build may abort while the interpreter exits.
    os._exit(1 if findings.failures() else 0)
