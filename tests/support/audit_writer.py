"""A small lockstep run that writes audit files, with one planted fault or none, to test the reference on.

It is implemented differently from the reference: stage by stage, with torch's AdamW and clipping, and N1 in its
one-vector form.
"""

import copy
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from reference import Tensors, whole_model
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from noloco_p2p.config import InnerSettings, ModelSettings, OuterSettings, RunManifest, WireSettings
from noloco_p2p.core.pairing import matching
from noloco_p2p.core.routing import balanced_owner
from noloco_p2p.core.schedule import learning_rate

B, T, VOCABULARY, REPLICAS = 2, 8, 32, 3
STAGES = {f"s{stage}r{rank}": stage for stage in (0, 1) for rank in range(REPLICAS)}
"""Peer id → stage."""
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": T,
        "vocab_size": VOCABULARY,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": T,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    },
}
"""Family → fields of its configuration."""


def run_manifest(family: str, *, overlap: bool = False) -> RunManifest:
    """Three outer rounds, the last one shortened; gradients are clipped in some inner steps only."""
    return RunManifest(
        seed=3,
        model=ModelSettings(family=family, config=MODELS[family]),
        sequence_length=T,
        microbatch_size=B,
        microbatches_per_step=2,
        steps=5,
        inner=InnerSettings(optimizer="adamw", peak_learning_rate=1e-2, clip_norm=1.05),
        outer=OuterSettings(rule="noloco", inner_steps=2, overlap=overlap),
        routing="balanced",
        wire=WireSettings(forward="float64", backward="float64"),
        compute_dtype="float64",
    )


@dataclass(frozen=True)
class OpenRound:
    """What a replica froze, until the merge `delay` inner steps later."""

    number: int
    partner: str
    """Empty: none."""
    delay: int
    fast: Tensors
    slow: Tensors
    delta: Tensors
    vector: Tensors


@dataclass
class Twin:
    """One simulated replica: a whole model, of which it uses one stage, its optimizer, and φ and δ by name."""

    peer: str
    stage: int
    model: Any
    optimizer: torch.optim.AdamW
    parameters: dict[str, torch.nn.Parameter]
    slow: Tensors
    momentum: Tensors
    tokens: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)
    """The entries of `microbatches` for the current inner step."""
    open: OpenRound | None = None
    rounds: dict[int, OpenRound] = field(default_factory=dict)


