"""Checks what the run needs of this machine (memory, disk, data), and the speed to expect of its links and device.

The model of the speed: a stage is as fast as the slowest of its device, its link, and its places, that is, the number
of its microbatches in flight divided by the time that each is away. Legend: B microbatch, T sequence, D hidden size.
"""

import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.block_format import wire_spec
from noloco_p2p.core.messages import ITEM_BYTES, Advert, PeerId
from noloco_p2p.errors import ConfigError, LocalError, NolocoError, PeerError, Unreachable
from noloco_p2p.humanize import plural, short_id, size_text
from noloco_p2p.launch import homes
from noloco_p2p.observe.bandwidth_probe import LinkProbe
from noloco_p2p.observe.doctor.doctor_report import BUSY, DoctorReport, in_time, or_error

MODEL_S = 30.0
"""Longest import of the model's code."""
DATA_S = 15.0
"""Longest wait for the held-out data, which may come from a hub."""
PROBE_BYTES = 1 << 16
"""Size of a file written next to the checkpoints and removed, to check whether anything can be written there."""
CALLS = 7
"""Number of small calls with which a round-trip time is measured."""
PEERS_MEASURED = 3
"""Upper limit on the peers measured per stage."""
TRANSFER_S = 3.0
"""Time limit for the transfer with which a bandwidth is measured."""
FAIR_SAMPLE_BYTES = 1 << 20
"""A smaller snapshot arrives before the link has shown what it can do."""
LARGEST_TIMED_PARAMETERS = 50_000_000
"""A larger stage is not made just to measure the device, because that takes longer than the rest of the examination."""
TIMING_S = 12.0
"""Time limit for making a stage and measuring it."""


class StageLinks(NamedTuple):
    """Measurements of the links to a stage's replicas."""

    round_trip_s: float
    """Median over the peers."""
    bytes_per_s: float | None
    """From the nearest of them; None if it could not be measured."""


