"""The real world: one file per port. Nothing here knows torch, and nothing here is known to the simulator."""

import os

# Both are read when grpc is first imported. Its fork handlers slow every call down, and nothing here forks; it reports
# every connection that a peer closes, which here is everyday.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
