"""NoLoCo in one process, written from METHOD.md: replays what the audit files of a run recorded, and compares.

This proves that a distributed run computes the algorithm, so nothing from the package may be imported here. It needs a
run in float64 that was `balanced` and `matched`, with all members present before the first step. Only initial weights,
data, routes, pairs and the order of additions are taken from the files; every weight and moment is recomputed.

The policies promise that a microbatch is counted in the same inner step at every stage (it carries its origin's step).
So when the run is replayed inner step by inner step, each version of the weights is known before it is needed.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from audit_record import (
    ALL,
    LASTING,
    InnerStep,
    Manifest,
    Record,
    Round,
    Route,
    check_routes,
    read_record,
    read_rounds,
    require,
)
from outer_reference import FrozenReplica, decoded, merged, merged_with_all
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from wire_reference import between_stages

TOLERANCE = 1e-9
"""Upper limit on max|a−b| / max|b| of a tensor, and on the relative error of a loss. Float64 achieves 1e-13."""
Tensors = dict[str, torch.Tensor]


@dataclass
class Replica:
    """A replica as the reference computes it; the keys of all dictionaries are the stage's global parameter names."""

    stage: int
    slow: Tensors
    fast: Tensors
    momentum: Tensors
    mean: Tensors
    square: Tensors
    """`mean` and `square` are of the parameters that AdamW moves."""
    updates: int = 0
    frozen: dict[int, FrozenReplica] = field(default_factory=dict)
    """Round → what was frozen. Every replica freezes every round, even if an earlier one is still open."""


@dataclass
class Report:
    """The result of a replay. No deviation in it is above TOLERANCE; that would have raised AssertionError."""

    deviations: dict[str, float] = field(default_factory=dict)
    """Kind → largest deviation; kinds are slow, frozen, fast, momentum, slow_after, adam_mean, adam_square, loss, and
    partner_vector for what was received from partners."""
    clip_norm: float = math.inf
    grad_norms: dict[int, list[float]] = field(default_factory=dict)
    """Stage → norm before clipping, for each inner step of each of its replicas."""
    tokens: set[int] = field(default_factory=set)
    """All token counts that microbatches had."""
    pairs: dict[int, list[dict[str, str | None]]] = field(default_factory=dict)
    """Stage → peer → partner, round by round."""
    delays: set[int] = field(default_factory=set)
    """Inner steps that replicas took between freezing a round and merging it."""

    def compare(self, kind: str, what: str, recorded: torch.Tensor, computed: torch.Tensor) -> None:
        """Raises AssertionError if the two differ in shape or dtype, or by more than TOLERANCE."""
        same = recorded.shape == computed.shape and recorded.dtype == computed.dtype
        require(same, f"{what}: {recorded.dtype} {tuple(recorded.shape)}, expected {tuple(computed.shape)} in float64")
        difference, scale = (recorded - computed).abs().max().item(), computed.abs().max().item()
        relative = 0.0 if difference == 0 else difference / scale if scale > 0 else math.inf
        require(relative <= TOLERANCE, f"{what}: deviates by {relative:.2e} of its largest value (at most {TOLERANCE})")
        self.deviations[kind] = max(self.deviations.get(kind, 0.0), relative)


@contextmanager
def float64_llama() -> Iterator[None]:
    """Keep Llama's RMSNorm and rotary angles in float64 inside the `with`; the stock versions go through float32."""

    def rmsnorm(self: Any, hidden_BTD: torch.Tensor) -> torch.Tensor:
        variance_BT1 = hidden_BTD.pow(2).mean(-1, keepdim=True)
        scaled: torch.Tensor = self.weight * (hidden_BTD * torch.rsqrt(variance_BT1 + self.variance_epsilon))
        return scaled

    def angles(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None] * self.inv_freq.double()
        both = torch.cat((half, half), dim=-1)
        return both.cos(), both.sin()

    stock = LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward
    LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward = rmsnorm, angles
    try:
        yield
    finally:
        LlamaRMSNorm.forward, LlamaRotaryEmbedding.forward = stock


