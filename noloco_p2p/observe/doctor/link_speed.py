"""What the links are like, and what this machine can be expected to do with them.

The model: a stage is as fast as the slowest of its device, its link, and the microbatches that it may have in flight
over the time that one of them is away. Legend: B microbatch, T sequence, D hidden size.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_p2p import humanize
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES, Advert
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Unreachable
from noloco_p2p.observe.bandwidth_probe import Gauge, Transfer
from noloco_p2p.observe.doctor.doctor_report import Telling, in_time
from noloco_p2p.observe.doctor.run_requirements import Sizes

CALLS = 7
"""Small calls from which a round-trip time is taken."""
PEERS_MEASURED = 3
"""Of each stage."""
TRANSFER_S = 3.0
"""Longest transfer from which a bandwidth is taken."""
TELLING_BYTES = 1 << 20
"""A smaller snapshot is through before the link has shown what it can do."""
LARGEST_TIMED_PARAMETERS = 50_000_000
"""A larger stage is not made only to measure the device: its making takes longer than the rest of the examination."""
TIMING_S = 12.0
"""Longest time to make a stage and to measure it."""


@dataclass(frozen=True, slots=True)
class Links:
    """What was measured of the links to a stage's replicas."""

    round_trip_s: float
    """Median over the peers."""
    bytes_per_s: float | None
    """From one of them; None when it could not be measured."""


Pair = tuple[Links | None, Links | None]
"""To the own stage, and to the next one; None where there is nobody, or nobody answers."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one microbatch costs one replica of a stage."""

    device_s: float
    tokens: int
    """B·T."""
    hidden_bytes: int
    """B·T·D in the wire dtype: what goes to the next stage, and what comes back."""
    stage: int
    stages: int


def expected_rate(load: Load, following: Links | None, max_in_flight: int) -> tuple[float, str]:
    """(tokens per second of one replica, what bounds it: `device`, `link`, or `places in flight`).

    `following` are the links to the next stage; None at the last one, and where nothing was measured. Links and
    devices further down are taken to be like those.
    """
    bounds = {"device": 1.0 / load.device_s}
    below = load.stages - 1 - load.stage
    if following is not None and below > 0:
        each_way = load.hidden_bytes * (1 if load.stage == 0 else 2)
        rate = following.bytes_per_s
        if rate is not None:
            bounds["link"] = rate / each_way
        sending_s = 2 * load.hidden_bytes / rate if rate is not None else 0.0
        away_s = load.device_s + below * (following.round_trip_s + sending_s + load.device_s)
        bounds["places in flight"] = max_in_flight / away_s
    bound = min(bounds, key=lambda name: bounds[name])
    return bounds[bound] * load.tokens, bound


def round_seconds(snapshot_bytes: int, mates: Links) -> float | None:
    """Seconds that pulling a partner's snapshot takes; None when no bandwidth is known."""
    return None if mates.bytes_per_s is None else snapshot_bytes / mates.bytes_per_s + mates.round_trip_s


def hidden_bytes(manifest: RunManifest) -> int:
    """B·T·D in the wire dtype. The model's code is imported by then. Raises ConfigError."""
    from noloco_p2p.compute.model_family import make_config

    width = int(make_config(manifest.model).hidden_size)
    return manifest.microbatch_size * manifest.sequence_length * width * ITEM_BYTES[manifest.wire_dtype]


async def measure_links(telling: Telling, gauge: Gauge, stage: int, replicas: Sequence[Advert]) -> Links | None:
    """Round trips to some replicas of a stage, and the bandwidth from one of them; None when none answers."""
    asked = replicas[:PEERS_MEASURED]
    if not asked:
        return None
    with telling.step(f"measuring round trips to {len(asked)} nodes of stage {stage}"):
        answers = await asyncio.gather(*(gauge.round_trip_s(peer, CALLS) for peer in asked), return_exceptions=True)
    found: dict[str, float] = {}
    for peer, answer in zip(asked, answers, strict=True):
        if isinstance(answer, PeerError):
            advice = "see to that node and to the network between it and this machine"
            telling.warning(
                "latency", f"{humanize.peer(peer.peer_id)} of stage {stage}: {answer}", advice, peer.peer_id
            )
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found[peer.peer_id] = answer
    if not found:
        return None
    told = ", ".join(f"{humanize.peer(peer)} {1e3 * took_s:.1f} ms" for peer, took_s in found.items())
    telling.ok("latency", f"round trip to stage {stage}: {told} (median of {CALLS})")
    giver = min((peer for peer in asked if peer.peer_id in found), key=lambda peer: found[peer.peer_id])
    return Links(statistics.median(found.values()), await _bandwidth(telling, gauge, giver))


