"""Entry points of the installed commands. They import nothing before an interrupt can end the command quietly."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _quiet() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)


def noloco() -> None:
    """The command `noloco`."""
    with _quiet():
        from noloco_p2p.cli.main import main
    main()


def noloco_node() -> None:
    """The command `noloco-node`."""
    with _quiet():
        from noloco_p2p.cli.node import main
    main()
