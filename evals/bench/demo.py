"""What `make demo` prints: one prefix, three processes, a killed server.

Expected: exit status 0, the tokens of all three processes identical.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pion_vllm_mlx.blas import child_environment

_WIDTH = 100


def run(prefix_tokens: int = 1024) -> Mapping[str, Any]:
    """The demo's output as it was printed."""
    command = [sys.executable, "-m", "pion_vllm_mlx.cli", "demo"]
    done = subprocess.run(
        [*command, "--prefix-tokens", str(prefix_tokens)],
        env=child_environment() | {"COLUMNS": str(_WIDTH)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, end="")
    if done.returncode:
        raise RuntimeError(f"the demo failed: {done.stderr.strip()[-500:]}")
    printed = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    return {"prefix_tokens": prefix_tokens, "printed": printed}
