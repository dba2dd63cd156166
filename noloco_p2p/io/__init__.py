"""The real world: one file per port. Nothing here knows torch, and nothing here is known to the simulator."""

import os

# Both are read when grpc is first imported. Its fork handlers slow every call down, and nothing here forks; what
# it would report (a connection that a peer closes, a port in use) is everyday or told by us.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
