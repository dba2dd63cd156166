"""Builds a stage from the settings: checks its model, then its size, and only then allocates memory.

The self-test at start-up checks that the split of an architecture computes what the unsplit model computes. A tiny
random model of the same architecture is split at every layer boundary; the chained parts must have the initial weights,
logits and gradients of the unsplit one. A family that normalises hidden states before the first layer with the module
that also follows the last one (nanochat) fails here, with a message, instead of training a wrong model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noloco_p2p.compute import model_family
from noloco_p2p.compute.audit import Audit
from noloco_p2p.compute.device import as_local
from noloco_p2p.compute.hardware import pick_device
from noloco_p2p.compute.host_tensor import DTYPES
from noloco_p2p.compute.model import StageModule, make_stage_module, meta_stage_module
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import AuditSettings, RunManifest
from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.host import free_host_bytes

DEVICE_COPIES = 5
"""Multiples of the weights on the device: θ, accumulated gradients, the current microbatch's, Adam's two moments."""
HOST_COPIES = 10
"""Multiples of the weights on the host: φ, δ, u and θ_f of two rounds, a partner's u, captured θ and Adam moments."""
TOLERANCE = 1e-5
"""Maximum of the largest difference over the largest value. A correct split differs only by the order of summation."""
SAMPLES, TOKENS = 2, 6
MAX_PARAMETERS = 1 << 27
"""Maximum parameters of the small model: it keeps the head size, by which a stranger's manifest could fill memory."""


@dataclass(frozen=True, slots=True)
class StageSize:
    """What one stage holds, plus the minimum for one microbatch; all further activations in flight are additional."""

    index: int
    layers: int
    parameters: int
    device_bytes: int
    host_bytes: int


def make_torch_stage(
    manifest: RunManifest,
    index: int,
    peer_id: PeerId,
    *,
    device: str = "cpu",
    audit: AuditSettings | None = None,
    recompute: bool = False,
    self_test: bool = True,
) -> TorchStage:
    """The synchronous stage `index` with its initial weights.

    Raises ConfigError for a stage, model or split that does not work; LocalError for a missing device, too little
    memory, or an audit directory that cannot be created. `self_test` False skips the trial of the model and of its
    split, for a second stage in the same process.
    """
    if not 0 <= index < manifest.stages:
        raise ConfigError(f"stage is {index}, but the run has stages 0 to {manifest.stages - 1}")
    config = model_family.checked_config(manifest)
    dtype = DTYPES[manifest.compute_dtype]
    chosen = pick_device(device)
    check_fits(manifest, index, chosen)
    if self_test:
        check_architecture(config, manifest.stages, dtype)
    files = None if audit is None or audit.dir is None else _make_audit(Path(audit.dir), peer_id, audit.weights)
    part = make_stage_module(config, index, manifest.stages, seed=manifest.seed, dtype=dtype)
    if files is not None:
        files.initial(part.parameters)
    stage = TorchStage(part, manifest, peer_id, chosen, files, recompute)
    if self_test:
        _check_computes(stage, config.model_type)
    return stage


def _check_computes(stage: TorchStage, family: str) -> None:
    """Compute something at full size, which the small model of `check_architecture` does not have.

    Raises ConfigError if that fails, LocalError if there is not enough memory for it.
    """
    reason = _fault(lambda: None if stage.is_sound() else "its output is not finite")
    if reason is not None:
        raise ConfigError(f"model: a stage of {family} cannot compute: {reason}; check model.config")


def _fault(trial: Callable[[], str | None]) -> str | None:
    """What a trial found wrong, or how it failed. Raises LocalError if there is not enough memory for it."""
    try:
        return trial()
    except model_family.FOREIGN_ERRORS as error:
        if isinstance(lack := as_local(error), LocalError):
            raise lack from error
        return f"it fails with {type(error).__name__}: {model_family.one_line(error)}"


def check_model(manifest: RunManifest) -> Any:
    """The configuration of the manifest's model, after a check that it exists, fits its stages and splits exactly.

    Raises ConfigError otherwise. Takes as long as importing the family's code, plus a fraction of a second.
    """
    config = model_family.checked_config(manifest)
    check_architecture(config, manifest.stages, DTYPES[manifest.compute_dtype])
    return config


def _make_audit(directory: Path, peer_id: PeerId, weights: bool) -> Audit:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"audit.dir: cannot create {directory}: {error.strerror}") from error
    return Audit(directory, peer_id, weights=weights)


