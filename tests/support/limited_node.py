"""`noloco-node` whose files cannot grow beyond a limit in bytes, which to a program looks like a full disk.

Run it as a script with the limit, then the arguments of `noloco-node`. Its output is not limited.
"""

import os
import resource
import subprocess
import sys

from noloco_p2p.cli.node import main

if __name__ == "__main__":
    limit = int(sys.argv.pop(1))
    for output in (1, 2):
        cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=output)
        assert cat.stdin is not None
        os.dup2(cat.stdin.fileno(), output)
    sys.stdout, sys.stderr = (open(output, "w", buffering=1, closefd=False) for output in (1, 2))  # noqa: SIM115
    sys.dont_write_bytecode = True  # a file of it would be cut off, and Python would not import it again
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main()
