"""``python -m pion_vllm_mlx.tied_server``: a pion-server that ends with whoever holds its stdin.

A parent that is killed closes the pipe all the same, so no server is left behind on its directory.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def end_with_parent() -> None:
    """Terminate this process in order once stdin has come to its end."""
    with open(os.dup(sys.stdin.fileno()), "rb") as parent:
        while parent.read(4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.argv[0] = "pion-server"
    runpy.run_module("pion_server", run_name="__main__", alter_sys=True)