async def _bandwidth(telling: Telling, gauge: Gauge, giver: Advert) -> float | None:
    """Bytes per second from a peer, by its newest snapshot."""
    try:
        with telling.step(f"fetching a snapshot from {humanize.peer(giver.peer_id)} to measure the bandwidth"):
            got = await gauge.transfer(giver, TRANSFER_S)
    except PeerError as error:
        told = f"{humanize.peer(giver.peer_id)} of stage {giver.stage} gives no snapshot: {error}"
        telling.ok("bandwidth", f"not measured: {told}")
        return None
    telling.ok("bandwidth", f"from {humanize.peer(giver.peer_id)} of stage {giver.stage}: {_told(got)}")
    return got.bytes_per_s or None


def _told(got: Transfer) -> str:
    part = ", cut off there" if not got.whole else ", too few to tell well" if got.bytes < TELLING_BYTES else ""
    return (
        f"{humanize.size(got.bytes_per_s)}/s ({humanize.size(got.bytes)} of its snapshot in {got.seconds:.3f} s{part})"
    )


async def device_seconds(
    telling: Telling, manifest: RunManifest, stage: int, replicas: Sequence[Advert], sizes: Sizes, device: str | None
) -> tuple[float, str] | None:
    """(device seconds for one microbatch of a stage, where the figure is from): measured here, or as others announce.

    None when nobody of the stage has announced a speed, and it is too large to be made for a measurement or there is no
    `device` that could be measured.
    """
    announced = [a.microbatches_per_s for a in replicas if a.microbatches_per_s > 0]
    if device is not None and sizes.parameters[stage] <= LARGEST_TIMED_PARAMETERS:
        try:
            with telling.step(f"measuring this device on stage {stage}"):
                took_s = await in_time("measuring the device", TIMING_S, lambda: _timed(manifest, stage, device))
            return took_s, "measured here"
        except (ConfigError, LocalError, Unreachable) as error:
            telling.warning("speed", f"this device was not measured: {error}", "run noloco bench stage")
    return (1.0 / statistics.median(announced), "as its replicas announce") if announced else None


def _timed(manifest: RunManifest, stage: int, device: str) -> float:
    from noloco_p2p.compute.stage_timing import time_stage

    return time_stage(manifest, stage, device)


async def tell_expected(
    telling: Telling,
    manifest: RunManifest,
    local: NodeConfig,
    stage: int,
    measured: tuple[float, str],
    links: Pair,
    sizes: Sizes,
) -> None:
    """What this machine can be expected to do at a stage; `measured` is what `device_seconds` gave."""
    mates, following = links
    tokens = manifest.microbatch_size * manifest.sequence_length
    load = Load(measured[0], tokens, hidden_bytes(manifest), stage, manifest.stages)
    rate, bound = expected_rate(load, following, local.limits.max_in_flight)
    telling.figures |= {"device_s_per_microbatch": load.device_s, "expected_tokens_per_s": rate}
    told = f"{1e3 * load.device_s:.1f} ms of the device per microbatch, {measured[1]}"
    telling.ok("speed", f"at stage {stage} about {rate:,.0f} tokens/s are to be expected, bounded by {bound}: {told}")
    if mates is None or manifest.outer.pairing == "none":
        return
    took_s = round_seconds(sizes.snapshot_bytes(stage), mates)
    if took_s is None:
        return
    telling.figures["expected_s_per_outer_round"] = took_s
    told = f"an outer round moves {humanize.size(sizes.snapshot_bytes(stage))}, about {took_s:.2f} s"
    if took_s > manifest.outer.deadline_s:
        advice = "use a faster link, or take a run with more stages: its rounds would all end alone"
        telling.error("round", f"{told}, more than outer.deadline_s ({manifest.outer.deadline_s:g} s)", advice)
    else:
        telling.ok("round", told)
