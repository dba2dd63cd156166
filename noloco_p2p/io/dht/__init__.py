"""The distributed hash table and its libp2p daemon, both hivemind's.

Importing the package hivemind as such would import its averager, experts and optimizers, and scipy with them, none of
which anybody here uses: half a second of a core and 40 MiB. Its folder takes its place, from which its parts come.
"""

import importlib.util
import sys

if "hivemind" not in sys.modules and (_found := importlib.util.find_spec("hivemind")) is not None:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_found)
