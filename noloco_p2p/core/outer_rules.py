"""Outer rules: what a replica offers to others in a round, and how its tensors move with what it receives.

METHOD.md, "Outer rules". A rule handles one parameter at a time, as a mapping from kind to value: `fast` is θ_f, θ at
the moment when the round was frozen; `kinds` names what else the rule keeps for a parameter. Values may be of any type
with +, - and *. The rest of a node knows a rule only by the attributes of `OuterRule`, except that `compute` gives
`Dct` its transform.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from noloco_p2p.core import outer_update
from noloco_p2p.core.outer_update import mean, total
from noloco_p2p.core.tiles import Transform, Untransformed

RuleName = Literal["noloco", "averaged", "gossip", "diloco", "dct", "sync"]
Values = Mapping[str, Any]
"""The values of one parameter, by kind."""
Offer = tuple[Any, ...]
"""What a replica offers of one parameter."""


class OuterRule(Protocol):
    """One rule with its settings."""

    kinds: ClassVar[tuple[str, ...]]
    """What it keeps for every parameter in addition to θ: of `slow` (φ) and `momentum` (δ)."""
    offered: ClassVar[int] = 1
    """Number of values in an offer, each of the parameter's size."""
    common: ClassVar[tuple[str, ...]] = ()
    """Those of `fast` and `kinds` that are equal on all replicas of a stage. Empty if the rule takes from one peer; a
    rule that takes from all replicas has at least one."""
    gradients: ClassVar[bool] = False
    """The offer is the summed `gradient` of the step's microbatches, before the inner step, instead of weights after
    it."""
    sparse: ClassVar[bool] = False
    """Most values of an offer are 0, and only the others travel (`core.tiles`)."""
    lasting: ClassVar[bool] = False
    """The rule moves nothing without a partner, so a round may stay open until the partner's vector arrives, even if
    further rounds fall due meanwhile."""

    @property
    def gain(self) -> float:
        """How far the second offered value eventually moves the first, per unit of its norm; 0 if not at all."""
        return 0.0

    @property
    def instability(self) -> str | None:
        """Why training would be unstable with these settings, in one line; None if it would not.

        Here only the outer learning rate, if the rule has one. Under `averaged` δ is bounded for α < 1, and the
        settings allow no other α; under `diloco` and `dct` φ is the same on all replicas, so nothing drifts apart.
        """
        return _stands_still(getattr(self, "beta", 1.0))

    def start(self, theta: Any) -> dict[str, Any]:
        """The kinds for new weights: φ = θ, δ = 0."""
        return {kind: theta if kind == "slow" else theta - theta for kind in self.kinds}

    def offer(self, own: Values) -> Offer:
        """What a replica freezes of a parameter and offers to others."""

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """The kinds after a round, and as `fast` what θ_f becomes. The caller carries over what was trained since (N3).

        `members` are the offers of the group, in an order that all members share, with this replica's at index `mine`.
        Under a rule that takes from all replicas, this one may not be a member: then `mine` is −1.
        `lag`: how many steps of the clock lie between this replica's freeze and the others', on average. No argument is
        modified.
        """


@dataclass(frozen=True, slots=True)
class Noloco(OuterRule):
    """N1 and N2 of the paper (arXiv 2506.10911), with one vector instead of two."""

    alpha: float
    beta: float
    gamma: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")

    @property
    def instability(self) -> str | None:
        """Checks the outer learning rate, and S1 (METHOD.md, "Stability")."""
        return _stands_still(self.beta) or outer_update.instability(alpha=self.alpha, gamma=self.gamma)

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
    """Averages φ and the outer momentum over the pair: both replicas leave the round with the same φ and δ."""

    alpha: float
    beta: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")
    offered: ClassVar[int] = 2

    @property
    def gain(self) -> float:
        """Momentum adds up to 1 + α + α² + … = 1 / (1 − α)."""
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
    """Pairs of replicas average θ often: θ_i ← θ_i + w·(θ_j − θ_i), without slow weights and without momentum.

    Sources: CHOCO-SGD (arXiv 1902.00340) and Moniqua (arXiv 2002.11787). Only a few bits of the difference need to
    travel. Older vectors weigh less: w = γ / (1 + lag / m).
    """

    gamma: float
    inner_steps: int
    kinds: ClassVar[tuple[str, ...]] = ()
    lasting: ClassVar[bool] = True

    @property
    def instability(self) -> str | None:
        """If both replicas of a pair move, their distance is multiplied by 1 − 2γ."""
        if 0 < self.gamma < 1:
            return None
        return f"gamma {self.gamma:g} drives pairs apart: it must lie between 0 and 1 (at ½ they meet)"

    def offer(self, own: Values) -> Offer:
        """θ_f."""
        return (own["fast"],)

    def merge(self, own: Values, members: Sequence[Offer], mine: int, lag: float) -> dict[str, Any]:
        """θ_f + w·(mean of the others − mine), all as they were frozen, so both of a pair see the same coding error."""
        others = [offer[0] for at, offer in enumerate(members) if at != mine]
        if not others:
            return {"fast": own["fast"]}
        weight = self.gamma / (1 + lag / self.inner_steps)
        return {"fast": own["fast"] + (mean(others) - members[mine][0]) * weight}


@dataclass(frozen=True, slots=True)
class Diloco(OuterRule):
    """Averages Δ over all replicas of the stage; outer SGD with Nesterov's momentum (arXiv 2311.08105).

    The same as torch.optim.SGD(nesterov=True) on φ with the gradient −mean Δ; δ is its momentum buffer with the
    opposite sign.
    """

    alpha: float
    beta: float
    kinds: ClassVar[tuple[str, ...]] = ("slow", "momentum")
    common: ClassVar[tuple[str, ...]] = ("slow", "momentum")

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
    """Decoupled momentum (arXiv 2510.03371): only the largest coefficients of the momentum's DCT are exchanged.

    δ is kept as coefficients and is private to each replica; φ moves only by what all share (METHOD.md, "Outer rules").
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
    """Data parallelism: the gradients of all replicas of the stage are summed before every inner step."""

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
"""The default settings of each rule, by name (config.OuterSettings); 0 for settings that a rule does not have."""


def _stands_still(beta: float) -> str | None:
    """Why rounds with this outer learning rate would only throw training away; None if they would not."""
    return None if beta > 0 else f"beta {beta:g} is not a valid outer learning rate: it must be above 0"


def state_kinds(rule: OuterRule) -> tuple[str, ...]:
    """What a replica's state holds for every parameter: θ, the rule's kinds, and Adam's two moments."""
    return ("fast", *rule.kinds, "adam_mean", "adam_square")


def vector_size(rule: OuterRule, parameters: int) -> int:
    """Number of values in an offer of this many parameters; gradients are followed by their number of tokens."""
    return rule.offered * parameters + rule.gradients


def make_rule(name: RuleName, *, alpha: float, beta: float, gamma: float, inner_steps: int) -> OuterRule:
    """The rule of this name with these settings; it ignores those that it does not have."""
    return {
        "noloco": Noloco(alpha, beta, gamma),
        "averaged": Averaged(alpha, beta),
        "gossip": Gossip(gamma, inner_steps),
        "diloco": Diloco(alpha, beta),
        "dct": Dct(alpha, beta),
        "sync": Sync(),
    }[name]
