"""Outer rules: what a replica offers others at a round, and how its tensors move with what it was given.

METHOD.md, "Outer rules". A rule knows one parameter at a time, as a mapping from kind to value: `fast` is θ_f, θ at the
moment at which the round was frozen; what else a rule keeps of a parameter is in its `kinds`. Values are of any type
with + - *. Nothing else in a node knows which rule is set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from noloco_p2p.core import outer_update
from noloco_p2p.core.outer_update import mean, total
from noloco_p2p.core.tiles import Transform, Untransformed

RuleName = Literal["noloco", "averaged", "gossip", "diloco", "dct", "sync"]
Values = Mapping[str, Any]
"""Of one parameter, by kind."""
Offer = tuple[Any, ...]
"""Of one parameter: what a replica lets others have of it."""


class OuterRule(Protocol):
    """One rule with its settings."""

    kinds: ClassVar[tuple[str, ...]]
    """What it keeps of every parameter beside θ: of `slow` (φ) and `momentum` (δ)."""
    offered: ClassVar[int] = 1
    """Values in an offer, each of the parameter's size."""
    common: ClassVar[tuple[str, ...]] = ()
    """Of `fast` and its kinds, what is equal on all replicas of a stage, for the rule takes from all of them; empty: it
    takes from one peer."""
    gradients: ClassVar[bool] = False
    """What is offered is the `gradient` of the step's microbatches, summed, before the inner step, and not weights
    after it."""
    sparse: ClassVar[bool] = False
    """Most of what is offered is 0, and only the rest travels (`core.tiles`)."""
    lasting: ClassVar[bool] = False
    """Alone it moves nothing: a round may last until the partner's vector is there, beyond others that are due."""

    @property
    def gain(self) -> float:
        """How far the second value offered moves the first in the end, per unit of its length; 0: not at all."""
        return 0.0

    @property
    def instability(self) -> str | None:
        """Why replicas would drift apart with these settings, in one line; None: they do not."""
        return None

    def start(self, theta: Any) -> dict[str, Any]:
        """Its kinds for weights that are new: φ = θ, δ = 0."""
        return {kind: theta if kind == "slow" else theta - theta for kind in self.kinds}

    def offer(self, own: Values) -> Offer:
        """What a replica freezes of a parameter for others."""

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """The kinds after a round, and `fast`: what θ_f becomes. What was trained since then is carried over (N3).

        `members` are the offers of the group, this replica's at place `mine`, in an order that all of them share. Under
        a rule that takes from all, the replica itself may be none of them: then `mine` is −1.
        `lag`: how many steps of the clock apart the others' were frozen, the mean. No argument is changed.
        """


@dataclass(frozen=True, slots=True)
class Noloco(OuterRule):
    """N1 and N2 of the paper (arXiv 2506.10911), with one vector in place of two."""

    alpha: float
    beta: float
    gamma: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")

    @property
    def instability(self) -> str | None:
        """S1 (METHOD.md, "Stability"), and an outer learning rate of its own."""
        if self.beta <= 0:
            return f"beta {self.beta:g} is no outer learning rate: it must be above 0"
        return outer_update.instability(alpha=self.alpha, gamma=self.gamma)

    def offer(self, own: Values) -> Offer:
        """u = β·Δ + γ·φ."""
        return (outer_update.round_vector(own["slow"], own["fast"] - own["slow"], beta=self.beta, gamma=self.gamma),)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """N1 and N2."""
        vectors = [offer[0] for offer in members]
        slow, momentum = outer_update.outer_step(
            own["slow"], own["momentum"], vectors, alpha=self.alpha, gamma=self.gamma
        )
        return {"slow": slow, "momentum": momentum, "fast": slow}


@dataclass(frozen=True, slots=True)
class Averaged(OuterRule):
    """φ and the outer momentum are averaged over the pair: both replicas leave the round with the same φ and δ.

    Stable: δ is bounded for α < 1, which settings are checked for.
    """

    alpha: float
    beta: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")
    offered: ClassVar[int] = 2

    @property
    def gain(self) -> float:
        """Momentum adds up to 1 + α + α² + …"""
        return 1 / (1 - self.alpha)

    def offer(self, own: Values) -> Offer:
        """φ, and α·δ + β·Δ."""
        return own["slow"], own["momentum"] * self.alpha + (own["fast"] - own["slow"]) * self.beta

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """δ ← mean (α·δ + β·Δ), φ ← mean φ + δ."""
        slow, momentum = (mean(values) for values in zip(*members, strict=True))
        slow = slow + momentum
        return {"slow": slow, "momentum": momentum, "fast": slow}


@dataclass(frozen=True, slots=True)
class Gossip(OuterRule):
    """Replicas average θ in pairs, often: θ_i ← θ_i + w·(θ_j − θ_i), with no slow weights and no momentum.

    CHOCO-SGD (arXiv 1902.00340) and Moniqua (arXiv 2002.11787): what travels may be few bits of the difference. The
    weight of what is old shrinks: w = γ / (1 + lag / m).
    """

    gamma: float
    inner_steps: int
    kinds: ClassVar[tuple[str, ...]] = ()
    lasting: ClassVar[bool] = True

    @property
    def instability(self) -> str | None:
        """A pair's distance is multiplied by 1 − 2γ when both move."""
        if 0 < self.gamma < 1:
            return None
        return f"gamma {self.gamma:g} drives pairs apart: it must lie between 0 and 1 (at ½ they meet)"

    def offer(self, own: Values) -> Offer:
        """θ_f."""
        return (own["fast"],)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """θ_f + w·(mean of the others − mine), each as it was frozen: what coding costs is the same for both."""
        others = [offer[0] for at, offer in enumerate(members) if at != mine]
        if not others:
            return {"fast": own["fast"]}
        weight = self.gamma / (1 + lag / self.inner_steps)
        return {"fast": own["fast"] + (mean(others) - members[mine][0]) * weight}