def replay(audit: Path, manifest: Manifest, stages: dict[str, int]) -> Report:
    """Recompute the run whose files are in `audit`, and compare everything that it wrote.

    `manifest` has the keys of the run manifest, `stages` maps each peer id to its stage. Raises AssertionError with the
    replica, tensor and round where the run deviates from the algorithm, and KeyError or OSError if the files are not as
    documented.
    """
    report = Report(clip_norm=manifest["inner"]["clip_norm"])
    settings = (manifest["routing"], manifest["outer"]["pairing"], manifest["compute_dtype"])
    require(settings == ("balanced", "matched", "float64"), f"this run cannot be replayed: {settings}")
    record = read_record(audit, manifest, stages)
    with float64_llama():
        model = whole_model(manifest)
        replicas = initial_replicas(record, model, manifest)
        between_stages(model, [(one.stage, name) for one in replicas.values() for name in one.fast], manifest["wire"])
        routes, rounds = check_routes(record, manifest), read_rounds(record, manifest)
        for number in range(1, manifest["steps"] + 1):
            gradients = microbatch_gradients(record, report, model, replicas, routes[number - 1], number)
            for peer, replica in replicas.items():
                # Under `sync` all replicas of a stage take the step of all their microbatches.
                joint = record.replicas(replica.stage) if manifest["outer"]["rule"] == "sync" else [peer]
                servings = [serving for one in joint for serving in record.steps[one][number - 1].servings]
                line = replace(record.steps[peer][number - 1], servings=tuple(servings))
                inner_step(line, peer, replica, gradients, manifest, report)
            outer_rounds(record, replicas, rounds, number, manifest, report)
    for stage in range(record.depth):
        own = record.replicas(stage)
        partners = [{p: pairs[p].partner for p in own if p in pairs} for pairs in rounds.values()]
        report.pairs[stage] = partners
    return report


def require_variety(report: Report) -> None:
    """Raises AssertionError unless the run could reveal faults: at every stage, gradients were clipped in some inner
    steps and not in others; token counts differ; and in stages of three or more replicas, pairs change between
    rounds."""
    for stage, norms in sorted(report.grad_norms.items()):
        bound = f"the clip at {report.clip_norm} must bind in some inner steps of stage {stage} and not in others"
        least, largest = min(norms), max(norms)
        require(least < report.clip_norm < largest, f"{bound}; its gradients had norms of {least} to {largest}")
    require(len(report.tokens) > 1, f"all microbatches had {report.tokens} tokens")
    large = [rounds for rounds in report.pairs.values() if len(rounds[0]) > 2]
    changed = any(earlier != later for rounds in large for earlier, later in pairwise(rounds))
    require(changed or not large, "the pairs never changed")


def whole_model(manifest: Manifest) -> Any:
    """The unsplit model, for its structure only: `functional_call` supplies the weights. Dropout is off."""
    config = AutoConfig.for_model(manifest["model"]["family"], **manifest["model"]["config"])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.float64).eval()


def initial_replicas(record: Record, model: Any, manifest: Manifest) -> dict[str, Replica]:
    """Replicas with φ = θ and zero δ and moments. The stages' names are a partition of the model's, replicas equal."""
    replicas: dict[str, Replica] = {}
    optimizer = manifest["inner"]["optimizer"]
    names: list[str] = []
    for stage in range(record.depth):
        first: Tensors | None = None
        for peer in record.replicas(stage):
            found = load_file(record.audit / f"initial-{peer}.safetensors")
            # In the model's order, in which vectors are cut into chunks; anything else is refused below.
            weights = {name: found.pop(name) for name, _ in model.named_parameters() if name in found} | found
            names += list(weights) if first is None else []
            first = weights if first is None else first
            equal = weights.keys() == first.keys() and all(torch.equal(weights[name], first[name]) for name in first)
            require(equal, f"{peer} starts with other weights than the first replica of stage {stage}")
            zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
            squares = {name: zero for name, zero in zeros.items() if not by_muon(name, zero, optimizer)}
            replicas[peer] = Replica(stage, weights, weights, zeros, dict(zeros), squares)
    require(sorted(names) == sorted(dict(model.named_parameters())), "the stages' parameters are not the model's")
    return replicas


