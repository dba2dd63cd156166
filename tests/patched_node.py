"""`noloco-node` with an RMSNorm that stays in float64, for the proof that compares real processes with the reference.

Run it as a script with the arguments of `noloco-node`. It changes the class before the node builds its model.
"""

import sys

from noloco_p2p.cli.node import main
from reference import float64_rmsnorm

if __name__ == "__main__":
    with float64_rmsnorm():
        sys.exit(main())
