"""`noloco-node` in a network namespace: a script with its name (`ip netns`) and the arguments of `noloco-node`.

It pauses after each inner step; otherwise the first nodes to see all others might end a short run before the last node
has seen them.
"""

import ctypes
import os
import sys

from paced_node import pace

from noloco_p2p.cli.node import main

CLONE_NEWNET = 0x40000000

if __name__ == "__main__":
    namespace = os.open(f"/run/netns/{sys.argv.pop(1)}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)
    pace()
    main()
