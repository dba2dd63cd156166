"""Writes the files from which a run can be recomputed (ARCHITECTURE.md, "Files").

They record only what the stage really used.
"""

import json
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.accumulator import AccumulatedMicrobatch
from noloco_p2p.config import OuterSettings
from noloco_p2p.core.messages import HostTensor, MicrobatchId, PeerId
from noloco_p2p.core.snapshots import PartnerVector
from noloco_p2p.core.stage_values import StepLabel
from noloco_p2p.errors import LocalError
from noloco_p2p.line_files import append_line


def microbatch_key(microbatch: MicrobatchId) -> str:
    """`<peer>-<incarnation, 16 hexadecimal digits>-<counter>`: the id of a microbatch in the audit files."""
    return f"{microbatch.peer}-{microbatch.incarnation:016x}-{microbatch.counter}"


class Audit:
    """Writes the audit of one node to an existing directory. Every method raises LocalError if it cannot write.

    Without `weights` only the inner steps are written.
    """

    def __init__(self, directory: Path, peer_id: PeerId, *, weights: bool = True) -> None:
        self._directory = directory
        self._peer_id = peer_id
        self._weights = weights

    def initial(self, parameters: Mapping[str, Tensor]) -> None:
        """`initial-<peer id>.safetensors`: the weights before step 1, by global name.

        A node that moves or is restarted does not train from the weights that it makes then, so the first file stays.
        """
        name = f"initial-{self._peer_id}.safetensors"
        if not (self._directory / name).exists():
            self._save(name, parameters, {"peer_id": self._peer_id})

    def inner_step(self, label: StepLabel, added: Sequence[AccumulatedMicrobatch], *, first: bool) -> None:
        """Append a line to `steps-<peer id>.jsonl` (`at`: Unix seconds), and at stage 0 write the batches used."""
        entries = []
        for one in added:
            previous, following = label.routes.get(one.microbatch, (None, None))
            entry = {"id": microbatch_key(one.microbatch), "previous": previous, "next": following}
            counted = {"tokens": one.tokens, "loss_sum": one.loss_sum} | ({"clip": one.clip} if one.clip < 1 else {})
            entries.append(entry | counted)
        line = {name: getattr(label, name) for name in ("inner_step", "step", "learning_rate")}
        line |= {"microbatches": entries, "at": time.time()}
        path = self._directory / f"steps-{self._peer_id}.jsonl"
        try:
            append_line(path, json.dumps(line))
        except OSError as error:
            raise _cannot_write(path, error) from error
        if first:
            self._batches(label, added)

    def round(
        self,
        number: int,
        theirs: Sequence[PartnerVector],
        inner_steps: tuple[int, int],
        tensors: Mapping[str, Mapping[str, Tensor]],
        outer: OuterSettings,
    ) -> None:
        """`round-<6 digits>-<peer id>.safetensors`: `tensors` by kind, then by global name.

        `inner_steps`: how many inner steps had been taken when the round was frozen, and when it was merged.
        """
        metadata = {
            "round": str(number),
            "peer_id": self._peer_id,
            "partner_id": ",".join(one.peer for one in theirs),
            "partner_round": ",".join(str(one.round) for one in theirs),
            "partner_step": ",".join(str(one.step) for one in theirs),
            "rule": outer.rule,
            "frozen_after": str(inner_steps[0]),
            "merged_after": str(inner_steps[1]),
        }
        names = [f"{kind}/{name}" for kind in tensors if kind.startswith("partner_vector") for name in tensors[kind]]
        for key, values in (("limit", theirs[0].limits), ("clip", theirs[0].factors)) if theirs else ():
            if values:
                metadata[key] = json.dumps({name: each for name, each in zip(names, values, strict=True) if each < inf})
        metadata |= {name: repr(getattr(outer, name)) for name in ("alpha", "beta", "gamma")}
        flat = {f"{kind}/{name}": tensor for kind, named in tensors.items() for name, tensor in named.items()}
        self._save(f"round-{number:06d}-{self._peer_id}.safetensors", flat, metadata)

    def _batches(self, label: StepLabel, added: Sequence[AccumulatedMicrobatch]) -> None:
        """`batches-<peer id>-<inner step, 6 digits>.safetensors`: inputs, targets and masks by microbatch."""
        tensors: dict[str, Tensor] = {}
        for one in added:
            batch = label.batches.get(one.microbatch)
            if batch is None:
                continue
            for kind in ("inputs", "targets", "mask"):
                tensor: HostTensor | None = getattr(batch, kind)
                if tensor is not None:
                    tensors[f"{kind}/{microbatch_key(one.microbatch)}"] = host_tensor.to_torch(tensor).clone()
        self._save(f"batches-{self._peer_id}-{label.inner_step:06d}.safetensors", tensors, {"peer_id": self._peer_id})

    def _save(self, name: str, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        if not self._weights:
            return
        path, fresh = self._directory / name, self._directory / f"{name}.new"
        own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        try:
            save_file(own, fresh, metadata=metadata)
            fresh.replace(path)
        except (OSError, SafetensorError) as error:
            raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> LocalError:
    reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    return LocalError(f"the audit cannot write {path}: {reason}; free some space or set another audit.dir")
