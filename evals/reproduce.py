"""What reproducers share: one eval or benchmark, on the design's model where it can run.

On Apple Silicon the model of the claim is the default (mlx-lm downloads it), elsewhere the small
model; `--model` names any other.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn


def reproduce(name: str, doc: str | None, design_model: str | None = None) -> NoReturn:
    """Run the eval `name` and print what it found beside the design's figures."""
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()
    options = _parse(doc)
    on_a_mac = sys.platform == "darwin" and os.uname().machine == "arm64"
    model = options.model or (design_model if on_a_mac else None)
    from evals.__main__ import main
    from evals.provenance import RESULTS
    from evals.report import newest_results, render_report

    arguments = [name, "--fraction", str(options.fraction), "--out", str(RESULTS)]
    status = main([*arguments, "--model", model] if model else arguments)
    print(
        render_report(one for one in newest_results(RESULTS) if one["name"] == f"eval-{name}"),
        flush=True,
    )
    # MLX's CPU build may abort while the interpreter exits.
    os._exit(status)


def reproduce_bench(name: str) -> NoReturn:
    """Run the benchmark `name`, which prints its own table; it takes no flags but `--help`."""
    _parser(sys.modules["__main__"].__doc__).parse_args()
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()
    from evals.bench.__main__ import main

    status = main([name])
    sys.stdout.flush()
    os._exit(status)


def _parse(doc: str | None) -> argparse.Namespace:
    parser = _parser(doc)
    parser.add_argument("--model", help="for mlx_lm.load")
    parser.add_argument("--fraction", type=float, default=1.0, help="part of the full run")
    return parser.parse_args()


def _parser(doc: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