class Simulation:
    """A lockstep run of 2 stages × 3 replicas that writes audit files, with one planted `fault` or none ("").

    `delays`: inner steps that replicas train on during a round, in turn; the last round is waited for.
    """

    def __init__(self, audit: Path, manifest: RunManifest, fault: str, delays: tuple[int, ...] = (0,)) -> None:
        self.audit, self.manifest, self.fault, self.delays = audit, manifest, fault, delays
        self.rng = random.Random(7)
        self.twins: dict[str, Twin] = {}

    def run(self) -> None:
        """Simulate and write everything."""
        torch.manual_seed(1)
        model = whole_model(self.manifest.model_dump())
        for peer, stage in STAGES.items():
            self.twins[peer] = self.make(peer, stage, copy.deepcopy(model))
        m = self.manifest.outer.inner_steps
        for number in range(1, self.manifest.steps + 1):
            self.inner_step(number)
            self.merge_due(number)
            if number % m == 0 or number == self.manifest.steps:
                self.freeze(-(-number // m))
                self.merge_due(number)

    def merge_due(self, number: int) -> None:
        """Merge the open rounds whose delay is over after `number` inner steps."""
        m, steps = self.manifest.outer.inner_steps, self.manifest.steps
        for twin in self.twins.values():
            if twin.open is not None and number >= min(m * twin.open.number + twin.open.delay, steps):
                twin.open = replace(twin.open, delay=number - min(m * twin.open.number, steps))
                self.merge(twin, number)
                twin.open = None

    def make(self, peer: str, stage: int, model: Any) -> Twin:
        early = ("wte.", "wpe.", "embed_tokens.", "h.0.", "layers.0.")
        own = {n: p for n, p in model.named_parameters() if any(part in n for part in early) == (stage == 0)}
        with torch.no_grad():
            for parameter in own.values():
                parameter += 0.08 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(stage))
        inner = self.manifest.inner
        optimizer = torch.optim.AdamW(own.values(), betas=(inner.beta1, inner.beta2), eps=inner.eps, weight_decay=0.0)
        slow = {name: parameter.detach().clone() for name, parameter in own.items()}
        save_file(slow, self.audit / f"initial-{peer}.safetensors")
        return Twin(peer, stage, model, optimizer, own, slow, {name: torch.zeros_like(t) for name, t in slow.items()})

    def replicas(self, stage: int) -> list[Twin]:
        return [twin for twin in self.twins.values() if twin.stage == stage]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both B×T; the end is padding and does not count."""
        rows = [[self.rng.randrange(VOCABULARY) for _ in range(T + 1)] for _ in range(B)]
        tokens = torch.tensor(rows, dtype=torch.int32)
        targets_BT = tokens[:, 1:].clone()
        targets_BT[:, self.rng.randrange(2, T) :] = -100
        return tokens[:, :-1].clone(), targets_BT

    def serve(self, name: str, first: Twin, second: Twin, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One microbatch through both stages and back, gradients added to both replicas."""
        inputs_BT, targets_BT = batch
        targets_N = targets_BT.long().flatten()
        tokens = int((targets_N != -100).sum())
        hidden_BTD = stage_forward(first.model, 0, inputs_BT.long())
        leaf_BTD = hidden_BTD.detach().requires_grad_()
        loss = cross_entropy(stage_forward(second.model, 1, leaf_BTD).flatten(0, 1), targets_N, reduction="sum")
        *late, grad_BTD = torch.autograd.grad(loss, [*second.parameters.values(), leaf_BTD])
        planted = first.peer == "s0r1" and name.endswith("-5")
        if self.fault == "gradient came back another path" and planted:
            other = next(twin for twin in self.replicas(1) if twin is not second)
            detour = cross_entropy(stage_forward(other.model, 1, leaf_BTD).flatten(0, 1), targets_N, reduction="sum")
            (grad_BTD,) = torch.autograd.grad(detour, leaf_BTD)
        early = torch.autograd.grad(hidden_BTD, list(first.parameters.values()), grad_BTD)
        neighbours = {first.peer: (None, second.peer), second.peer: (first.peer, None)}
        for twin, gradient in ((first, early), (second, late)):
            times = 1
            if planted and twin is second:
                times = {"lost": 0, "counted twice": 2}.get(self.fault.removesuffix(" in the record"), 1)
            previous, following = neighbours[twin.peer]
            line = {"id": name, "previous": previous, "next": following, "tokens": tokens, "loss_sum": loss.item()}
            twin.lines += [line] * (times if "in the record" in self.fault else 1)
            for parameter, tensor in zip(twin.parameters.values(), gradient, strict=True):
                so_far = torch.zeros_like(tensor) if parameter.grad is None else parameter.grad
                parameter.grad = so_far + times * tensor / (tokens if self.fault == "mean of means" else 1)
            twin.tokens += times * (1 if self.fault == "mean of means" else tokens)

    def inner_step(self, number: int) -> None:
        seed, per_step = self.manifest.seed, self.manifest.microbatches_per_step
        firsts, seconds = self.replicas(0), [twin.peer for twin in self.replicas(1)]
        data: dict[str, dict[str, torch.Tensor]] = {twin.peer: {} for twin in firsts}
        slots = [(index, rank) for index in range(per_step) for rank in range(REPLICAS)]
        self.rng.shuffle(slots)
        for index, rank in slots:
            first, batch = firsts[rank], self.batch()
            name = f"{first.peer}-{rank + 10:016x}-{(number - 1) * per_step + index}"
            data[first.peer] |= {f"inputs/{name}": batch[0], f"targets/{name}": batch[1]}
            if self.manifest.model.family == "gpt2":
                data[first.peer][f"mask/{name}"] = torch.ones(B, T, dtype=torch.uint8)
            step = 0 if self.fault == "one permutation for ever" else number - 1
            slot = rank if self.fault == "one permutation for ever" else index * REPLICAS + rank
            slot = 0 if self.fault == "uneven load" and slot == 1 else slot
            self.serve(name, first, self.twins[balanced_owner(seed, 1, step, slot, REPLICAS, seconds)], batch)
        for peer, tensors in data.items():
            save_file(tensors, self.audit / f"batches-{peer}-{number:06}.safetensors")
        self.clip()
        for twin in self.twins.values():
            self.update(twin, number)

    def clip(self) -> None:
        """Divide the accumulated gradients, then clip them stage by stage."""
        for twin in self.twins.values():
            divisor = len(twin.lines) if self.fault == "division by microbatches" else twin.tokens
            for parameter in twin.parameters.values():
                assert parameter.grad is not None
                parameter.grad /= divisor
        groups = [[twin] for twin in self.twins.values()]
        if self.fault == "clip over the whole model":
            groups = [list(pair) for pair in zip(self.replicas(0), self.replicas(1), strict=True)]
        for group in groups:
            own = [parameter for twin in group for parameter in twin.parameters.values()]
            torch.nn.utils.clip_grad_norm_(own, self.manifest.inner.clip_norm)

    def update(self, twin: Twin, number: int) -> None:
        """AdamW, and one line in the steps file."""
        inner, steps = self.manifest.inner, self.manifest.steps
        t = number + 1 if self.fault == "learning rate of the next step" else number
        rate = learning_rate(t, steps, inner.peak_learning_rate, inner.warmup_steps, inner.final_fraction)
        twin.optimizer.param_groups[0]["lr"] = rate
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        line = {"inner_step": number, "step": number - 1, "learning_rate": rate, "microbatches": twin.lines}
        with (self.audit / f"steps-{twin.peer}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        twin.lines, twin.tokens = [], 0

    def freeze(self, number: int) -> None:
        """Freeze θ_f of all replicas, and u = β·Δ + γ·φ, the one vector that suffices (METHOD.md, "Outer round")."""
        o = self.manifest.outer
        beta = -o.beta if self.fault == "sign of beta" else o.beta
        gamma = 0.0 if self.fault == "gamma 0" else o.gamma
        partners = matching(self.manifest.seed, number, list(STAGES)[:REPLICAS])
        partners |= matching(self.manifest.seed, number, list(STAGES)[REPLICAS:])
        if self.fault == "one-sided pull":
            del partners[max(partners)]
        for rank, twin in enumerate(self.twins.values()):
            fast = {name: parameter.detach().clone() for name, parameter in twin.parameters.items()}
            deltas = {name: fast[name] - phi for name, phi in twin.slow.items()}
            vector = {name: beta * deltas[name] + gamma * phi for name, phi in twin.slow.items()}
            delay = self.delays[rank % len(self.delays)]
            twin.open = OpenRound(number, partners.get(twin.peer, ""), delay, fast, dict(twin.slow), deltas, vector)
            twin.rounds[number] = twin.open

    def merge(self, twin: Twin, taken: int) -> None:
        """N1 as δ ← α·δ + mean u_j − γ·φ, and N3, after `taken` inner steps."""
        o, opened = self.manifest.outer, twin.open
        assert opened is not None, "only an open round can be merged"
        gamma = 0.0 if self.fault == "gamma 0" else o.gamma
        partner = self.twins[opened.partner].rounds[opened.number] if opened.partner else opened
        tensors: Tensors = {}
        for name, parameter in twin.parameters.items():
            fast = parameter.detach().clone()
            tensors |= {f"slow/{name}": twin.slow[name], f"momentum/{name}": twin.momentum[name]}
            tensors |= {f"frozen/{name}": opened.fast[name], f"fast/{name}": fast}
            if opened.partner:
                tensors[f"partner_vector/{name}"] = partner.vector[name].clone()
            mean = torch.stack([opened.vector[name], partner.vector[name]]).mean(dim=0)
            twin.momentum[name] = o.alpha * twin.momentum[name] + mean - gamma * twin.slow[name]
            twin.slow[name] = twin.slow[name] + twin.momentum[name]
            tensors |= {f"momentum_after/{name}": twin.momentum[name], f"slow_after/{name}": twin.slow[name]}
            adam = twin.optimizer.state[parameter]
            tensors |= {f"adam_mean/{name}": adam["exp_avg"], f"adam_square/{name}": adam["exp_avg_sq"]}
            trained = {"progress lost": 0.0, "progress counted twice": 2.0}.get(self.fault, 1.0)
            with torch.no_grad():
                parameter.copy_(twin.slow[name] + trained * (fast - opened.fast[name]))
        pair = {"partner_id": opened.partner, "partner_round": str(opened.number) if opened.partner else ""}
        counts = {"frozen_after": str(taken - opened.delay), "merged_after": str(taken)}
        constants = {"alpha": str(o.alpha), "beta": str(o.beta), "gamma": str(o.gamma)}
        path = self.audit / f"round-{opened.number:06}-{twin.peer}.safetensors"
        named = {"round": str(opened.number), "peer_id": twin.peer}
        save_file(tensors, path, metadata=named | pair | counts | constants)
        if self.fault == "Adam reset at an outer round":
            twin.optimizer.state.clear()


def stage_forward(model: Any, stage: int, arriving: torch.Tensor) -> torch.Tensor:
    """Stage 0: B×T tokens → B×T×D hidden states; stage 1: hidden states → B×T×V logits. Layer `stage` of two."""
    positions_1T = torch.arange(T)[None]
    hidden_BTD = arriving
    if model.config.model_type == "gpt2":
        body = model.transformer
        if stage == 0:
            hidden_BTD = body.wte(arriving) + body.wpe(positions_1T)
        hidden_BTD = body.h[stage](hidden_BTD)
        norm = body.ln_f
    else:
        body = model.model
        if stage == 0:
            hidden_BTD = body.embed_tokens(arriving)
        hidden_BTD = body.layers[stage](hidden_BTD, position_embeddings=body.rotary_emb(hidden_BTD, positions_1T))
        norm = body.norm
    leaving: torch.Tensor = model.lm_head(norm(hidden_BTD)) if stage == 1 else hidden_BTD
    return leaving