@dataclass(frozen=True, slots=True)
class RunRequirements:
    """The checks of one machine against the needs of one run."""

    report: DoctorReport
    manifest: RunManifest
    local: NodeConfig
    device: str | None
    """The device that a node would use; None if it is not available."""
    own: PeerId | None = None
    """The node of this directory if it is running on this machine, and so already has what it needs."""

    def wanted_stage(self) -> int | None:
        """The stage in the settings; None if they name none, or one that the run does not have (which is reported)."""
        wanted = self.local.stage
        if wanted is not None and wanted >= self.manifest.stages:
            sentence = f"stage {wanted} is requested, but the run has stages 0 to {self.manifest.stages - 1}"
            self.report.error("stage", sentence, "set stage to one of these, or leave it out")
            return None
        return wanted

    async def check(self, home: Path, stage: int | None) -> list[int] | None:
        """Check what the run needs at a stage, or at any. Returns the parameters of each stage; None if unknown."""
        doing = "importing the model's code"
        advice = "this version cannot run the model: check model.* and stages"
        parameters = await self.report.attempt("model", doing, in_time(doing, MODEL_S, self._sizes), advice, BUSY)
        if parameters is None:
            return None
        if self.own is None:
            self.check_memory(stage)
        stages = range(self.manifest.stages) if stage is None else [stage]
        value_bytes = len(self.manifest.state_kinds) * ITEM_BYTES[self.manifest.compute_dtype]
        of_swarm, all_nodes = homes.kind_of(home) is homes.Home.SWARM, self.manifest.start_replicas * sum(parameters)
        self.check_disk(home, value_bytes * (all_nodes if of_swarm else max(parameters[index] for index in stages)))
        if 0 in stages and self.own is None:
            await self.check_data()
        return parameters

    def _sizes(self) -> list[int]:
        from noloco_p2p.compute.factory import check_model, stage_sizes

        check_model(self.manifest)
        return [stage.parameters for stage in stage_sizes(self.manifest)]

    def check_memory(self, stage: int | None) -> None:
        """Check whether the stage fits into the free memory; with None, whether each stage of the run does."""
        from noloco_p2p.compute.factory import check_fits
        from noloco_p2p.compute.hardware import pick_device

        if self.device is None:
            return
        fit, faults = [], []
        for index in range(self.manifest.stages) if stage is None else [stage]:
            try:
                fit.append(check_fits(self.manifest, index, pick_device(self.device)))
            except LocalError as error:
                faults.append(str(error))
        if fit:
            largest = max(fit, key=lambda size: size.device_bytes + size.host_bytes)
            needs = f"{size_text(largest.device_bytes)} on the device and {size_text(largest.host_bytes)} on the host"
            stage_words = f"stage {largest.index} ({largest.parameters:,} parameters)"
            self.report.ok("memory", f"{stage_words} fits: it needs {needs}")
        for fault in faults:
            reason, _, advice = fault.partition(": ")
            (self.report.warning if fit else self.report.error)("memory", reason, advice)

    def check_disk(self, home: Path, checkpoint_bytes: int) -> None:
        """Check whether there is room for checkpoints in a directory: a node's, or in that of a swarm, all nodes'."""
        where = next(path for path in (home.absolute(), *home.absolute().parents) if path.is_dir())
        try:
            with tempfile.TemporaryFile(dir=where) as probe:
                probe.write(bytes(PROBE_BYTES))
                probe.flush()
                os.fsync(probe.fileno())
            free = shutil.disk_usage(where).free
        except OSError as error:
            sentence = f"cannot write to {where} ({error.strerror})"
            self.report.error("disk", sentence, "free some space, check its permissions, or name another --dir")
            return
        room = f"{where} has {size_text(free)} free"
        if self.local.checkpoint.every_steps is None:
            self.report.ok("disk", f"{room}; no checkpoints are written")
            return
        # One more than is kept, because the oldest is only removed once the newest is complete.
        count = self.local.checkpoint.keep + 1
        wanted = count * checkpoint_bytes
        each = " of each node" if homes.kind_of(home) is homes.Home.SWARM else ""
        sentence = f"{room}; {count} checkpoints{each} need {size_text(wanted)}"
        if free < checkpoint_bytes:
            self.report.error("disk", sentence, "free some space, or name another --dir: not even the next one fits")
        elif free + _checkpoints_bytes(home) < wanted:
            self.report.warning("disk", sentence, "free some space, or set checkpoint.keep lower")
        else:
            self.report.ok("disk", sentence)

    async def check_data(self) -> None:
        """Check whether tokenizer and data are available, by opening them as a stage-0 node does."""
        doing, data = "reading the held-out data", self.manifest.data
        advice = "check data.* of the run, and data_files and tokenizer_dir of this node"
        late = "a node would wait for it too: use data on this machine (data_files)"
        if await self.report.attempt("data", doing, in_time(doing, DATA_S, self._open_data), advice, late):
            self.report.ok("data", f"tokenizer ({data.tokenizer}) and held-out data ({data.kind}) are available")

    def _open_data(self) -> bool:
        from noloco_p2p.io.data.threaded_batches import make_batches

        make_batches(self.manifest, self.local, "doctor").close()
        return True

    async def measure_links(self, probe: LinkProbe, stage: int, replicas: Sequence[Advert]) -> StageLinks | None:
        """Round trips to some other replicas of a stage, and the bandwidth from the nearest; None if none answers."""
        peers = [replica for replica in replicas if replica.peer_id != self.own][:PEERS_MEASURED]
        with self.report.step(f"measuring round trips to {plural(len(peers), 'node')} of stage {stage}"):
            answers = await asyncio.gather(*(or_error(probe.round_trip_s(peer, CALLS)) for peer in peers))
        found: list[tuple[float, Advert]] = []
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, NolocoError):
                advice = "check that node and the network between it and this machine"
                sentence = f"{short_id(peer.peer_id)} of stage {stage}: {answer}"
                self.report.warning("latency", sentence, advice, peer.peer_id)
            else:
                found.append((answer, peer))
        if not found:
            return None
        times = ", ".join(f"{short_id(peer.peer_id)} {1e3 * took_s:.1f} ms" for took_s, peer in found)
        self.report.ok("latency", f"round trip to stage {stage}: {times} (median of {CALLS})")
        nearest = min(found, key=lambda each: each[0])[1]
        return StageLinks(statistics.median(took_s for took_s, _ in found), await self._bandwidth(probe, nearest))

    async def _bandwidth(self, probe: LinkProbe, peer: Advert) -> float | None:
        """Bytes per second from a peer, measured on its newest snapshot; None if it sends none."""
        node = f"{short_id(peer.peer_id)} of stage {peer.stage}"
        try:
            with self.report.step(f"fetching a snapshot from {short_id(peer.peer_id)} to measure the bandwidth"):
                got = await probe.transfer(peer, TRANSFER_S)
        except PeerError as error:
            self.report.ok("bandwidth", f"not measured: {node} sends no snapshot: {error}")
            return None
        unsure = ", a small sample" if got.bytes < FAIR_SAMPLE_BYTES else ""
        sample = f"{size_text(got.bytes)} of its snapshot in {got.seconds:.3f} s"
        sample += unsure if got.whole else ", then cut off"
        self.report.ok("bandwidth", f"from {node}: {size_text(got.bytes_per_s)}/s ({sample})")
        return got.bytes_per_s or None

    async def check_speed(
        self, stage: int, parameters: int, replicas: Sequence[Advert], links: Sequence[StageLinks | None]
    ) -> None:
        """Report the speed to expect at a stage with this number of parameters.

        The device's speed is measured here if possible, otherwise taken from the adverts of `replicas`. `links` are the
        links to the stage's own replicas, and to those of the next stage.
        """
        measured = await self._device_seconds(stage, parameters, replicas)
        if measured is None:
            reason = f"no replica of stage {stage} announces its speed, and this device was not measured"
            self.report.ok("speed", f"the speed cannot be estimated: {reason}")
            return
        from noloco_p2p.compute.model_family import make_config

        (device_s, origin), (mates, following), run = measured, links, self.manifest
        tokens, below = run.microbatch_size * run.sequence_length, run.stages - 1 - stage
        shape_BTD = (run.microbatch_size, run.sequence_length, int(make_config(run.model).hidden_size))
        hidden, grad = wire_spec("hidden", run.wire.forward, shape_BTD), wire_spec("grad", run.wire.backward, shape_BTD)
        wire_bytes = (hidden.nbytes, grad.nbytes)
        places = min(run.microbatches_per_step, self.local.limits.max_in_flight or run.microbatches_per_step)
        rate, bound = expected_rate(device_s, wire_bytes, stage, below, following, places)
        self.report.figures |= {"device_s_per_microbatch": device_s, "expected_tokens_per_s": rate * tokens}
        expected = f"expect about {rate * tokens:,.0f} tokens/s at stage {stage}, limited by the {bound}"
        self.report.ok("speed", f"{expected}: {1e3 * device_s:.1f} ms of device time per microbatch, {origin}")
        others = max(1, sum(one.peer_id != self.own for one in replicas)) if run.outer.update.common else 1
        snapshot_bytes = others * run.outer.vector_bytes(parameters, run.compute_dtype)
        took_s = None if mates is None else round_seconds(snapshot_bytes, mates)
        if took_s is not None and run.outer.pairing != "none":
            self.report.figures["expected_s_per_outer_round"] = took_s
            sentence = f"an outer round receives {size_text(snapshot_bytes)}, in about {took_s:.2f} s"
            if took_s > run.outer.deadline_s:
                sentence += f", more than outer.deadline_s ({run.outer.deadline_s:g} s)"
                advice = "use a faster link, or join a run with more stages: here all rounds would end alone"
                self.report.error("round", sentence, advice)
            else:
                self.report.ok("round", sentence)

    async def _device_seconds(
        self, stage: int, parameters: int, replicas: Sequence[Advert]
    ) -> tuple[float, str] | None:
        """(device seconds for one microbatch of a stage, their source): measured here, or announced by its replicas.

        None if neither is known. A device that a node uses is not measured.
        """
        if self.device is not None and self.own is None and parameters <= LARGEST_TIMED_PARAMETERS:
            doing = f"measuring this device on stage {stage}"
            try:
                with self.report.step(doing):
                    return await in_time(doing, TIMING_S, lambda: self._timed(stage)), "measured here"
            except (ConfigError, LocalError, Unreachable) as error:
                self.report.warning("speed", f"this device was not measured: {error}", "run noloco bench stage")
        # Less than one in twelve days is a stranger's claim, and its seconds may not even be finite.
        announced = [a.microbatches_per_s for a in replicas if a.microbatches_per_s > 1e-6]
        return (1.0 / statistics.median(announced), "as announced by its replicas") if announced else None

    def _timed(self, stage: int) -> float:
        from noloco_p2p.compute.stage_timing import time_stage

        assert self.device is not None
        return time_stage(self.manifest, stage, self.device)


