"""From the settings to a stage: checks first, then memory."""

from pathlib import Path
from typing import Any

from noloco_p2p.compute import model_family
from noloco_p2p.compute.audit import Audit
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.host_tensor import DTYPES
from noloco_p2p.compute.model import make_stage_module
from noloco_p2p.compute.model_size import check_fits
from noloco_p2p.compute.selftest import check_architecture
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError


def make_torch_stage(
    manifest: RunManifest,
    index: int,
    peer_id: PeerId,
    *,
    device: str = "cpu",
    audit_dir: str | None = None,
    audit_weights: bool = True,
    self_test: bool = True,
) -> TorchStage:
    """The synchronous stage `index` with its initial weights.

    Raises ConfigError (no such stage, model or split) and LocalError (no such device, no memory, no audit directory).
    `self_test` False leaves out the comparison of the split with the whole, for a second stage of the same process.
    """
    if not 0 <= index < manifest.stages:
        raise ConfigError(f"stage is {index}, but the run has stages 0 to {manifest.stages - 1}")
    config = model_family.checked_config(manifest)
    dtype = DTYPES[manifest.compute_dtype]
    chosen = pick_device(device)
    check_fits(manifest, index, chosen)
    if self_test:
        check_architecture(config, manifest.stages, dtype)
    audit = None if audit_dir is None else _make_audit(Path(audit_dir), peer_id, audit_weights)
    part = make_stage_module(config, index, manifest.stages, seed=manifest.seed, dtype=dtype)
    if audit is not None:
        audit.initial(part.parameters)
    return TorchStage(part, manifest, peer_id, chosen, audit)


def check_model(manifest: RunManifest) -> Any:
    """The configuration of a model that exists, fits its stages and splits exactly. Raises ConfigError.

    Takes as long as importing the family's code, plus a fraction of a second.
    """
    config = model_family.checked_config(manifest)
    check_architecture(config, manifest.stages, DTYPES[manifest.compute_dtype])
    return config


def _make_audit(directory: Path, peer_id: PeerId, weights: bool) -> Audit:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"audit.dir: cannot make {directory}: {error.strerror}") from error
    return Audit(directory, peer_id, weights=weights)
