"""`pion-server`: read the flags, then serve."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

from pion_server import __version__
from pion_server.config import Config, parse
from pion_server.flag_values import ConfigError
from pion_server.flags import help_text
from pion_server.journal import complain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; the exit status."""
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        if config.action == "help":
            print(help_text(Config()), end="")
            return 0
        if config.action == "version":
            print(f"pion-server {__version__}")
            return 0
        # numpy starts a thread per core for a BLAS that is never called here. It reads this when
        # it is imported, so everything that needs numpy is imported below.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        # Nothing that is imported is garbage: looking for some would take a part of each start.
        gc.disable()
        from pion_server.serving import run

        gc.enable()
        return run(config)
    except ConfigError as error:
        complain("refused", str(error), level="error")
        return 1


if __name__ == "__main__":
    sys.exit(main())
