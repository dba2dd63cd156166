"""What other settings of a run would achieve with the same devices and lines, from the nodes' measurements. Pure.

The estimated time of an inner step is that of one microbatch through all stages and back with nothing else under way,
plus one more microbatch after each turn of the busiest device or line,

    T = L + max over stages and servers (n − 1)·t          n microbatches for each replica of a stage, t seconds of each

with the median device and line of each stage. It is within 14 % of `sim/throughput_bound` if nodes are alike (the tests
compare them), and is scaled by the share of it that the swarm reaches now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from noloco_p2p.core.block_format import BLOCK_FORMATS, SCALE_BYTES
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.core.status import MicrobatchSize, Status
from noloco_p2p.observe.diagnosis.findings import Cause, at_node
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView, median

IN_USE = 0.5
"""Devices in use for this share of the time need no advice."""
REACHED = 0.5
"""A swarm that reaches less of the estimate is held up by something else."""
FULL = 0.6
"""A line that is needed for this share of an inner step is full; the rest is the trip of the first microbatch."""
WORTH = 1.3
"""Advice is given for at least this factor on the present use."""
NEARLY = 0.9
"""Share of the best: the smallest change that gives this much is advised."""
TIMES = (1, 2, 4, 8)
MOST_PER_STEP = 64
"""Microbatches per step, in these multiples: a larger step is another batch size, and learns less from each token."""
FEWER_BITS = {"float64": "int8", "float32": "int8", "bfloat16": "int8", "int8": "int4"}
LEAST_INNER_STEPS = 5
"""Before that, the first steps, which wait for everybody's start, weigh too much."""


@dataclass(frozen=True, slots=True)
class StageMedian:
    """The median replica of a stage by its replicas' measurements."""

    replicas: int
    device_s: float
    """Device seconds of one microbatch."""
    up_bytes_per_s: float
    down_bytes_per_s: float
    round_trip_s: float
    """Round trip to the next stage."""
    in_use: float
    """Share of time in which its device works."""

    def line_s(self, size: MicrobatchSize, *, first: bool, last: bool) -> float:
        """Seconds that a microbatch takes on the busier direction of its line."""
        sent = (0 if last else size.activation_bytes) + (0 if first else size.gradient_bytes)
        received = (0 if first else size.activation_bytes) + (0 if last else size.gradient_bytes)
        return max(sent / self.up_bytes_per_s, received / self.down_bytes_per_s)


class StepEstimate(NamedTuple):
    """The estimate of an inner step."""

    seconds: float
    in_use: float
    """Share of it in which the devices of the busiest stage work."""
    line_in_use: float
    """Share of it for which the busiest line is needed."""


def estimated_step(stages: Sequence[StageMedian], size: MicrobatchSize) -> StepEstimate:
    """The formula above, for two stages or more with all values measured."""
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
    """Whether the lines hold the devices back, and which settings of a run would do better."""
    size = next((s.microbatch for s in swarm.statuses.values() if s.microbatch is not None), None)
    stages = _medians(swarm)
    if size is None or len(stages) < 2 or not _sensible(size):
        return
    now, in_use = estimated_step(stages, size), max(stage.in_use for stage in stages)
    # Whatever strangers claim, nothing below divides by 0, and values that are not finite are left out.
    if not (0 < in_use < IN_USE and 0 < REACHED * now.in_use <= in_use):
        return
    short = [each for index in range(len(stages) - 1) for each in _short_of_places(swarm, index, size, stages)]
    if short:
        yield from short
        return
    reached = min(1.0, in_use / now.in_use)
    estimates = [(estimated_step(stages, option).in_use * reached, option) for option in _options(size)]
    found = [(use, option) for use, option in estimates if use > 0]
    best = max(use for use, _ in found)
    use, option = next((use, option) for use, option in found if use >= NEARLY * best)
    if use >= WORTH * in_use:
        why = "the line is full" if now.line_in_use >= FULL else "the way is long"
        changes, settings = _changes(size, option)
        sentence = f"{why}: a device is in use {100 * in_use:.0f} %; {changes} would give about {100 * use:.0f} %"
        yield at_node("ok", "throughput", None, sentence, f"in the configuration of the next run: {settings}")


def _short_of_places(
    swarm: SwarmView, stage: int, size: MicrobatchSize, stages: Sequence[StageMedian]
) -> Iterator[Cause]:
    """The nodes of a stage that lack memory for a step's graphs: more microbatches per step would not help them."""
    each = -(-size.per_step * stages[0].replicas // stages[stage].replicas)
    for peer, status in swarm.statuses.items():
        if status.advert.stage == stage and status.places is not None and status.places < each:
            sentence = f"{swarm.name(peer)} has room for {status.places} of the {each} microbatches of a step"
            advice = "set compute.recompute there, or raise limits.max_in_flight if that is set"
            yield at_node("ok", "places", peer, sentence, advice)


def _medians(swarm: SwarmView) -> list[StageMedian]:
    """The medians of all stages; empty if one is unknown."""
    found = []
    for index in range(swarm.stages):
        at_work = [s for s in swarm.statuses.values() if s.advert.stage == index and s.advert.state == "training"]
        medians = [_known([figure(status) for status in at_work]) for figure in _FIGURES]
        device_s, up, down, in_use = medians
        if device_s is None or up is None or down is None or in_use is None:
            return []
        trips = _known([status.figures.round_trip_s for status in at_work])
        found.append(StageMedian(len(at_work), device_s, up, down, trips or 0.0, in_use))
    return found


def _known(values: Sequence[float | None]) -> float | None:
    return median([value for value in values if value is not None and 0 < value < inf])


def _in_use(status: Status) -> float | None:
    idle_s, device_s = sum(status.figures.idle_s.values()), status.figures.device_s
    sensible = device_s > 0 <= idle_s and status.inner_steps >= LEAST_INNER_STEPS
    return device_s / (device_s + idle_s) if sensible else None


_FIGURES = (
    lambda status: 1 / status.advert.microbatches_per_s if status.advert.microbatches_per_s > 0 else None,
    lambda status: status.figures.upload_bytes_per_s,
    lambda status: status.figures.download_bytes_per_s,
    _in_use,
)


def _sensible(size: MicrobatchSize) -> bool:
    """What a stranger says of the run is fit to calculate with."""
    known = {size.forward, size.backward} <= {*ITEM_BYTES, *BLOCK_FORMATS}
    return known and min(size.per_step, size.activation_bytes, size.gradient_bytes) > 0


def _options(size: MicrobatchSize) -> Iterator[MicrobatchSize]:
    """Settings of other runs, the smallest changes first."""
    for times in TIMES:
        per_step = size.per_step * times
        if times > 1 and per_step > MOST_PER_STEP:
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
    """Bytes of one value, its part of a scale included."""
    if codec in BLOCK_FORMATS:
        block = BLOCK_FORMATS[codec]
        return block.bits / 8 + SCALE_BYTES / block.block
    return ITEM_BYTES[codec]


def _changes(old: MicrobatchSize, new: MicrobatchSize) -> tuple[str, str]:
    """The differences in words and as settings."""
    words, settings = [], []
    if (old.forward, old.backward) != (new.forward, new.backward):
        words.append(new.forward if new.forward == new.backward else f"{new.forward} forward, {new.backward} backward")
        settings += [f"wire.forward: {new.forward}", f"wire.backward: {new.backward}"]
    if new.per_step != old.per_step:
        words.append(f"{new.per_step} microbatches a step")
        settings.append(f"microbatches_per_step: {new.per_step}")
    return " and ".join(words), ", ".join(settings)
