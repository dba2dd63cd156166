"""Entry points of the installed commands. They import nothing before an interrupt can end the command quietly."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SPINS = "3000"
"""How often a thread of OpenMP looks whether the others are ready before it sleeps. With the default of gcc's OpenMP,
300,000, threads take each other's core as soon as another program needs one. Tokens/s of a node with two threads on two
cores: beside a busy loop 85 by default and 1,993 with SPINS, alone 9,201 and 9,680."""


@contextmanager
def _started() -> Iterator[None]:
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when torch is imported, here or in a node of this process
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def noloco() -> None:
    """The command `noloco`."""
    with _started():
        from noloco_p2p.cli.main import main
    main()


def noloco_node() -> None:
    """The command `noloco-node`."""
    with _started():
        from noloco_p2p.cli.node import main
    main()
