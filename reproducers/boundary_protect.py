"""K in fp16 and V in fp8 but for the outer layers: as quick as fp16, and no less accurate.

Expected (design document, Llama-3.2-1B-Instruct-4bit, Apple Silicon, 3 prompts x 5 queries):
uniform fp16 2.75x and first token 14/15; vquant=fp8, boundary_protect=2 2.88x and 15/15.
Hardware: a Mac with Apple Silicon for these figures; the small model on a CPU anywhere.

    python reproducers/boundary_protect.py [--model mlx-community/Llama-3.2-1B-Instruct-4bit]
"""

import os

if __name__ == "__main__":
    from pion_vllm_mlx.blas import preload_blas

    preload_blas()

from evals.report import render_findings
from evals.tables.workload import Workload, measure
from tests.design_script import make_parser, port_of, setting_of


def main() -> None:
    options = make_parser(__doc__).parse_args()
    setting, port = setting_of(options), port_of(options)
    failures = 0
    for vquant, protect in (("fp16", 0), ("fp8", 2)):
        load = Workload(
            prompts=3,
            queries=5,
            compared=5,
            vquant=vquant,
            boundary_protect=protect,
            repeats=2,
        )
        found = measure(setting, load, port)
        print(f"\n# vquant={vquant}, boundary_protect={protect}\n")
        print(render_findings(found.as_document()), flush=True)
        failures += bool(found.failures())
    # MLX's CPU build may abort while the interpreter exits.
    os._exit(failures)


if __name__ == "__main__":
    main()