@dataclass(frozen=True, slots=True)
class Diloco(OuterRule):
    """Δ is averaged over all replicas of the stage; outer SGD with Nesterov's momentum (arXiv 2311.08105).

    As torch.optim.SGD(nesterov=True) on φ with the gradient −mean Δ; δ is its momentum buffer, with the other sign.
    """

    alpha: float
    beta: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")
    common: ClassVar[tuple[str, ...]] = ("slow", "momentum")

    @property
    def instability(self) -> str | None:
        """φ is the same on all replicas: nothing drifts apart."""
        return None if self.beta > 0 else f"beta {self.beta:g} is no outer learning rate: it must be above 0"

    def offer(self, own: Values) -> Offer:
        """Δ."""
        return (own["fast"] - own["slow"],)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """δ ← α·δ + mean Δ, φ ← φ + β·(mean Δ + α·δ)."""
        delta = mean([offer[0] for offer in members])
        momentum = own["momentum"] * self.alpha + delta
        slow = own["slow"] + (delta + momentum * self.alpha) * self.beta
        return {"slow": slow, "momentum": momentum, "fast": slow}


@dataclass(frozen=True, slots=True)
class Dct(Diloco):
    """Decoupled momentum (arXiv 2510.03371): of the momentum's DCT only the largest coefficients are exchanged.

    δ is kept as its coefficients, and is each replica's own: φ moves by what all share (METHOD.md, "Outer rules").
    """

    transform: Transform = field(default_factory=Untransformed)
    common: ClassVar[tuple[str, ...]] = ("slow",)
    sparse: ClassVar[bool] = True

    def offer(self, own: Values) -> Offer:
        """q, the largest coefficients of α·δ + Δ."""
        return (self.transform.largest(self._momentum(own)),)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """δ ← α·δ + Δ − q + mean q, φ ← φ + β·(mean q)."""
        shared = mean([offer[0] for offer in members])
        (sent,) = members[mine] if mine >= 0 else self.offer(own)
        slow = own["slow"] + self.transform.inverse(shared) * self.beta
        return {"slow": slow, "momentum": self._momentum(own) - sent + shared, "fast": slow}

    def _momentum(self, own: Values) -> Any:
        return own["momentum"] * self.alpha + self.transform.forward(own["fast"] - own["slow"])


@dataclass(frozen=True, slots=True)
class Sync(OuterRule):
    """Data parallel: gradients of all replicas of the stage are added up before every inner step."""

    kinds: ClassVar[tuple[str, ...]] = ()
    common: ClassVar[tuple[str, ...]] = ("fast",)
    gradients: ClassVar[bool] = True

    def offer(self, own: Values) -> Offer:
        """The summed gradient."""
        return (own["gradient"],)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """`gradient`: the sum over all."""
        return {"gradient": total([offer[0] for offer in members])}


_PAIRS: Mapping[str, Any] = {"codec": "full", "max_stale_rounds": 2, "overlap": True}
_ALL: Mapping[str, Any] = {"codec": "full", "max_stale_rounds": 0, "overlap": False}
_GOSSIP: Mapping[str, Any] = {"codec": "int4", "max_stale_rounds": 16, "overlap": True}
DEFAULTS: Mapping[RuleName, Mapping[str, Any]] = {
    "gossip": {**_GOSSIP, "alpha": 0.0, "beta": 0.0, "gamma": 0.5, "inner_steps": 1},
    "noloco": {**_PAIRS, "alpha": 0.5, "beta": 0.7, "gamma": 0.7, "inner_steps": 10},
    "averaged": {**_PAIRS, "alpha": 0.5, "beta": 0.7, "gamma": 0.0, "inner_steps": 10},
    "diloco": {**_ALL, "alpha": 0.9, "beta": 0.7, "gamma": 0.0, "inner_steps": 500},
    "dct": {**_ALL, "alpha": 0.95, "beta": 0.7, "gamma": 0.0, "inner_steps": 128},
    "sync": {**_ALL, "alpha": 0.0, "beta": 0.0, "gamma": 0.0, "inner_steps": 1},
}
"""Settings of a rule, by name (config.OuterSettings), where nobody sets them; 0 for those that it does not have."""


def state_kinds(rule: OuterRule) -> tuple[str, ...]:
    """What a replica's state has of every parameter: θ, what the rule keeps, and the two moments of Adam."""
    return ("fast", *rule.kinds, "adam_mean", "adam_square")


def vector_size(rule: OuterRule, parameters: int) -> int:
    """Values of what a replica offers of so many parameters; behind gradients comes their number of tokens."""
    return rule.offered * parameters + rule.gradients


def make_rule(name: RuleName, *, alpha: float, beta: float, gamma: float, inner_steps: int) -> OuterRule:
    """The rule of that name."""
    match name:
        case "noloco":
            return Noloco(alpha, beta, gamma)
        case "averaged":
            return Averaged(alpha, beta)
        case "gossip":
            return Gossip(gamma, inner_steps)
        case "diloco":
            return Diloco(alpha, beta)
        case "dct":
            return Dct(alpha, beta)
        case "sync":
            return Sync()
