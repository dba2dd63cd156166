"""Requests that no simulation should get; in a module of their own, because worker processes import it."""

import os
import sys
from dataclasses import dataclass

from noloco_p2p.sim.scenario import Scenario


@dataclass(frozen=True)
class Unsteady:
    """Its seed hangs on how this process hashes text; it also looks that workers do not load torch."""

    scenario: Scenario
    replay: str = "again"

    @property
    def seed(self) -> int:
        """Differs between processes."""
        assert "torch" not in sys.modules
        return hash("seed") % 1000


@dataclass(frozen=True)
class Deadly:
    """It ends the process that looks for its seed."""

    scenario: Scenario

    @property
    def seed(self) -> int:
        """Never comes back."""
        os._exit(9)