def _checkpoints_bytes(home: Path) -> int:
    """Total size of the checkpoint files in the directory of a node or a swarm."""
    found = 0
    for path in (*home.glob("checkpoints/*/*"), *home.glob("*/checkpoints/*/*")):
        with suppress(OSError):
            found += path.stat().st_size
    return found


def expected_rate(
    device_s: float,
    wire_bytes: tuple[int, int],
    stage: int,
    below: int,
    following: StageLinks | None,
    max_in_flight: int,
) -> tuple[float, str]:
    """(microbatches per second of one replica, what limits it: `device`, `link`, or `places in flight`).

    A microbatch takes `device_s` seconds of the device; `wire_bytes` are the bytes sent to the next stage and those
    returned. `below` is the number of later stages; `following` are the links to the first of them, None if they were
    not measured. Links and devices further down are assumed to be the same.
    """
    bounds = {"device": 1.0 / device_s}
    if following is not None and below > 0:
        sending_s = 0.0
        if following.bytes_per_s is not None:
            bounds["link"] = following.bytes_per_s / (max(wire_bytes) if stage == 0 else sum(wire_bytes))
            sending_s = sum(wire_bytes) / following.bytes_per_s
        away_s = device_s + below * (following.round_trip_s + sending_s + device_s)
        bounds["places in flight"] = max_in_flight / away_s
    bound = min(bounds, key=lambda name: bounds[name])
    return bounds[bound], bound


def round_seconds(snapshot_bytes: int, mates: StageLinks) -> float | None:
    """Seconds that it takes to pull a snapshot of this size from a partner; None if the bandwidth is unknown."""
    return None if mates.bytes_per_s is None else snapshot_bytes / mates.bytes_per_s + mates.round_trip_s
