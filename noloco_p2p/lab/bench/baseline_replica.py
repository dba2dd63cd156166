"""One process of `noloco bench baseline`: the whole model, under plain torch.distributed or hivemind's averager. The
single process of `noloco bench pipeline` is the same without either.

The model is built like the stages, from the same seed, but in one piece. Inner steps are those of METHOD.md, "Inner
step", except that gradients are clipped over the whole model. Only benches may use torch.distributed: a node has no
collectives (tests/test_house.py).

Shape legend: B microbatch, T sequence, V vocabulary, N = B·T.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

from noloco_p2p.compute import model_family
from noloco_p2p.compute.hardware import autocast
from noloco_p2p.compute.host_tensor import DTYPES, to_torch
from noloco_p2p.compute.inner_optimizer import InnerOptimizer
from noloco_p2p.compute.model import make_stage_module
from noloco_p2p.compute.stage import IGNORED
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch
from noloco_p2p.core.schedule import learning_rate
from noloco_p2p.errors import LocalError
from noloco_p2p.lab.processes import allow_forks

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""DiLoCo's (arXiv 2311.08105)."""
LOOPBACK = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "use_relay": False, "auto_nat": False, "nat_port_map": False}
MATCHMAKING_S, REQUEST_S = 2.0, 1.0
"""How long hivemind waits for missing processes, and for the reply of one, seconds. The second must be shorter."""
WAIT = timedelta(minutes=10)
"""Longest wait of one process for the others."""


