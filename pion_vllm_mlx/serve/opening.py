"""The pion-server behind a serve: its own, or one that runs elsewhere."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from pion_vllm_mlx.cache_home import data_home
from pion_vllm_mlx.local_server import ServerDidNotStart
from pion_vllm_mlx.serve.embedded import Embedded
from pion_vllm_mlx.serve.tier import PionTier
from pion_vllm_mlx.transport.endpoint import Endpoint

if TYPE_CHECKING:
    from rich.console import Console


def open_tier(options: argparse.Namespace, console: Console, ends: ExitStack) -> PionTier | None:
    """The pion-server of choice, started if it is our own; SystemExit where it does not start."""
    if options.no_pion:
        return None
    budget = int(options.pion_budget_gb * 1e9)
    if options.pion_host is not None:
        password = options.pion_password or os.environ.get("PION_PASSWORD")
        address = options.pion_host, options.pion_port
        endpoint = Endpoint(*address, username=options.pion_username, password=password)
        place = f"pion-server at {options.pion_host}:{options.pion_port}"
    else:
        folder = options.pion_dir or data_home() / "serve"
        try:
            endpoint = ends.enter_context(Embedded(folder)).endpoint
        except (ServerDidNotStart, OSError) as error:
            reason = f"{error} (--no-pion serves without)"
            raise SystemExit(f"pion-vllm-mlx serve: {reason}") from None
        place = f"{folder}"
    try:
        tier = PionTier(
            endpoint,
            budget_bytes=budget,
            min_gain=options.pion_min_gain,
            vquant=options.pion_vquant,
        )
    except ValueError as error:
        raise SystemExit(f"pion-vllm-mlx serve: --pion-vquant: {error}") from None
    console.print(f"conversations are kept in {place}, {budget / 1e9:g} GB at most", soft_wrap=True)
    return tier
