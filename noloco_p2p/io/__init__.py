"""The real implementations of the ports, one folder for each; and `security`, the certificates. Nothing here imports
torch, and the simulator imports nothing from here."""

import os

# grpc reads both variables when it is first imported. Its fork handlers slow down every call, and nothing here forks.
# What it would log (a connection closed by a peer, a port in use) is either routine or reported by us.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
