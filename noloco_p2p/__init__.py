"""noloco_p2p: train a language model together with strangers (NoLoCo, arXiv 2506.10911).

Start reading in `node/loop.py`; `ports.py` defines what a node needs from the outside world.
"""

__version__ = "0.1.0"
