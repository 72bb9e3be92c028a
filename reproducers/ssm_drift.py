"""Recurrent state through the server: 2,048 tokens decoded on, every logit the same.

Expected (design document): Mamba-130M 2,048 tokens, Mamba-370M 1,024, RWKV-7 168M 512: agreement
100%, largest difference 0.000e+00.
Hardware: any. Random models of those families stand for the published weights: bits do not depend
on what weights mean.

    python reproducers/ssm_drift.py [--tokens 2048]
"""

import sys

from tests.test_ssm_prefix_roundtrip import main

if __name__ == "__main__":
    if "--tokens" not in sys.argv:
        sys.argv += ["--tokens", "2048"]
    sys.exit(main())
