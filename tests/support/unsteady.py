"""Requests that a simulation should never get. They have their own module because worker processes import it."""

import os
import sys
from dataclasses import dataclass

from noloco_p2p.sim.scenario import Scenario


@dataclass(frozen=True)
class Unsteady:
    """A request whose seed depends on how its process hashes text. It also checks that workers do not load torch."""

    scenario: Scenario
    replay: str = "again"

    @property
    def seed(self) -> int:
        """Differs between processes."""
        assert "torch" not in sys.modules
        return hash("seed") % 1000


@dataclass(frozen=True)
class Deadly:
    """A request that ends the process that reads its seed."""

    scenario: Scenario

    @property
    def seed(self) -> int:
        """Never returns."""
        os._exit(9)
