"""What became of a simulated swarm and of each of its processes."""

from collections import Counter
from dataclasses import dataclass

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.stage import SyncStage
from noloco_p2p.sim.telemetry import Trace
from noloco_p2p.sim.toy_stage import ModelStage


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What became of one process."""

    peer: PeerId
    stage: int
    state: str
    step: float
    inner_steps: int
    crashed: bool
    error: BaseException | None
    ended_at_s: float | None
    models: tuple[SyncStage, ...]
    """The synchronous stages that it has had, in order: none when it never made its weights, several when it moved."""
    trace: Trace
    """What this process told."""

    @property
    def rounds(self) -> list[tuple[int, str]]:
        """(number, result) of its outer rounds, in order."""
        return [(int(str(h.get("round"))), str(h.get("result"))) for h in self.trace.of("outer_round")]

    @property
    def microbatches(self) -> Counter[str]:
        """How many there were, by result: `done`, `dropped`, `repeat`, …"""
        return self.trace.totals("microbatch", "result")

    @property
    def model(self) -> SyncStage | None:
        """The last of its stages; None when it never made its weights."""
        return self.models[-1] if self.models else None

    @property
    def model_stage(self) -> ModelStage:
        """The last of its stages, of the default factory. Raises TypeError for another one."""
        if not isinstance(self.model, ModelStage):
            raise TypeError(f"{self.peer} has a {type(self.model).__name__}")
        return self.model


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the swarm. `lives` has every process in the order of their starts, restarts included."""

    lives: tuple[NodeOutcome, ...]
    trace: Trace
    bugs: tuple[Exception, ...]
    """What handlers raised that they may not raise."""
    ended_at_s: float

    @property
    def nodes(self) -> dict[PeerId, NodeOutcome]:
        """The last life of each peer."""
        return {life.peer: life for life in self.lives}

    def of_stage(self, stage: int) -> list[NodeOutcome]:
        """The last lives of the peers that held a stage, sorted by peer id."""
        return sorted((one for one in self.nodes.values() if one.stage == stage), key=lambda one: one.peer)