def stage_sizes(manifest: RunManifest) -> tuple[StageSize, ...]:
    """Parameters and bytes of each stage, computed without allocating weights. Raises ConfigError for a bad model."""
    config = model_family.checked_config(manifest)
    dtype = DTYPES[manifest.compute_dtype]
    ranges = model_family.layer_ranges(config.num_hidden_layers, manifest.stages)
    counts = meta_stage_module(config, 0, manifest.stages, dtype=dtype).counts
    copies = (DEVICE_COPIES * dtype.itemsize, HOST_COPIES * dtype.itemsize)
    # A microbatch has hidden states, at the last stage also the logits of all tokens, and the gradients of both.
    widths = [int(config.hidden_size)] * manifest.stages
    widths[-1] += int(config.vocab_size)
    row_bytes = 2 * manifest.microbatch_size * manifest.sequence_length * dtype.itemsize
    return tuple(
        StageSize(index, len(layers), count, copies[0] * count + width * row_bytes, copies[1] * count)
        for index, (layers, count, width) in enumerate(zip(ranges, counts, widths, strict=True))
    )


def check_fits(manifest: RunManifest, index: int, device: torch.device) -> StageSize:
    """The size of a stage. Raises LocalError if it does not fit the free memory, ConfigError for an invalid model."""
    size = stage_sizes(manifest)[index]
    on_host = size.host_bytes if device.type == "cuda" else size.host_bytes + size.device_bytes
    _check_memory(index, on_host, free_host_bytes(), "free memory")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # left by an earlier stage of this process
        _check_memory(index, size.device_bytes, torch.cuda.mem_get_info(device)[0], f"free memory on {device}")
    return size


def _check_memory(index: int, needed_bytes: int, free_bytes: int | None, what: str) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise LocalError(
            f"stage {index} needs {needed_bytes / 2**30:.1f} GiB for weights, optimizer, snapshots and a microbatch, "
            f"but this machine has {free_bytes / 2**30:.1f} GiB of {what}: use more stages or a larger machine, "
            "or smaller microbatches"
        )


def check_architecture(config: Any, stages: int, dtype: torch.dtype) -> None:
    """Raises ConfigError unless the split of this architecture is exact, or there is only one stage."""
    if stages == 1:
        return
    reason = _fault(lambda: next(_differences(model_family.small_config(config), dtype), None))
    if reason is not None:
        raise ConfigError(
            f"model: the family {config.model_type} cannot be split over {stages} stages: {reason}; "
            "use another family, or stages: 1"
        )


def _differences(config: Any, dtype: torch.dtype) -> Iterator[str]:
    """How a split with one layer per stage differs from the unsplit model. Only the first difference is reported."""
    (count,), layers = meta_stage_module(config, 0, 1, dtype=dtype).counts, config.num_hidden_layers
    if count > MAX_PARAMETERS:
        yield f"its heads are too wide for a trial: even a small model has {count:,} parameters"
    whole = make_stage_module(config, 0, 1, seed=0, dtype=dtype)
    parts = [make_stage_module(config, index, layers, seed=0, dtype=dtype) for index in range(layers)]
    names = [name for part in parts for name in part.parameters]
    if sorted(names) != sorted(whole.parameters):
        yield "its parameters are not divided among the stages exactly once"
    for part in parts:
        for name, parameter in part.parameters.items():
            if not torch.equal(parameter, whole.parameters[name]):
                yield f"the initial value of {name} depends on the split"
    generator = torch.Generator().manual_seed(0)
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    tokens_BT = torch.randint(0, config.vocab_size, (SAMPLES, length), generator=generator)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[-1, (length + 1) // 2 :] = 0
    for mask in (None, mask_BT):
        logits_BTV = whole(tokens_BT, mask)
        flow = tokens_BT
        for part in parts:
            flow = part(flow, mask)
        if flow.shape != logits_BTV.shape or not _near(flow, logits_BTV):
            yield "its logits differ from those of the unsplit model"
        weights = torch.linspace(-1, 1, logits_BTV.numel(), dtype=logits_BTV.dtype).reshape(logits_BTV.shape)
        found = {name: grad for part in parts for name, grad in _gradients(flow, weights, part).items()}
        for name, grad in _gradients(logits_BTV, weights, whole).items():
            if not _near(found[name], grad):
                yield f"the gradient of {name} differs from that of the unsplit model"


def _gradients(logits_BTV: Tensor, weights: Tensor, part: StageModule) -> dict[str, Tensor]:
    """Gradient of Σ weights·logits² for each parameter; zeros for parameters that it does not reach."""
    scalar = (weights * logits_BTV.square()).sum()
    grads = torch.autograd.grad(scalar, list(part.parameters.values()), retain_graph=True, materialize_grads=True)
    return dict(zip(part.parameters, grads, strict=True))


def _near(found: Tensor, expected: Tensor) -> bool:
    found, expected = found.detach(), expected.detach()
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) <= TOLERANCE * scale < inf
