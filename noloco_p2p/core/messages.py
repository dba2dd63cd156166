"""The values that nodes exchange and that the ports speak of. No behaviour beyond checks of themselves.

Shape legend: B microbatch size, T sequence length, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint8": 1,
}
"""The element types that may travel, by torch's names, with bytes per element."""

PeerId = str
"""A libp2p peer id in base58 (`12D3KooW…`): it is the node's Ed25519 public key."""
PEER_ID_CHARACTERS = 128
"""Longest peer id that is believed; an Ed25519 one has 52."""
MOST_AVOIDED = 8
"""Replicas that a microbatch may name as to be left out."""
LARGEST_COUNT = 2**53
"""Counts of rounds and steps beyond this are none: a clock in steps could not hold them."""


def is_peer_id(text: str) -> bool:
    """Whether a peer may be called so: a short text that can be printed and kept."""
    return 0 < len(text) <= PEER_ID_CHARACTERS and text.isascii() and text.isprintable()


class TensorSpec(NamedTuple):
    """What a tensor is, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Length of the values in bytes (KeyError for a dtype that may not travel)."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: `data` holds its values, C order, little endian, as a flat memoryview of bytes.

    Only `compute` turns it into torch and back. Whoever holds one may read `data`, never write to it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def spec(self) -> TensorSpec:
        """Name, dtype and shape."""
        return TensorSpec(self.name, self.dtype, self.shape)


class MicrobatchId(NamedTuple):
    """Equal on every hop and every retry, and never used twice, not even after a restart of its origin."""

    peer: PeerId
    """The stage-0 node that read the microbatch."""
    incarnation: int
    """64 random bits, drawn when that process started."""
    counter: int
    """How many microbatches that process had begun before this one."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The label that a microbatch carries: the node that read it, in which of its steps, and its place in that step."""

    peer: PeerId
    step: int
    """Floor of the origin's clock when the microbatch was begun."""
    index: int
    """Place within the origin's inner step, from 0. In an evaluation: the origin's rank within stage 0."""


@dataclass(frozen=True, slots=True)
class Header:
    """What arrives before the tensors of an activation; admission is decided on it."""

    run_id: str
    microbatch: MicrobatchId
    origin: Origin
    stage: int
    """The stage that is to receive it, from 1."""
    time_left_s: float
    """Seconds without progress that the sender still bears, counted from sending."""
    specs: tuple[TensorSpec, ...] = ()
    """Declared tensors, in order: hidden, targets, and mask where there is one. Filled in by the sending transport."""
    digest: int = 0
    """Digest over the tensors (64 bits). Filled in by the sending transport, verified by the receiving one."""
    patient: bool = False
    """The sender would rather wait in line for a place than hear Busy."""
    label: bytes = b""
    """Shows that the origin has begun the microbatch. Filled in by the origin's transport."""
    avoid: tuple[PeerId, ...] = ()
    """Replicas of later stages that are to be left out, because the origin found their gradients wrong."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A stage's output on its way to the next stage."""

    header: Header
    hidden: HostTensor
    """`hidden`, B×T×D in the run's codec (`core.block_format`)."""
    targets: HostTensor
    """`targets`, B×T, int32; −100 is ignored by the loss."""
    mask: HostTensor | None = None
    """`mask`, B×T, uint8, 1 where a token may be attended to; None when every token may."""
    reply: TensorSpec | None = field(default=None, kw_only=True)
    """What must come back; it is not sent. None: a tensor like `hidden`."""

    @property
    def reply_spec(self) -> TensorSpec:
        """The one tensor of the reply."""
        return self.reply or self.hidden.spec._replace(name="grad")

    @property
    def tensors(self) -> tuple[HostTensor, ...]:
        """The tensors in the order in which they travel."""
        return (self.hidden, self.targets) if self.mask is None else (self.hidden, self.targets, self.mask)


