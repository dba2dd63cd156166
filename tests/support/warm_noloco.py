"""`noloco`, whose nodes are forked with their imports in memory, as it is itself (see warm_start).

Run it as a script, in a forked process, with the arguments of `noloco`. After `--paced` the nodes pause after each
inner step (see paced_node).
"""

import sys
from unittest.mock import patch

from paced_node import pace
from warm_start import ForkOfThisProcess

from noloco_p2p.cli.main import main
from noloco_p2p.launch import swarm

if __name__ == "__main__":
    if "--paced" in sys.argv:
        sys.argv.remove("--paced")
        pace()
    made = ForkOfThisProcess()
    with patch.object(swarm, "ForkServerProcess", lambda: made):
        main()
