"""What a replica freezes in an outer round, and which parts of it travel (METHOD.md, "Outer round" and "Measures").

Vectors of a stage are flat: the values of its parameters one after another, in the stage's order, each in C order.
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
MIN_SAMPLED, MAX_SAMPLED = 1024, 16_384
"""For the replica spread, one in SAMPLED_SHARE parameters of a stage is sampled, within these limits."""
DRAW_BITS = 32
Verdict = Literal["", "clipped", "outlier", "refused"]
GUARDED_DTYPE = "bfloat16"
"""Element type of θ_f for guardians: rounding costs less than the loss of the momentum and the optimizer state."""

LARGEST_RATIO = 1024.0
"""No value of a vector that is merged may exceed this many times the largest value of this replica's own vector, or
this number if that is larger. Rules move to means of these vectors, so the result does not exceed the limit either."""


def largest_accepted(own: float) -> float:
    """The largest magnitude allowed in a vector that is merged with one whose largest magnitude is `own`."""
    return LARGEST_RATIO * max(1.0, own)


@dataclass(frozen=True, slots=True)
class FrozenRound:
    """What one replica froze in one outer round. It stays in that replica's memory; others get parts as `Snapshot`s."""

    peer: PeerId
    round: int
    step: int
    """Floor of the replica's clock when it was frozen."""
    vector: HostTensor
    """`vector`: what the rule offers of each parameter, flat, in compute_dtype (METHOD.md, "Outer rules"). Gradients
    are followed by their number of tokens."""
    weights: HostTensor
    """`weights`: θ_f, flat, in compute_dtype."""
    inner_steps: int = 0
    """Inner steps that the replica had taken when this was frozen."""
    bounds: bytes = b""
    """For each chunk, how far others' vectors may be from this one (`core.lattice_format`); empty in other codecs."""
    view: GroupView | None = None
    """Only under a rule that takes from all replicas of the stage."""
    radii: tuple[float, ...] = ()
    """How far away a partner's vector may be, by group of tensors (`core.guard`); empty if not known yet."""
    limits: tuple[float, ...] = ()
    """How far away a single value may be, by group; empty if not known yet, and in codecs without bounds."""
    fresh_round: int = 0
    """The lineage of the weights, as in `Advert`."""

    @property
    def lattice(self) -> LatticeRequest | None:
        """What to request of a partner's vector; None in a codec without bounds."""
        return LatticeRequest(self.bounds) if self.bounds else None


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A request to a replica, or to a guardian of its stage."""

    stage: int
    round: int | None = None
    """The outer round wanted; None: the newest one held, at once."""
    wait_s: float = 0.0
    """How long the peer may wait to reach that round. If it does not have it then, it sends the newest one that it
    holds, or under a lasting rule the nearest (METHOD.md, "Outer rules"); a vector for all replicas it declines."""
    weights: str | None = None
    """Element type in which θ_f is wanted, to be guarded or taken over; None: the vector is wanted, to be merged."""
    lattice: LatticeRequest | None = None
    """In a codec that has bounds: which chunks of the vector are wanted, with their bounds."""

    @property
    def kind(self) -> str:
        """The kind under which its bytes are counted: `snapshot` for a vector, `weights` for θ_f."""
        return "snapshot" if self.weights is None else "weights"

    @property
    def nbytes(self) -> int:
        """Size of the part that grows with the model."""
        return self.lattice.nbytes if self.lattice else 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The part of a frozen round that travels: the vector and a sample of θ_f, or θ_f."""

    peer: PeerId
    """The replica whose weights these are, as the sender claims."""
    round: int
    step: int
    """Floor of the replica's clock when it was frozen."""
    tensors: tuple[HostTensor, ...]
    """As in `snapshot_specs`, or `weights` (`StageState`)."""
    view: GroupView | None = None
    """With a vector, as in `FrozenRound`."""
    fresh_round: int = 0
    """As in `FrozenRound`."""
    took_s: float = field(default=0.0, compare=False)
    """Seconds that the transfer took, without the wait before it. Filled in by the receiving transport."""

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(tensor.data.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PartnerVector:
    """A partner's snapshot on the puller's side, decoded and checked."""

    peer: PeerId
    round: int
    step: int
    """Floor of the partner's clock when it was frozen."""
    vector: HostTensor
    """`vector`: as in `FrozenRound`."""
    sample: HostTensor
    """`sample`: θ_f at `sampled_coordinates`, in compute_dtype."""
    distances: HostTensor | None = None
    """`distances`: how far it is from the puller's own vector, by chunk, float64; only in a codec that has bounds,
    and None if the guard clipped the vector: then it tells nothing about replicas that do not lie."""
    missing: LatticeRequest | None = None
    """What to request next: the chunks that are still unknown. A vector with missing chunks is never merged."""
    view: GroupView | None = None
    """As in `FrozenRound`."""
    apart: tuple[float, ...] = ()
    """How far it is from the puller's own vector after clipping, by group of tensors."""
    sizes: tuple[float, ...] = ()
    """The sizes of these differences (`core.guard.LIMIT`), by group; only in a codec that has bounds."""
    limits: tuple[float, ...] = ()
    """The largest magnitude to which each tensor's differences were reduced; empty if all were smaller."""
    factors: tuple[float, ...] = ()
    """By what the difference of each tensor was then multiplied; empty if by 1."""
    verdict: Verdict = ""
    """The guard's verdict (`core.guard`); empty if it changed the vector at most a little. A `refused` one is never
    merged."""


class RoundGroup(NamedTuple):
    """The vectors that a round merges, ordered by peer id, so that all replicas that merge them do so in one order."""

    vectors: list[HostTensor]
    mine: int
    """Index of this replica's own vector; −1 if it is not among them."""
    lag: float
    """How many steps lie between this replica's freeze and the others', on average."""


def round_group(mine: FrozenRound, theirs: Sequence[PartnerVector], counted: bool) -> RoundGroup:
    """This replica's vector, if it is `counted`, together with those of others."""
    own = [(mine.peer, mine.vector)] if counted else []
    group = sorted([*own, *((one.peer, one.vector) for one in theirs)], key=lambda member: member[0])
    place = [peer for peer, _ in group].index(mine.peer) if counted else -1
    lag = fmean(abs(one.step - mine.step) for one in theirs) if theirs else 0.0
    return RoundGroup([vector for _, vector in group], place, lag)


def snapshot_specs(
    codec: OuterCodec, parameters: int, offered: int, dtype: str, kept: int | None = None
) -> tuple[tuple[TensorSpec, ...], LatticeFormat | None]:
    """The tensors of a frozen round that travel in a codec, in order, and the lattice format if it has bounds.

    `offered`: number of values in the vector; `dtype`: compute_dtype; `kept`: how many of the values travel, if not all
    (`core.tiles`).
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
    """Size of a partner's vector and of the request for it, if no chunk has to be requested again."""
    specs, lattice = snapshot_specs(codec, parameters, offered, dtype, kept)
    return sum(spec.nbytes for spec in specs) + (chunk_count(offered) if lattice else 0)


def answer_specs(
    whole: tuple[TensorSpec, ...], lattice: LatticeFormat | None, asked: LatticeRequest | None
) -> tuple[TensorSpec, ...]:
    """The tensors that answer a request. `whole`: those of a full answer; with bounds, the first one depends on them.

    A request for some of the chunks is a repeated one: its sender already has the sample.
    """
    if lattice is None or asked is None:
        return whole
    codes = TensorSpec("lattice", "uint8", (lattice.nbytes(asked),))
    return (codes,) if asked.some else (codes, *whole[1:])


def sample_size(parameters: int) -> int:
    """How many coordinates of a stage are sampled; in a tiny stage, all."""
    return min(parameters, max(MIN_SAMPLED, min(MAX_SAMPLED, parameters // SAMPLED_SHARE)))


@lru_cache(maxsize=4)
def sampled_coordinates(seed: int, stage: int, round: int, parameters: int) -> tuple[int, ...]:
    """The coordinates of a flat vector of `parameters` values that are sampled to represent it, in order.

    One is drawn from each of `sample_size` strata of equal length. A stratum may end within a coordinate; over all
    strata together every coordinate has the same chance. So the mean of any function of a coordinate over the sample is
    an unbiased estimate of its mean over the vector. All replicas of a stage draw the same coordinates.
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