@dataclass(frozen=True, slots=True)
class Gradient:
    """The reply to an activation: the gradient of the *summed* loss with respect to `hidden`."""

    microbatch: MicrobatchId
    grad: HostTensor
    """`grad`, B×T×D in the run's codec of gradients."""
    loss_sum: float
    """Nats, summed over the tokens that count."""
    tokens: int
    """How many targets counted."""
    served: tuple[PeerId, ...]
    """The peers that served it, from the next stage to the last."""
    finite: bool = True
    """False: a loss or gradient further on was not finite; `grad`, `loss_sum` and `tokens` are zero."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """The reply to an evaluation: nats summed over `tokens` targets."""

    loss_sum: float
    tokens: int


class Progress(NamedTuple):
    """How far a peer is with a microbatch that it serves."""

    events: int
    """Grows with every byte received and every operation ended, at this peer or further on."""
    stuck_s: float
    """Since when its device has ended nothing although it has work, seconds; 0 when it has none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of data. `inputs` and `targets` are B×T int32, `mask` B×T uint8 or None."""

    inputs: HostTensor
    targets: HostTensor
    mask: HostTensor | None = None


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Everything that makes a replica, frozen between two operations of its device.

    A newcomer pulls it from a replica of its stage, a checkpoint holds it. Of the inner step under way it has nothing.
    """

    peer: PeerId
    """Whose state it is."""
    stage: int
    round: int
    """The newest outer round that it has done."""
    step: float
    """Its clock, in steps."""
    inner_steps: int
    """Optimizer steps taken."""
    adam_steps: int
    """Those among them that had tokens: what Adam's bias correction counts."""
    tensors: tuple[HostTensor, ...]
    """`<kind>/<name>`: for each of the run's `state_kinds` every parameter in the stage's order, in compute_dtype.
    What Muon moves has no `adam_square`."""
    number: int = 0
    """64 bits drawn by the donor when it froze this copy: two parts of a transfer with one number fit together."""
    spent: tuple[MicrobatchId, ...] = ()
    """Ids counted recently, oldest first: whoever goes on from these weights does not count them again."""
    returned_norms: tuple[float, ...] = ()
    """Norms of the gradients that came back last (`core.guard`). They are in checkpoints, and not sent to others."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a node needs beyond the code and the data to continue as if it had never stopped."""

    state: ReplicaState
    cursor: Mapping[str, object] | None
    """`Batches.cursor` at stage 0, None later."""
    random_state: tuple[object, ...]
    """`random.Random.getstate()` of the node's own generator."""


class Holding(NamedTuple):
    """Weights that a node can give to a node that takes a stage: its own checkpoints, or what it guards for others."""

    stage: int
    round: int
    step: int
    """Floor of the replica's clock."""


STREAM = "p2p"
"""The address of a peer that others reach by opening a stream over a link that it keeps."""
NO_STAGE = -1
"""`Advert.stage` of a node that has not chosen one yet; such an advert is never announced."""


@dataclass(frozen=True, slots=True)
class Advert:
    """What a node publishes about itself in the DHT. Signed by its identity; everything in it is a claim."""

    peer_id: PeerId
    run_id: str
    stage: int
    addresses: tuple[str, ...]
    """gRPC addresses, best first: `host:port`; of a node behind NAT `p2p`, over a link that it keeps to the caller, and
    `relay/<peer id>` of relays, and last `host:port` on its own network. Of a node's own: where it listens, and `p2p`
    if nobody can dial it there."""
    metrics: str = ""
    """`http://host:port/metrics`, empty when it serves none."""
    libp2p_metrics: str = ""  # the same of its libp2p daemon
    state: str = "starting"
    """One of `core.members.STATES`."""
    step: float = 0.0
    """The node's clock, in steps."""
    outer_round: int = 0
    """The newest outer round it has done."""
    microbatches_per_s: float = 0.0
    """What its device can do: microbatches per second of device time."""
    capacity_per_s: float = 0.0
    """What its device and its line can do, whichever is slower: microbatches per second; 0: not measured yet."""
    steps_per_s: float = 0.0
    """Inner steps per second of wall time."""
    evaluated: bool = False
    """A finished stage-0 node that has done its last evaluation."""
    settled: bool = False
    """It will not choose another stage any more (its stage was given, or it has made its weights)."""
    stays: bool = False  # it never moves: it was started with its stage, or with `rebalance: false`
    partner_from_round: int = 0
    """The first outer round in which it may be pulled from: that after its first whole outer interval."""
    moving_to: int | None = None
    """The stage that it will move to unless another node does."""
    holds: tuple[Holding, ...] = ()
    """Weights that it can give: those of its own checkpoints before its first step, later those that it guards."""
    version: str = ""
    announced_at: float = 0.0
    """When it was announced, on the clock of the event loop that read it; filled in by the directory, never sent."""

    @property
    def is_hidden(self) -> bool:
        """Nobody outside of its own network can dial it. Two such nodes count as far from each other: they reach each
        other through a relay, unless they share a network."""
        return STREAM in self.addresses

    def needs_relay(self, peer: "Advert") -> bool:
        """Whether the two may reach each other only through a relay."""
        return self.is_hidden and peer.is_hidden


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """What a node answers when it is asked about itself directly."""

    peer_id: PeerId
    run_id: str
    stage: int
    state: str
    step: float
    outer_round: int
    version: str
