"""What a process of a simulated swarm told, cut by the stage that it held."""

from collections.abc import Iterator
from typing import NamedTuple

from noloco_p2p.sim.outcome import NodeOutcome
from noloco_p2p.sim.telemetry import Happening


class Part(NamedTuple):
    """What one process told while it held one stage, in order."""

    stage: int
    told: list[Happening]
    ends_s: float


def parts(life: NodeOutcome, ended_at_s: float) -> Iterator[Part]:
    """The events of a process, cut where it moved to another stage. One that has not ended has until `ended_at_s`."""
    stages = [model.state.index for model in life.models] or [life.stage]
    told: list[Happening] = []
    held = 0
    before = ""
    for one in life.trace.happenings:
        if one.kind == "state":
            state = str(one.get("state"))
            if (before, state) == ("draining", "syncing"):
                yield Part(stages[min(held, len(stages) - 1)], told, one.at_s)
                told, held = [], held + 1
            before = state
        told.append(one)
    yield Part(stages[min(held, len(stages) - 1)], told, ended_at_s if life.ended_at_s is None else life.ended_at_s)


def training(part: Part) -> list[tuple[float, float]]:
    """From when to when it trained, virtual seconds."""
    states = [one for one in part.told if one.kind == "state"]
    ends = [*(one.at_s for one in states), part.ends_s][1:]
    return [(one.at_s, end) for one, end in zip(states, ends, strict=True) if one.get("state") == "training"]
