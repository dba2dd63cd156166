"""What the links are like, and what this machine can be expected to do with them.

The model: a stage is as fast as the slowest of its device, its link, and the microbatches that it may have in flight
over the time that one of them is away. Legend: B microbatch, T sequence, D hidden size.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES, Advert
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Unreachable
from noloco_p2p.humanize import short_id, size_text
from noloco_p2p.observe.bandwidth_probe import LinkProbe
from noloco_p2p.observe.doctor.doctor_report import DoctorReport, or_peer_error
from noloco_p2p.observe.doctor.run_requirements import StageSizes

CALLS = 7
"""Small calls from which a round-trip time is taken."""
PEERS_MEASURED = 3
"""Of each stage."""
TRANSFER_S = 3.0
"""Longest transfer from which a bandwidth is taken."""
FAIR_SAMPLE_BYTES = 1 << 20
"""A smaller snapshot is through before the link has shown what it can do."""
LARGEST_TIMED_PARAMETERS = 50_000_000
"""A larger stage is not made only to measure the device: its making takes longer than the rest of the examination."""
TIMING_S = 12.0
"""Longest time to make a stage and to measure it."""


@dataclass(frozen=True, slots=True)
class StageLinks:
    """What was measured of the links to a stage's replicas."""

    round_trip_s: float
    """Median over the peers."""
    bytes_per_s: float | None
    """From one of them; None when it could not be measured."""


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


def expected_rate(load: Load, following: StageLinks | None, max_in_flight: int) -> tuple[float, str]:
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


def round_seconds(snapshot_bytes: int, mates: StageLinks) -> float | None:
    """Seconds that pulling a partner's snapshot takes; None when no bandwidth is known."""
    return None if mates.bytes_per_s is None else snapshot_bytes / mates.bytes_per_s + mates.round_trip_s


def hidden_bytes(manifest: RunManifest) -> int:
    """B·T·D in the wire dtype. The model's code is imported by then. Raises ConfigError."""
    from noloco_p2p.compute.model_family import make_config

    width = int(make_config(manifest.model).hidden_size)
    return manifest.microbatch_size * manifest.sequence_length * width * ITEM_BYTES[manifest.wire_dtype]


async def measure_links(
    report: DoctorReport, probe: LinkProbe, stage: int, replicas: Sequence[Advert]
) -> StageLinks | None:
    """Round trips to some replicas of a stage, and the bandwidth from the nearest; None when none answers."""
    peers = replicas[:PEERS_MEASURED]
    if not peers:
        return None
    with report.step(f"measuring round trips to {len(peers)} nodes of stage {stage}"):
        answers = await asyncio.gather(*(or_peer_error(probe.round_trip_s(peer, CALLS)) for peer in peers))
    found: list[tuple[float, Advert]] = []
    for peer, answer in zip(peers, answers, strict=True):
        if isinstance(answer, PeerError):
            advice = "see to that node and to the network between it and this machine"
            sentence = f"{short_id(peer.peer_id)} of stage {stage}: {answer}"
            report.warning("latency", sentence, advice, peer.peer_id)
        else:
            found.append((answer, peer))
    if not found:
        return None
    times = ", ".join(f"{short_id(peer.peer_id)} {1e3 * took_s:.1f} ms" for took_s, peer in found)
    report.ok("latency", f"round trip to stage {stage}: {times} (median of {CALLS})")
    nearest = min(found, key=lambda each: each[0])[1]
    return StageLinks(statistics.median(took_s for took_s, _ in found), await _bandwidth(report, probe, nearest))


async def _bandwidth(report: DoctorReport, probe: LinkProbe, peer: Advert) -> float | None:
    """Bytes per second from a peer, by its newest snapshot."""
    node = f"{short_id(peer.peer_id)} of stage {peer.stage}"
    try:
        with report.step(f"fetching a snapshot from {short_id(peer.peer_id)} to measure the bandwidth"):
            got = await probe.transfer(peer, TRANSFER_S)
    except PeerError as error:
        report.ok("bandwidth", f"not measured: {node} gives no snapshot: {error}")
        return None
    part = ", cut off there" if not got.whole else ", too little to be sure" if got.bytes < FAIR_SAMPLE_BYTES else ""
    sample = f"{size_text(got.bytes)} of its snapshot in {got.seconds:.3f} s{part}"
    report.ok("bandwidth", f"from {node}: {size_text(got.bytes_per_s)}/s ({sample})")
    return got.bytes_per_s or None


async def device_seconds(
    report: DoctorReport, manifest: RunManifest, replicas: Sequence[Advert], stage: int, device: str | None
) -> tuple[float, str] | None:
    """(device seconds for one microbatch of a stage, where the figure is from): measured here, or as others announce.

    None when no replica has announced a speed, and there is no `device` to measure, or measuring it fails.
    """
    if device is not None:
        try:
            took_s = await report.in_time(
                f"measuring this device on stage {stage}", TIMING_S, lambda: _timed(manifest, stage, device)
            )
            return took_s, "measured here"
        except (ConfigError, LocalError, Unreachable) as error:
            report.warning("speed", f"this device was not measured: {error}", "run noloco bench stage")
    announced = [a.microbatches_per_s for a in replicas if a.microbatches_per_s > 0]
    return (1.0 / statistics.median(announced), "as its replicas announce") if announced else None


def _timed(manifest: RunManifest, stage: int, device: str) -> float:
    from noloco_p2p.compute.stage_timing import time_stage

    return time_stage(manifest, stage, device)


def report_rate(
    report: DoctorReport,
    manifest: RunManifest,
    local: NodeConfig,
    stage: int,
    measured: tuple[float, str],
    following: StageLinks | None,
) -> None:
    """The tokens per second to be expected at a stage; `measured` is what `device_seconds` gave."""
    device_s, origin = measured
    tokens = manifest.microbatch_size * manifest.sequence_length
    load = Load(device_s, tokens, hidden_bytes(manifest), stage, manifest.stages)
    rate, bound = expected_rate(load, following, local.limits.max_in_flight)
    report.figures |= {"device_s_per_microbatch": device_s, "expected_tokens_per_s": rate}
    rate_words = f"at stage {stage} about {rate:,.0f} tokens/s are to be expected, bounded by {bound}"
    report.ok("speed", f"{rate_words}: {1e3 * device_s:.1f} ms of the device per microbatch, {origin}")


def report_round(
    report: DoctorReport, manifest: RunManifest, sizes: StageSizes, stage: int, mates: StageLinks | None
) -> None:
    """The seconds that an outer round's transfer is to be expected to take, against its deadline."""
    took_s = None if mates is None else round_seconds(sizes.snapshot_bytes(stage), mates)
    if took_s is None or manifest.outer.pairing == "none":
        return
    report.figures["expected_s_per_outer_round"] = took_s
    sentence = f"an outer round moves {size_text(sizes.snapshot_bytes(stage))}, about {took_s:.2f} s"
    if took_s > manifest.outer.deadline_s:
        advice = "use a faster link, or take a run with more stages: its rounds would all end alone"
        report.error("round", f"{sentence}, more than outer.deadline_s ({manifest.outer.deadline_s:g} s)", advice)
    else:
        report.ok("round", sentence)
