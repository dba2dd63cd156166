"""What a replica freezes at an outer round, and what of it travels (METHOD.md, "Outer round" and "Measures").

Vectors of a whole stage are flat: the values of its parameters one after another, in the stage's order, C order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from statistics import fmean
from struct import unpack
from typing import Literal, NamedTuple

from noloco_p2p.core.agreement import GroupView
from noloco_p2p.core.lattice_format import (
    BOUND_ZERO,
    LATTICE_BITS,
    LatticeFormat,
    LatticeRequest,
    OuterCodec,
    chunk_count,
)
from noloco_p2p.core.messages import ITEM_BYTES, HostTensor, PeerId, TensorSpec
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.tiles import PLACE

SAMPLED_SHARE = 256
FEWEST_SAMPLED, MOST_SAMPLED = 1024, 16_384
"""One in so many parameters of a stage is sampled for the replica spread, at least and at most so many."""
DRAW_BITS = 32
Verdict = Literal["", "clipped", "outlier", "refused"]
GUARDED_DTYPE = "bfloat16"
"""θ_f for guardians: what rounding costs here is less than what is lost with momentum and optimizer."""

LARGEST_RATIO = 1024.0
"""A partner's vector is merged if no value of it is larger than so many times the largest of one's own, or than this.
Every rule moves to means of the two, so what comes out is no larger either."""


def largest_accepted(own: float) -> float:
    """The largest magnitude in a vector that may be merged with one's own, whose largest is `own`."""
    return LARGEST_RATIO * max(1.0, own)


@dataclass(frozen=True, slots=True)
class FrozenRound:
    """What one replica froze at one outer round. It stays in its memory; others get it as `Snapshot`s."""

    peer: PeerId
    round: int
    step: int
    """Floor of the replica's clock when it was frozen."""
    vector: HostTensor
    """`vector`: what the rule offers of each parameter, flat, in compute_dtype (METHOD.md, "Outer rules"). Behind
    gradients comes their number of tokens."""
    weights: HostTensor
    """`weights`: θ_f, flat, in compute_dtype."""
    inner_steps: int = 0
    """How many the replica had taken when it was frozen."""
    bounds: bytes = b""
    """Of each chunk, how far others' vectors may be from this one (`core.lattice_format`); empty in other codecs."""
    view: GroupView | None = None
    """Under a rule that takes from all replicas of the stage."""
    radii: tuple[float, ...] = ()
    """How far a partner's vector may be, by group of tensors (`core.guard`); empty: not known yet."""

    @property
    def lattice(self) -> LatticeRequest | None:
        """What to ask for of a partner's vector."""
        return LatticeRequest(self.bounds) if self.bounds else None


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What is asked of a replica, or of a guardian of its stage."""

    stage: int
    round: int | None = None
    """The outer round wanted; None: the newest one held, at once."""
    wait_s: float = 0.0
    """How long the peer may wait until it has reached that round; then it gives the newest one held. One that
    is past it gives the nearest where rounds last (METHOD.md, "Outer rules")."""
    weights: str | None = None
    """θ_f is wanted, in this element type, for whoever guards it or takes it over; None: the vector, for a partner."""
    lattice: LatticeRequest | None = None
    """Which chunks of the vector are wanted, and their bounds, in a codec that has bounds."""

    @property
    def kind(self) -> str:
        """What is asked for, as bytes are counted: `snapshot`, which a round is merged with, or `weights`."""
        return "snapshot" if self.weights is None else "weights"

    @property
    def nbytes(self) -> int:
        """Of what grows with the model."""
        return self.lattice.nbytes if self.lattice else 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What travels of a frozen round: the vector and a sample of θ_f, or θ_f."""

    peer: PeerId
    """Whose weights they are, as the sender claims."""
    round: int
    step: int
    """Floor of the replica's clock when it was frozen."""
    tensors: tuple[HostTensor, ...]
    """`vector` and `sample`, or `weights` (`StageState`)."""
    view: GroupView | None = None
    """Beside a vector, as in `FrozenRound`."""
    took_s: float = field(default=0.0, compare=False)
    """Seconds of the transfer, without the wait before it. Filled in by the receiving transport."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PartnerVector:
    """What a partner's snapshot comes to on the puller's side, decoded and checked."""

    peer: PeerId
    round: int
    step: int
    """Floor of the partner's clock when it was frozen."""
    vector: HostTensor
    """`vector`: as in `FrozenRound`."""
    sample: HostTensor
    """`sample`: θ_f at `sampled_coordinates`, in compute_dtype."""
    distances: HostTensor | None = None
    """`distances`: how far it is from the puller's own, by chunk, float64; in a codec that has bounds."""
    missing: LatticeRequest | None = None
    """Chunks that are not known yet: what to ask for next. Nothing merges a vector that misses some."""
    view: GroupView | None = None
    """As in `FrozenRound`."""
    apart: tuple[float, ...] = ()
    """How far it is from the puller's own by group of tensors, once clipped."""
    factors: tuple[float, ...] = ()
    """What the difference of each tensor was multiplied by; empty: it was not clipped."""
    verdict: Verdict = ""
    """Of `core.guard`; empty: it was taken as it is. Nothing merges a vector that is `refused`."""


