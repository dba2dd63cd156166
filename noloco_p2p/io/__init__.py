"""The real world: one file per port. Nothing here knows torch, and nothing here is known to the simulator."""

import os

# gRPC's fork handlers slow every call down, and nothing here forks. It is read when grpc is first imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
