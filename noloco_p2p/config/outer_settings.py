"""Settings of the outer round: the rule and its parameters (METHOD.md, "Outer rules")."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from noloco_p2p.config.base import Finite, Positive, Seconds, Settings
from noloco_p2p.core.lattice_format import OuterCodec
from noloco_p2p.core.outer_rules import DEFAULTS, OuterRule, RuleName, make_rule, vector_size
from noloco_p2p.core.snapshots import partner_bytes
from noloco_p2p.core.tiles import kept_of


class OuterSettings(Settings):
    """The outer round (METHOD.md, "Outer rules"). Unset keys take the rule's defaults; those shown are `gossip`'s."""

    rule: RuleName = "gossip"
    """What replicas exchange, and how they merge it. Between pairs: `gossip` (θ, often), `noloco` (the paper),
    `averaged` (φ, δ). Among all replicas of the stage: `diloco` (Δ), `dct` (some coefficients of a momentum), `sync`
    (gradients, before every inner step)."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """α, the outer momentum."""
    beta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """β, the outer learning rate."""
    gamma: Finite = 0.5
    """γ, the pull towards the partner's weights; with `noloco` it must satisfy S1: 0 < γ < 2(1−α²)."""
    inner_steps: Positive = 1
    """m: clock steps from one outer round to the next."""
    pairing: Literal["matched", "random", "none"] = "matched"
    """How partners are drawn: `matched` in pairs, `random` by each replica for itself; `none`: no outer rounds."""
    max_stale_rounds: Annotated[int, Field(ge=0)] = 16
    """A snapshot from up to this many rounds away is still merged."""
    partner_wait_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Longest wait for a partner that has not reached the round, seconds; none: two inner steps (of device time if
    training waits), or `deadline_s` if the rule takes from all replicas."""
    deadline_s: Seconds = 60.0
    """Longest transfer of one snapshot, seconds."""
    codec: OuterCodec = "int4"
    """Encoding of vectors: `full`, `bfloat16`, `int8` or `int4`: 4, 2, 1 or half a byte per parameter (METHOD.md)."""
    overlap: bool = True
    """Keep training while the partner's snapshot is in transit, without losing that training; `false`: wait for it."""
    allow_unstable: bool = False
    """Accept settings that let replicas drift apart (for experiments)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Fill in the rule's defaults. A rule that does not exist is refused later."""
        if not isinstance(values, Mapping):
            return values
        rule = values.get("rule", "gossip")
        # Looked up in a list, because a value from a stranger may not be hashable.
        return {**(DEFAULTS[rule] if rule in list(DEFAULTS) else {}), **values}

    @model_validator(mode="after")
    def _check(self) -> "OuterSettings":
        """Check that the codec suits the rule: vectors that all must merge alike may only be rounded to nearest."""
        if self.update.common and self.codec not in ("full", "bfloat16"):
            raise ValueError(f"rule {self.rule} sends all replicas the same values: it needs codec full or bfloat16")
        if self.update.sparse and self.codec != "full":
            raise ValueError(f"rule {self.rule} sends values with positions: it needs codec full, not {self.codec}")
        if self.update.gradients and (self.codec, self.inner_steps, self.overlap) != ("full", 1, False):
            raise ValueError(f"rule {self.rule} sums gradients: it needs codec full, inner_steps 1, overlap false")
        return self

    def check_known(self) -> None:
        """Raises ValueError if a parameter is set that the rule does not have."""
        for name in ("alpha", "beta", "gamma"):
            if getattr(self, name) and not DEFAULTS[self.rule][name]:
                raise ValueError(f"rule {self.rule} has no {name}: leave it out, or choose another outer.rule")

    @property
    def update(self) -> OuterRule:
        """The rule, with these settings."""
        return make_rule(self.rule, alpha=self.alpha, beta=self.beta, gamma=self.gamma, inner_steps=self.inner_steps)

    def vector_bytes(self, parameters: int, dtype: str) -> int:
        """Bytes of another replica's vector and of the request for it, for a stage with `parameters` parameters
        computed in `dtype`."""
        rule = self.update
        kept = kept_of(parameters) if rule.sparse else None
        return partner_bytes(self.codec, parameters, vector_size(rule, parameters), dtype, kept)
