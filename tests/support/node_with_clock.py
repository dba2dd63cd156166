"""A paced `noloco-node` whose wall clock is ahead by the number of seconds in a file, for tests of wrong clocks.

Run it as a script with the file, then the arguments of `noloco-node`. An empty or missing file means a correct clock.
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
        """Seconds since 1970, shifted."""
        try:
            return right_time() + float(ahead.read_text())
        except (OSError, ValueError):
            return right_time()

    time.time = wrong_time
    pace()
    main()
