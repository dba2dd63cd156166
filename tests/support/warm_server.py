"""The fork server of `warm_start`, which also imports what most of the tests' processes import later."""

import importlib

from noloco_p2p.launch import fork_server

MODULES = ("transformers.models.llama.modeling_llama", "noloco_p2p.launch.swarm")

if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    fork_server.main()
