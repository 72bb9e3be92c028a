"""One target under atheris, in a process of its own: `python -m tests.fuzz.coverage NAME …`.

What follows the name goes to libFuzzer: `-max_total_time=60`, or a file with an input to repeat.
"""

from __future__ import annotations

import sys


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["pion_server", "pion_vllm_mlx"]):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[sys.argv.pop(1)]
    atheris.Setup(sys.argv, target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