class BaselineReplica:
    """The whole model and its inner optimizer. A subclass decides when processes communicate, and what they average;
    this class trains alone. Raises ConfigError if the model cannot be built.
    """

    def __init__(self, manifest: RunManifest, device: torch.device) -> None:
        self._manifest = manifest
        self._device = device
        dtype = DTYPES[manifest.compute_dtype]
        whole = make_stage_module(model_family.checked_config(manifest), 0, 1, seed=manifest.seed, dtype=dtype)
        names = whole.layer_matrices() if manifest.inner.optimizer == "muon" else frozenset()
        by_muon = {whole.parameters[name] for name in names}
        self.model: Any = self._spread(whole.causal.to(device))
        """The model as wrapped by the subclass."""
        self._part = replace(whole, causal=self.model)
        parameters = dict(self.model.named_parameters())
        matrices = {name for name, parameter in parameters.items() if parameter in by_muon}
        self._optimizer = InnerOptimizer(parameters, manifest.inner, matrices)

    def inner_step(self, step: int, batches: Sequence[Batch]) -> int:
        """Take inner step `step`, counted from 1, on this process's microbatches. Returns their number of tokens."""
        inner, tokens = self._manifest.inner, sum(_tokens(batch) for batch in batches)
        schedule = inner.peak_learning_rate, inner.warmup_steps, inner.final_fraction
        weight = self._weight(tokens)
        for number, batch in enumerate(batches, 1):
            with self._gathering(last=number == len(batches)):
                (self.loss(batch) * weight).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        self._optimizer.step(learning_rate(step, self._manifest.steps, *schedule))
        self.model.zero_grad()
        self._meet(step)
        return tokens

    @torch.no_grad()
    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        """Nats per token over all of these microbatches. Every process must call it with the same microbatches."""
        return sum(float(self.loss(batch)) for batch in batches) / sum(_tokens(batch) for batch in batches)

    def loss(self, batch: Batch) -> Tensor:
        """Cross entropy summed over the targets that count, in nats."""
        inputs_BT, targets_BT = (to_torch(each).to(self._device).long() for each in (batch.inputs, batch.targets))
        mask_BT = None if batch.mask is None else to_torch(batch.mask).to(self._device).bool()
        with autocast(next(iter(self.model.parameters()))):
            logits_BTV = self._part(inputs_BT, mask_BT)
        wide_NV = logits_BTV.flatten(0, 1).to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return nn.functional.cross_entropy(wide_NV, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")

    def _spread(self, causal: Any) -> Any:
        """Wrap the model."""
        return causal

    def _weight(self, tokens: int) -> float:
        """The weight of each microbatch's loss sum in the gradient, if this process trains on `tokens` tokens in the
        step."""
        return 1 / tokens

    def _gathering(self, *, last: bool) -> Any:
        """The context for a microbatch's passes; `last`: it is the last one of the step."""
        return nullcontext()

    def _meet(self, step: int) -> None:
        """Called after inner step `step`."""

    def close(self) -> None:
        """End whatever the replica started."""


class DataParallel(BaselineReplica):
    """Processes that take each step together, on the mean over the tokens of all. Needs the default process group."""

    def _weight(self, tokens: int) -> float:
        # torch averages the gradients over the processes.
        total = torch.tensor(float(tokens), device=self._device)
        distributed.all_reduce(total)
        return distributed.get_world_size() / float(total)


class Ddp(DataParallel):
    """torch.nn.parallel.DistributedDataParallel: every process holds everything."""

    def _spread(self, causal: Any) -> Any:
        return DistributedDataParallel(causal)

    def _gathering(self, *, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()


class Fsdp(DataParallel):
    """torch.distributed.fsdp.fully_shard (FSDP2), layer by layer: weights, gradients and Adam's moments are sharded."""

    def _spread(self, causal: Any) -> Any:
        mesh = init_device_mesh(self._device.type, (distributed.get_world_size(),))
        count = causal.config.num_hidden_layers
        for layer in next(m for m in causal.modules() if isinstance(m, nn.ModuleList) and len(m) == count):
            fully_shard(layer, mesh=mesh)
        return fully_shard(causal, mesh=mesh)

    def _gathering(self, *, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


class DilocoBaseline(BaselineReplica):
    """Independent inner steps; every m = `outer.inner_steps` of them, and after the last one, DiLoCo's outer step.

    arXiv 2311.08105, algorithm 1: φ takes a step of SGD with Nesterov momentum, torch's own, on the pseudo-gradient φ −
    θ averaged over all processes; θ ← φ. Adam's moments stay as they are.
    """

    def __init__(self, manifest: RunManifest, device: torch.device) -> None:
        super().__init__(manifest, device)
        self._fast = list(self.model.parameters())
        self._slow = nn.Parameter(parameters_to_vector(self._fast).detach().clone())
        self._outer = torch.optim.SGD([self._slow], lr=OUTER_LEARNING_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    @torch.no_grad()
    def _meet(self, step: int) -> None:
        if step % self._manifest.outer.inner_steps and step < self._manifest.steps:
            return
        self._slow.grad = self._slow - parameters_to_vector(self._fast)
        self._average(self._slow.grad)
        self._outer.step()
        # A copy, because the parameters become views of the given vector.
        vector_to_parameters(self._slow.clone(), self._fast)

    def _average(self, gradient: Tensor) -> None:
        """Replace this process's pseudo-gradient with the mean over all processes."""
        distributed.all_reduce(gradient)
        gradient /= distributed.get_world_size()


class OpenDilocoBaseline(DilocoBaseline):
    """DiLoCo whose mean is computed by hivemind's DecentralizedAverager: OpenDiLoCo, arXiv 2407.07852.

    Its matchmaking over a DHT forms the group, and a butterfly all-reduce in float16 computes the mean, so the
    processes' weights differ by its rounding. hivemind forks processes for the DHT and the averager.
    """

    def __init__(self, manifest: RunManifest, device: torch.device) -> None:
        super().__init__(manifest, device)
        from hivemind.averaging.averager import DecentralizedAverager
        from hivemind.compression import Float16Compression
        from hivemind.dht import DHT

        allow_forks()
        count = distributed.get_world_size()
        if distributed.get_rank() == 0:
            self._dht = DHT(start=True, **LOOPBACK)
            _from_the_first(str(self._dht.get_visible_maddrs()[0]), device)
        else:
            self._dht = DHT(start=True, initial_peers=[_from_the_first("", device)], **LOOPBACK)
        self._averager = DecentralizedAverager(
            [torch.zeros(self._slow.shape)],
            self._dht,
            start=True,
            prefix=manifest.run_id,
            target_group_size=count,
            min_group_size=count,
            min_matchmaking_time=MATCHMAKING_S,
            request_timeout=REQUEST_S,
            compression=Float16Compression(),
        )

    def close(self) -> None:
        """End hivemind's processes."""
        self._averager.shutdown()
        self._dht.shutdown()

    def _average(self, gradient: Tensor) -> None:
        from hivemind.averaging.allreduce import AllreduceException
        from hivemind.averaging.matchmaking import MatchmakingException

        with self._averager.get_tensors() as (shared,):
            shared.copy_(gradient)
        try:
            self._averager.step(timeout=WAIT.total_seconds())
        except (AllreduceException, MatchmakingException) as error:
            raise LocalError(f"hivemind did not average over all processes within {WAIT}: {error}") from error
        with self._averager.get_tensors() as (shared,):
            gradient.copy_(shared)


KINDS = {"ddp": Ddp, "fsdp": Fsdp, "diloco": DilocoBaseline, "opendiloco": OpenDilocoBaseline}


def _from_the_first(text: str, device: torch.device) -> str:
    """Broadcast a short text from the first process to all."""
    texts = [text]
    distributed.broadcast_object_list(texts, 0, device=device)
    return texts[0]


def _tokens(batch: Batch) -> int:
    """Number of targets that count."""
    return int((to_torch(batch.targets) != IGNORED).sum())
