"""noloco_p2p: train a language model together with strangers (NoLoCo, arXiv 2506.10911).

Start reading at `node.py`; `ports.py` says what a node needs of the world.
"""

__version__ = "0.1.0"
