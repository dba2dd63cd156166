"""`noloco`, whose nodes are forked with their imports in memory, as it is itself (see warm_start).

Run it as a script, in a forked process, with the arguments of `noloco`.
"""

from unittest.mock import patch

from warm_start import ForkOfThisProcess

from noloco_p2p.cli.main import main
from noloco_p2p.launch import swarm

if __name__ == "__main__":
    made = ForkOfThisProcess()
    with patch.object(swarm, "ForkServerProcess", lambda: made):
        main()