def microbatch_gradients(
    record: Record, report: Report, model: Any, replicas: dict[str, Replica], routes: dict[str, Route], number: int
) -> dict[str, Tensors]:
    """Microbatch id → gradients for all parameters, with each stage's weights taken from the replica on its route.

    Also checks the recorded losses and token counts, and that stage 0 counted exactly what it read.
    """
    gradients: dict[str, Tensors] = {}
    servings = {(peer, s.microbatch): s for peer, lines in record.steps.items() for s in lines[number - 1].servings}
    for origin in record.replicas(0):
        data = load_file(record.audit / f"batches-{origin}-{number:06}.safetensors")
        read = {key.partition("/")[2] for key in data}
        own = {name for name, route in routes.items() if route[0] == origin}
        require(read == own, f"inner step {number}: {origin} read {sorted(read)} and counted {sorted(own)}")
        for name in sorted(own):
            fast = [item for peer in routes[name] for item in replicas[peer].fast.items()]
            weights = {parameter: tensor.detach().requires_grad_() for parameter, tensor in fast}
            parts = [part for part in ("inputs", "targets", "mask") if f"{part}/{name}" in data]
            batch = {part: data[f"{part}/{name}"].long() for part in parts}
            loss = loss_sum(model, weights, batch)
            found = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
            # A gradient that was clipped on its return was clipped for that stage and all stages before it.
            clips = [servings[peer, name].clip for peer in routes[name]]
            factors = [math.prod(clips[at:]) for at, peer in enumerate(routes[name]) for _ in replicas[peer].fast]
            scaled = [factor * gradient for factor, gradient in zip(factors, found, strict=True)]
            gradients[name] = dict(zip(weights, scaled, strict=True))
            tokens = int((batch["targets"] != -100).sum())
            report.tokens.add(tokens)
            for peer in routes[name]:
                what = f"inner step {number}, {peer} (stage {record.stages[peer]}), {name}"
                recorded = servings[peer, name]
                require(recorded.tokens == tokens, f"{what}: {recorded.tokens} tokens recorded, {tokens} in the data")
                report.compare(
                    "loss", f"{what}: loss", torch.tensor(recorded.loss_sum, dtype=torch.float64), loss.detach()
                )
    return gradients


def loss_sum(model: Any, weights: Tensors, batch: Tensors) -> torch.Tensor:
    """Nats summed over the targets that are not −100; `inputs`, `targets` and, if there is one, `mask` are B×T."""
    call = {"input_ids": batch["inputs"], "attention_mask": batch.get("mask"), "use_cache": False}
    logits_BTV = functional_call(model, weights, kwargs=call).logits
    targets_N = batch["targets"].flatten()
    return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_N, ignore_index=-100, reduction="sum")


