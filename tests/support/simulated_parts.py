"""The parts of a simulated node that only tests look into or damage."""

from noloco_p2p.sim.checkpoints import Disk
from noloco_p2p.sim.linear_stage import LinearStage
from noloco_p2p.sim.process import SimProcess


def linear_stage(process: SimProcess) -> LinearStage:
    """The newest synchronous stage of a process, which the default factory made."""
    assert isinstance(process.model, LinearStage), f"{process.peer} has a {type(process.model).__name__}"
    return process.model


def rounds(process: SimProcess) -> list[int]:
    """The numbers of the outer rounds of a process, in order."""
    return [int(event.number("round")) for event in process.trace.of("outer_round")]


def tear(disk: Disk) -> None:
    """Make the newest checkpoint torn. Does nothing to an empty disk."""
    for newest in disk._entries[-1:]:
        newest.torn = True
