"""What the run asks of this machine: memory for its stage, room for checkpoints, its data."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES, REPLICA_KINDS
from noloco_p2p.errors import LocalError
from noloco_p2p.humanize import size_text
from noloco_p2p.observe.doctor.doctor_report import DoctorReport

MODEL_S = 30.0
"""Longest import of the model's code."""
DATA_S = 15.0
"""Longest wait for the held-out data, which a hub may have to send."""
PROBE_BYTES = 1 << 16
"""Written beside the checkpoints, and removed: whether they can be written at all."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Of the stages of a run, in order."""

    parameters: tuple[int, ...]
    item_bytes: int

    def snapshot_bytes(self, stage: int) -> int:
        """(φ, Δ) of one stage."""
        return 2 * self.parameters[stage] * self.item_bytes

    def checkpoint_bytes(self, stage: int) -> int:
        """All that makes a replica of one stage."""
        return len(REPLICA_KINDS) * self.parameters[stage] * self.item_bytes


async def sizes_of(report: DoctorReport, manifest: RunManifest) -> StageSizes | None:
    """The stages of a run, without weights; None, reported, when its model cannot be split."""
    advice = "the run cannot be held by this version: see model.* and stages"
    return await report.attempt("model", "importing the model's code", MODEL_S, lambda: _sizes(manifest), advice=advice)


def _sizes(manifest: RunManifest) -> StageSizes:
    from noloco_p2p.compute.factory import check_model, stage_sizes

    check_model(manifest)
    found = stage_sizes(manifest)
    return StageSizes(tuple(stage.parameters for stage in found), ITEM_BYTES[manifest.compute_dtype])


def check_memory(report: DoctorReport, manifest: RunManifest, device: str, stage: int | None) -> None:
    """Whether the stage fits into the memory that is free; without one, whether every stage does."""
    from noloco_p2p.compute.factory import check_fits
    from noloco_p2p.compute.hardware import pick_device

    fit, faults = [], []
    for index in range(manifest.stages) if stage is None else [stage]:
        try:
            fit.append(check_fits(manifest, index, pick_device(device)))
        except LocalError as error:
            faults.append(str(error))
    if fit:
        largest = max(fit, key=lambda size: size.device_bytes + size.host_bytes)
        on_device, on_host = size_text(largest.device_bytes), size_text(largest.host_bytes)
        stage_words = f"stage {largest.index} ({largest.parameters:,} parameters)"
        report.ok("memory", f"{stage_words} needs {on_device} on the device and {on_host} on the host, and fits")
    for fault in faults:
        reason, _, advice = fault.partition(": ")
        (report.warning if fit else report.error)("memory", reason, advice)


def check_disk(report: DoctorReport, home: Path, local: NodeConfig, checkpoint_bytes: int) -> None:
    """Whether the checkpoints that are kept have room where the node's directory is or will be."""
    where = next(path for path in (home.absolute(), *home.absolute().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=where) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(where).free
    except OSError as error:
        sentence = f"nothing can be written to {where} ({error.strerror})"
        report.error("disk", sentence, "free some space, see to its permissions, or name another --dir")
        return
    room = f"{where} has {size_text(free)} free"
    if local.checkpoint.every_rounds is None:
        report.ok("disk", f"{room}; no checkpoints are written")
        return
    # One more than is kept: the oldest is removed once the newest is whole.
    count = local.checkpoint.keep + 1
    wanted = count * checkpoint_bytes
    sentence = f"{room}; {count} checkpoints need {size_text(wanted)}"
    if free < min(wanted, checkpoint_bytes):
        report.error("disk", sentence, "free some space, or name another --dir: not even the next checkpoint fits")
    elif free + sum(_checkpoint_lengths(home)) < wanted:
        report.warning("disk", sentence, "free some space, or set checkpoint.keep lower")
    else:
        report.ok("disk", sentence)


def _checkpoint_lengths(home: Path) -> Iterator[int]:
    """Bytes of every checkpoint file that lies there."""
    for path in home.glob("checkpoints/*/*"):
        try:
            yield path.stat().st_size
        except OSError:
            continue


async def check_data(report: DoctorReport, manifest: RunManifest, local: NodeConfig, peer_id: str) -> None:
    """Whether tokenizer and data are to be had, tried as a node of stage 0 tries it."""
    done = await report.attempt(
        "data",
        "reading the held-out data",
        DATA_S,
        lambda: _open_data(manifest, local, peer_id),
        advice="see data.* of the run, and data_files and tokenizer_dir of this node",
        if_late="a node waits for it too: take data that lie on this machine (data_files)",
    )
    if done:
        kind = f"{manifest.data.kind} with tokenizer {manifest.data.tokenizer}"
        report.ok("data", f"tokenizer and held-out data are here ({kind})")


def _open_data(manifest: RunManifest, local: NodeConfig, peer_id: str) -> bool:
    from noloco_p2p.io.data.threaded_batches import make_batches

    make_batches(manifest, local, peer_id).close()
    return True