def learning_rate(t: int, manifest: Manifest) -> float:
    """METHOD.md, "Inner step": step t, from 1: linear warm-up, then a cosine over the remaining steps."""
    inner, steps = manifest["inner"], manifest["steps"]
    peak, final = inner["peak_learning_rate"], inner["final_fraction"]
    warmup = min(inner["warmup_steps"], steps // 10)
    if t <= warmup:
        return float(peak * t / warmup)
    cosine = (1 + math.cos(math.pi * (t - warmup) / (steps - warmup))) / 2
    return float(peak * (final + (1 - final) * cosine))


def inner_step(
    line: InnerStep, peer: str, replica: Replica, gradients: dict[str, Tensors], manifest: Manifest, report: Report
) -> None:
    """METHOD.md, "Inner step": the sum over the microbatches, divided by the tokens, clipped, then a step."""
    inner, rate = manifest["inner"], learning_rate(line.inner_step, manifest)
    what = f"inner step {line.inner_step}, {peer} (stage {replica.stage})"
    agree = math.isclose(rate, line.learning_rate, rel_tol=1e-12)
    require(agree, f"{what}: learning rate {line.learning_rate}, expected {rate}")
    tokens = sum(serving.tokens for serving in line.servings)
    require(tokens > 0, f"{what}: no tokens")
    total = {name: torch.zeros_like(tensor) for name, tensor in replica.fast.items()}
    for serving in line.servings:
        for name in total:
            total[name] = total[name] + gradients[serving.microbatch][name]
    gradient = {name: tensor / tokens for name, tensor in total.items()}
    norm = math.sqrt(sum(tensor.square().sum().item() for tensor in gradient.values()))
    factor = min(1.0, inner["clip_norm"] / (norm + 1e-6))
    report.grad_norms.setdefault(replica.stage, []).append(norm)
    replica.updates += 1
    beta1, beta2, t = inner["beta1"], inner["beta2"], replica.updates
    fast: Tensors = {}
    for name, theta in replica.fast.items():
        g = gradient[name] * factor
        muon = by_muon(name, theta, inner["optimizer"])
        own_rate = rate * (inner["adamw_factor"] if inner["optimizer"] == "muon" and not muon else 1)
        decayed = theta * (1 - own_rate * inner["weight_decay"])
        if muon:
            replica.mean[name] = 0.95 * replica.mean[name] + 0.05 * g
            direction = newton_schulz(0.05 * g + 0.95 * replica.mean[name])
            fast[name] = decayed - 0.2 * math.sqrt(max(theta.shape)) * rate * direction
            continue
        replica.mean[name] = beta1 * replica.mean[name] + (1 - beta1) * g
        replica.square[name] = beta2 * replica.square[name] + (1 - beta2) * g * g
        mean_hat, square_hat = replica.mean[name] / (1 - beta1**t), replica.square[name] / (1 - beta2**t)
        fast[name] = decayed - own_rate * mean_hat / (square_hat.sqrt() + inner["eps"])
    replica.fast = fast


def by_muon(name: str, tensor: torch.Tensor, optimizer: str) -> bool:
    """Whether Muon moves it: whether it is a matrix of a numbered layer (Llama and GPT-2 only)."""
    return optimizer == "muon" and tensor.ndim == 2 and (".layers." in name or ".h." in name)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """M1's X (https://kellerjordan.github.io/posts/muon/), by its singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm().clamp(min=1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    orthogonal: torch.Tensor = left @ torch.diag(values) @ right
    return orthogonal


def outer_rounds(
    record: Record,
    replicas: dict[str, Replica],
    rounds: dict[int, dict[str, Round]],
    number: int,
    manifest: Manifest,
    report: Report,
) -> None:
    """Do what follows inner step `number`: merge rounds that were open, then freeze others, and merge those.

    At the end of the run, rounds that are still open, and the last round, are merged after the rounds that fall due
    there are frozen.
    """
    m, steps = manifest["outer"]["inner_steps"], manifest["steps"]
    waited = {peer for peer in replicas if number == steps and rounds and peer not in rounds[max(rounds)]}
    for before in (True, False):
        for round in rounds:
            if number == min(round * m, steps) and not before:
                for replica in replicas.values():
                    replica.frozen[round] = FrozenReplica(replica.fast, replica.slow, replica.momentum)
        for round, by_peer in rounds.items():
            for peer, one in by_peer.items():
                if one.merged_after == number and (one.frozen_after < number and peer not in waited) == before:
                    report.delays.add(number - one.frozen_after)
                    merge(record, replicas, peer, (round, one), manifest, report)


def merge(
    record: Record,
    replicas: dict[str, Replica],
    peer: str,
    which: tuple[int, Round],
    manifest: Manifest,
    report: Report,
) -> None:
    """Apply the rule and N3 (METHOD.md, "Outer rules") to one replica, and compare the result with its round file."""
    (number, one), replica, outer = which, replicas[peer], manifest["outer"]
    frozen, has_slow = replica.frozen[number], outer["rule"] not in LASTING
    recorded = load_file(record.audit / f"round-{number:06}-{peer}.safetensors")
    theirs, lag, taken = None, 0, dict[str, Tensors]()
    if one.partner is not None:
        partner = replicas[one.partner].frozen[one.partner_round]
        used = [
            {name: recorded[f"partner_vector{at or ''}/{name}"] for name in replica.fast}
            for at in range(len(partner.offered(outer)))
        ]
        theirs = partner, decoded(frozen, partner, used, outer, one.factors, one.limits)
        taken = {f"partner_vector{at or ''}": part for at, part in enumerate(theirs[1])}
        lag = abs(min(one.partner_round * outer["inner_steps"], manifest["steps"]) - one.frozen_after)
    after = merged(frozen, theirs, lag, outer)
    if outer["rule"] in ALL:
        group = [replicas[each].frozen[number] for each in record.replicas(replica.stage)]
        after = merged_with_all(group, frozen, outer)
    computed = {"frozen": frozen.fast, "fast": replica.fast}
    if has_slow:
        computed |= {"slow": replica.slow, "momentum": replica.momentum}
        computed |= {"slow_after": after["slow"], "momentum_after": after["momentum"]}
    computed |= {"adam_mean": replica.mean, "adam_square": replica.square} | taken
    expected = {f"{kind}/{name}" for kind, tensors in computed.items() for name in tensors}
    where = f"round {number}, {peer} (stage {replica.stage})"
    require(recorded.keys() == expected, f"{where}: tensors {sorted(recorded.keys() ^ expected)}")
    for kind, tensors in computed.items():
        for name, tensor in tensors.items():
            report.compare(kind, f"{where}: {kind}/{name}", recorded[f"{kind}/{name}"], tensor)
    replica.fast = {name: base + (replica.fast[name] - frozen.fast[name]) for name, base in after["fast"].items()}  # N3
    if has_slow:
        replica.slow, replica.momentum = after["slow"], after["momentum"]
