"""What the run asks of this machine: memory for its stage, room for checkpoints, its data."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from noloco_p2p import humanize
from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES, REPLICA_KINDS
from noloco_p2p.errors import ConfigError, LocalError, Unreachable
from noloco_p2p.observe.doctor.doctor_report import BUSY, Telling, in_time

MODEL_S = 30.0
"""Longest import of the model's code."""
DATA_S = 15.0
"""Longest wait for the held-out data, which a hub may have to send."""
PROBE_BYTES = 1 << 16
"""Written beside the checkpoints, and removed: whether they can be written at all."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the stages of a run, in order."""

    parameters: tuple[int, ...]
    item_bytes: int

    def snapshot_bytes(self, stage: int) -> int:
        """(φ, Δ) of one stage."""
        return 2 * self.parameters[stage] * self.item_bytes

    def checkpoint_bytes(self, stage: int) -> int:
        """All that makes a replica of one stage."""
        return len(REPLICA_KINDS) * self.parameters[stage] * self.item_bytes


async def sizes_of(telling: Telling, manifest: RunManifest) -> Sizes | None:
    """The stages of a run, without weights; None, told, when its model cannot be split."""
    try:
        with telling.step("importing the model's code"):
            return await in_time("importing the model's code", MODEL_S, lambda: _sizes(manifest))
    except ConfigError as error:
        telling.error("model", str(error), "the run cannot be held by this version: see model.* and stages")
    except Unreachable as error:
        telling.warning("model", str(error), BUSY)
    return None


def _sizes(manifest: RunManifest) -> Sizes:
    from noloco_p2p.compute.factory import check_model
    from noloco_p2p.compute.model_size import describe

    check_model(manifest)
    found = describe(manifest)
    return Sizes(tuple(stage.parameters for stage in found.stages), ITEM_BYTES[manifest.compute_dtype])


def check_memory(telling: Telling, manifest: RunManifest, device: str, stage: int | None) -> None:
    """Whether the stage fits into the memory that is free; without one, whether every stage does."""
    from noloco_p2p.compute.hardware import pick_device
    from noloco_p2p.compute.model_size import check_fits

    fit, faults = [], []
    for index in range(manifest.stages) if stage is None else [stage]:
        try:
            fit.append(check_fits(manifest, index, pick_device(device)))
        except LocalError as error:
            faults.append(str(error))
    if fit:
        largest = max(fit, key=lambda size: size.device_bytes + size.host_bytes)
        need = (
            f"{humanize.size(largest.device_bytes)} on the device and {humanize.size(largest.host_bytes)} on the host"
        )
        telling.ok("memory", f"stage {largest.index} ({largest.parameters:,} parameters) needs {need}, and fits")
    for fault in faults:
        told, _, advice = fault.partition(": ")
        (telling.warning if fit else telling.error)("memory", told, advice)


def check_disk(telling: Telling, home: Path, local: NodeConfig, checkpoint_bytes: int) -> None:
    """Whether the checkpoints that are kept have room where the node's directory is or will be."""
    where = next(path for path in (home.absolute(), *home.absolute().parents) if path.is_dir())
    wanted = 0 if local.checkpoint.every_rounds is None else (local.checkpoint.keep + 1) * checkpoint_bytes
    try:
        with tempfile.TemporaryFile(dir=where) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(where).free
    except OSError as error:
        told = f"nothing can be written to {where} ({error.strerror})"
        telling.error("disk", told, "free some space, see to its permissions, or name another --dir")
        return
    here = sum(_lengths(home))
    told = (
        f"{where} has {humanize.size(free)} free; {local.checkpoint.keep + 1} checkpoints need {humanize.size(wanted)}"
    )
    if wanted == 0:
        telling.ok("disk", f"{where} has {humanize.size(free)} free; no checkpoints are written")
    elif free < min(wanted, checkpoint_bytes):
        telling.error("disk", told, "free some space, or name another --dir: not even the next checkpoint fits")
    elif free + here < wanted:
        telling.warning("disk", told, "free some space, or set checkpoint.keep lower")
    else:
        telling.ok("disk", told)


def _lengths(home: Path) -> Iterator[int]:
    """Bytes of every checkpoint file that lies there."""
    for path in home.glob("checkpoints/*/*"):
        try:
            yield path.stat().st_size
        except OSError:
            continue


async def check_data(telling: Telling, manifest: RunManifest, local: NodeConfig, peer_id: str) -> None:
    """Whether tokenizer and data are to be had, tried as a node of stage 0 tries it."""
    try:
        with telling.step("reading the held-out data"):
            await in_time("reading the held-out data", DATA_S, lambda: _read(manifest, local, peer_id))
    except (ConfigError, LocalError) as error:
        telling.error("data", str(error), "see data.* of the run, and data_files and tokenizer_dir of this node")
    except Unreachable as error:
        telling.warning("data", str(error), "a node waits for it too: take data that lie on this machine (data_files)")
    else:
        told = f"{manifest.data.kind} with tokenizer {manifest.data.tokenizer}"
        telling.ok("data", f"tokenizer and held-out data are here ({told})")


def _read(manifest: RunManifest, local: NodeConfig, peer_id: str) -> None:
    from noloco_p2p.io.data.threaded_batches import make_batches

    make_batches(manifest, local, peer_id).close()
