"""A request that no simulation should get; in a module of its own, because worker processes import it."""

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