class RoundGroup(NamedTuple):
    """The vectors that a round merges, by peer id, which all that merge them have in the same order."""

    vectors: list[HostTensor]
    mine: int
    """The place of this replica's own; −1: it is not among them."""
    lag: float
    """How many steps apart the others' were frozen, the mean."""


def round_group(mine: FrozenRound, theirs: Sequence[PartnerVector], counted: bool) -> RoundGroup:
    """This replica's vector, if it is `counted`, and those of others."""
    own = [(mine.peer, mine.vector)] if counted else []
    group = sorted([*own, *((one.peer, one.vector) for one in theirs)], key=lambda member: member[0])
    place = [peer for peer, _ in group].index(mine.peer) if counted else -1
    lag = fmean(abs(one.step - mine.step) for one in theirs) if theirs else 0.0
    return RoundGroup([vector for _, vector in group], place, lag)


def snapshot_specs(
    codec: OuterCodec, parameters: int, offered: int, dtype: str, kept: int | None = None
) -> tuple[tuple[TensorSpec, ...], LatticeFormat | None]:
    """What travels of a frozen round in a codec, in order, and its format if it has bounds.

    `offered`: values of its vector; `dtype`: compute_dtype; `kept`: how many of them travel, if not all (`core.tiles`).
    """
    sample = TensorSpec("sample", dtype, (sample_size(parameters),))
    if kept is not None:
        return (TensorSpec("vector", dtype, (kept,)), TensorSpec("places", PLACE, (kept,)), sample), None
    if codec not in LATTICE_BITS:
        return (TensorSpec("vector", dtype if codec == "full" else codec, (offered,)), sample), None
    lattice = LatticeFormat(LATTICE_BITS[codec], offered, ITEM_BYTES[dtype])
    asked = LatticeRequest(bytes([BOUND_ZERO]) * chunk_count(offered))
    return answer_specs((sample, sample), lattice, asked), lattice


def partner_bytes(codec: OuterCodec, parameters: int, offered: int, dtype: str, kept: int | None = None) -> int:
    """What a partner's vector weighs, with the question for it, where nothing has to be asked for again."""
    specs, lattice = snapshot_specs(codec, parameters, offered, dtype, kept)
    return sum(spec.nbytes for spec in specs) + (chunk_count(offered) if lattice else 0)


def answer_specs(
    whole: tuple[TensorSpec, ...], lattice: LatticeFormat | None, asked: LatticeRequest | None
) -> tuple[TensorSpec, ...]:
    """What travels to a partner that asks so, of a vector that is `whole` otherwise.

    Whoever asks again for some chunks has the sample already.
    """
    if lattice is None or asked is None:
        return whole
    codes = TensorSpec("lattice", "uint8", (lattice.nbytes(asked),))
    return (codes,) if asked.some else (codes, *whole[1:])


def sample_size(parameters: int) -> int:
    """How many coordinates of a stage are sampled: all of a tiny one's."""
    return min(parameters, max(FEWEST_SAMPLED, min(MOST_SAMPLED, parameters // SAMPLED_SHARE)))


@lru_cache(maxsize=4)
def sampled_coordinates(seed: int, stage: int, round: int, parameters: int) -> tuple[int, ...]:
    """The places in a flat vector of `parameters` values that stand for all of them, in order.

    One is drawn in each of `sample_size` strata of equal length. Strata may end within a coordinate; over its strata
    together each coordinate has the same chance, so that the mean over the sample of any function of a coordinate is
    an unbiased estimate of its mean over all. All replicas of a stage draw the same ones.
    """
    count, rng = sample_size(parameters), generator(seed, "sampled coordinates", stage, round)
    drawn = unpack(f"<{count}I", rng.randbytes(DRAW_BITS // 8 * count))
    length = count << DRAW_BITS
    return tuple(((place << DRAW_BITS) + one) * parameters // length for place, one in enumerate(drawn))


def pair_std(square: float, count: int) -> float:
    """Replica std from ‖θ_i − θ_j‖² over `count` coordinates: sqrt((n − 1)/n · square / (2·count)), n = 2.

    METHOD.md, "Measures".
    """
    return sqrt(0.5 * square / (2 * count))
