"""A paced `noloco-node` whose wall clock is ahead by what a file says, seconds: for tests of clocks that are wrong.

Run it as a script: the file, then the arguments of `noloco-node`. An empty or missing file is a right clock.
"""

import sys
import time
from pathlib import Path

from paced_node import pace

from noloco_p2p.cli.node import main

if __name__ == "__main__":
    ahead = Path(sys.argv.pop(1))
    right_time = time.time

    def wrong_time() -> float:
        """Seconds since 1970, and some more."""
        try:
            return right_time() + float(ahead.read_text())
        except (OSError, ValueError):
            return right_time()

    time.time = wrong_time
    pace()
    main()
