"""Estimates what other settings would achieve with the same devices and lines, from the nodes' measurements. Pure.

The time of an inner step is estimated as the time of one microbatch through all stages and back with nothing else in
flight, plus the time that the busiest device or line takes for the remaining microbatches,

    T = L + max over stages and servers (n − 1)·t       n microbatches per replica of a stage, t seconds for each

where the servers of a stage are its median device and line. If nodes are alike, the estimate is within 15 % of
`sim/throughput_bound` (the tests compare them). Predictions are scaled by the share of it that the swarm reaches now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from noloco_p2p.core.block_format import BLOCK_FORMATS, wire_spec
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.core.status import MicrobatchSize, Status
from noloco_p2p.observe.diagnosis.findings import Cause, at_node
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView, median

IN_USE = 0.5
"""No advice is given if devices are busy for at least this share of the time."""
REACHED = 0.5
"""No advice is given if the swarm reaches less than this share of the estimate: something else holds it up."""
FULL = 0.6
"""A line that is needed for this share of an inner step is full; the rest is the trip of the first microbatch."""
WORTH = 1.3
"""Advice is given if it promises at least this many times the present use of the devices."""
NEARLY = 0.9
"""The smallest change that reaches this share of the best option is the one advised."""
TIMES = (1, 2, 4, 8)
"""Multiples of the present microbatches per step that are considered."""
MAX_PER_STEP = 64
"""Upper limit on the microbatches per step considered: more tokens per step mean less progress per token."""
FEWER_BITS = {"float64": "int8", "float32": "int8", "bfloat16": "int8", "int8": "int4"}
WHOLE_BLOCKS = 64
"""Values that are a whole number of blocks in every codec."""
MIN_INNER_STEPS = 5
"""Nodes with fewer inner steps are ignored: the first steps wait for all nodes to start, and would weigh too much."""


@dataclass(frozen=True, slots=True)
class StageMedian:
    """The medians of what the replicas of a stage have measured."""

    replicas: int
    device_s: float
    """Device seconds of one microbatch."""
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    """Round trip to the next stage."""
    in_use: float
    """Share of the time for which its device works."""

    def line_s(self, size: MicrobatchSize, *, first: bool, last: bool) -> float:
        """Seconds that a microbatch takes in the busier direction of the line; the end stages transfer less."""
        sent = (0 if last else size.activation_bytes) + (0 if first else size.gradient_bytes)
        received = (0 if first else size.activation_bytes) + (0 if last else size.gradient_bytes)
        return max(sent / self.up_bytes_per_s, received / self.down_bytes_per_s)


class StepEstimate(NamedTuple):
    """The estimated duration of an inner step, and the use of devices and lines in it."""

    seconds: float
    in_use: float
    """Share of it for which the devices of the busiest stage work."""
    line_in_use: float
    """Share of it for which the busiest line is needed."""


def estimated_step(stages: Sequence[StageMedian], size: MicrobatchSize) -> StepEstimate:
    """The module's formula, for two stages or more and with all values measured."""
    way_s = queue_s = device_s = busy_line_s = 0.0
    per_step = size.per_step * stages[0].replicas
    for index, stage in enumerate(stages):
        first, last = index == 0, index == len(stages) - 1
        line_s, each = stage.line_s(size, first=first, last=last), -(-per_step // stage.replicas)
        queue_s = max(queue_s, (each - 1) * max(stage.device_s, line_s))
        device_s, busy_line_s = max(device_s, each * stage.device_s), max(busy_line_s, each * line_s)
        way_s += stage.device_s
        if not last:
            below = stages[index + 1]
            there = size.activation_bytes / min(stage.up_bytes_per_s, below.down_bytes_per_s)
            back = size.gradient_bytes / min(below.up_bytes_per_s, stage.down_bytes_per_s)
            way_s += there + back + stage.round_trip_s
    seconds = way_s + queue_s
    return StepEstimate(seconds, device_s / seconds, busy_line_s / seconds)


def line_advice(swarm: SwarmView) -> Iterator[Cause]:
    """Whether devices wait for lines, and which settings of a run would use them better."""
    size = next((s.microbatch for s in swarm.statuses.values() if s.microbatch is not None), None)
    stages = _medians(swarm)
    if size is None or len(stages) < 2 or not _sensible(size):
        return
    now, in_use = estimated_step(stages, size), max(stage.in_use for stage in stages)
    # Whatever strangers claim, nothing below divides by 0: values that are not finite fail here, or are left out.
    if not (0 < in_use < IN_USE and 0 < REACHED * now.in_use <= in_use):
        return
    if short := [*_short_of_places(swarm, size, stages)]:
        yield from short
        return
    reached = min(1.0, in_use / now.in_use)
    options = [option for option in _options(size) if not any(_short_of_places(swarm, option, stages))]
    found = [(use, option) for option in options if (use := estimated_step(stages, option).in_use * reached) > 0]
    best = max(use for use, _ in found)
    use, option = next((use, option) for use, option in found if use >= NEARLY * best)
    if use >= WORTH * in_use:
        # Until a step's first microbatch is there, and after its last one, the busiest device waits for the others.
        filling_s = sum(stage.device_s for stage in stages) - max(stage.device_s for stage in stages)
        few = 2 * filling_s > now.seconds * (1 - now.in_use)
        why = "the line is full" if now.line_in_use >= FULL else "steps are short" if few else "round trips are long"
        changes, settings = _changes(size, option)
        busy = f"devices are busy {100 * in_use:.0f} % of the time"
        sentence = f"{why}: {busy}; {changes} would raise that to about {100 * use:.0f} %"
        yield at_node("ok", "throughput", None, sentence, f"in the configuration of the next run: {settings}")


def _short_of_places(swarm: SwarmView, size: MicrobatchSize, stages: Sequence[StageMedian]) -> Iterator[Cause]:
    """The nodes, not of the last stage, that lack places for a step's microbatches: more per step would not help."""
    for peer, status in swarm.statuses.items():
        if status.places is not None and status.advert.stage in range(len(stages) - 1):
            each = -(-size.per_step * stages[0].replicas // stages[status.advert.stage].replicas)
            if status.places < each:
                sentence = f"{swarm.name(peer)} has room for {status.places} of the {each} microbatches of a step"
                advice = "set compute.recompute there, or raise limits.max_in_flight if that is set"
                yield at_node("ok", "places", peer, sentence, advice)


def _medians(swarm: SwarmView) -> list[StageMedian]:
    """The medians of all stages; empty if a value that the estimate needs is unknown for any of them."""
    found = []
    for index in range(swarm.stages):
        at_work = [s for s in swarm.statuses.values() if s.advert.stage == index and s.advert.state == "training"]
        device_s, up, down, in_use = (_known([figure(status) for status in at_work]) for figure in _FIGURES)
        if device_s is None or up is None or down is None or in_use is None:
            return []
        trips = _known([status.figures.round_trip_s for status in at_work])
        found.append(StageMedian(len(at_work), device_s, up, down, trips or 0.0, in_use))
    return found


def _known(values: Sequence[float | None]) -> float | None:
    return median([value for value in values if value is not None and 0 < value < inf])


def _in_use(status: Status) -> float | None:
    idle_s, device_s = sum(status.figures.idle_s.values()), status.figures.device_s
    sensible = device_s > 0 <= idle_s and status.inner_steps >= MIN_INNER_STEPS
    return device_s / (device_s + idle_s) if sensible else None


_FIGURES = (
    lambda status: 1 / status.advert.microbatches_per_s if status.advert.microbatches_per_s > 0 else None,
    lambda status: status.figures.upload_bytes_per_s,
    lambda status: status.figures.download_bytes_per_s,
    _in_use,
)


def _sensible(size: MicrobatchSize) -> bool:
    """Whether sizes and codecs, which are a stranger's claim, can be calculated with."""
    known = {size.forward, size.backward} <= {*ITEM_BYTES, *BLOCK_FORMATS}
    return known and min(size.per_step, size.activation_bytes, size.gradient_bytes) > 0


def _options(size: MicrobatchSize) -> Iterator[MicrobatchSize]:
    """The present settings and alternatives to them, the smallest changes first."""
    for times in TIMES:
        per_step = size.per_step * times
        if times > 1 and per_step > MAX_PER_STEP:
            return
        yield replace(size, per_step=per_step)
        forward, backward = (FEWER_BITS.get(codec, codec) for codec in (size.forward, size.backward))
        yield MicrobatchSize(
            per_step,
            round(size.activation_bytes * _value_bytes(forward) / _value_bytes(size.forward)),
            round(size.gradient_bytes * _value_bytes(backward) / _value_bytes(size.backward)),
            forward,
            backward,
        )


def _value_bytes(codec: str) -> float:
    """Bytes per value, including its share of a block's scale."""
    return wire_spec("grad", codec, (1, 1, WHOLE_BLOCKS)).nbytes / WHOLE_BLOCKS


def _changes(old: MicrobatchSize, new: MicrobatchSize) -> tuple[str, str]:
    """The differences in words and as settings."""
    words, settings = [], []
    if (old.forward, old.backward) != (new.forward, new.backward):
        words.append(new.forward if new.forward == new.backward else f"{new.forward} forward, {new.backward} backward")
        settings += [f"wire.forward: {new.forward}", f"wire.backward: {new.backward}"]
    if new.per_step != old.per_step:
        words.append(f"{new.per_step} microbatches per step")
        settings.append(f"microbatches_per_step: {new.per_step}")
    return " and ".join(words), ", ".join(settings)
