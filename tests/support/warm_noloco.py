"""`noloco` whose nodes are forked with their imports in memory, as it is itself (see warm_start).

Run it as a script, in a forked process, with the arguments of `noloco`.
"""

from unittest.mock import patch

import warm_start

from noloco_p2p.cli.main import main
from noloco_p2p.launch import node_process

if __name__ == "__main__":
    with patch.object(node_process, "subprocess", warm_start.in_place_of_subprocess(warm_start.forked_interpreter())):
        main()
