"""The plain values that nodes exchange and that ports pass around: tensors, microbatches, replica states, adverts.

Shape legend: B microbatch size, T sequence length, D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "uint8": 1}
"""Bytes per element of each element type that may travel, by torch's name for it."""

PeerId = str
"""A libp2p peer id in base58 (`12D3KooW…`); it encodes the node's Ed25519 public key."""
PEER_ID_CHARACTERS = 128
"""Maximum length of a peer id that is accepted; Ed25519 ids have 52 characters."""
MAX_AVOIDED = 8
"""Maximum number of replicas that a microbatch may ask to bypass (`Header.avoid`)."""
LARGEST_COUNT = 2**53
"""Counts of rounds and steps beyond this are invalid: the step clock, a float, could not represent them exactly."""


def is_peer_id(text: str) -> bool:
    """Whether `text` is acceptable as a peer id: printable ASCII of 1 to PEER_ID_CHARACTERS characters."""
    return 0 < len(text) <= PEER_ID_CHARACTERS and text.isascii() and text.isprintable()


class TensorSpec(NamedTuple):
    """Name, element type and shape of a tensor, without its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes. Raises KeyError for a dtype that may not travel."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: `data` is a flat memoryview of its bytes, in C order and little endian.

    Only `compute` converts it to torch and back. Everybody may read `data`; nobody may write to it.
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
    """The id of a microbatch: equal on every hop and every retry, never reused, even after its origin restarts."""

    peer: PeerId
    """The stage-0 node that read the microbatch."""
    incarnation: int
    """64 random bits, drawn when that node's process started."""
    counter: int
    """Number of microbatches that the process had begun before this one."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The label that a microbatch carries: the node that read it, the node's step, and the index within that step."""

    peer: PeerId
    step: int
    """Floor of the origin's clock when it began the microbatch."""
    index: int
    """Index within the origin's inner step, from 0. In an evaluation, the origin's rank within stage 0."""


@dataclass(frozen=True, slots=True)
class Header:
    """The part of an activation that arrives before its tensors; admission is decided on it alone."""

    run_id: str
    microbatch: MicrobatchId
    origin: Origin
    stage: int
    """The receiving stage, 1 or later."""
    time_left_s: float
    """Seconds without progress that the sender will still tolerate, counted from when this was sent."""
    specs: tuple[TensorSpec, ...] = ()
    """Declared tensors, in order: hidden, targets, and the mask if any. Filled in by the sending transport."""
    digest: int = 0
    """Digest over the tensors (64 bits). Filled in by the sending transport, verified by the receiving one."""
    patient: bool = False
    """The sender would rather wait in line for a place than receive Busy."""
    label: bytes = b""
    """The origin's signed proof that it began the microbatch. Filled in by the origin's transport."""
    avoid: tuple[PeerId, ...] = ()
    """Replicas of later stages to bypass, because the origin found their gradients wrong."""


@dataclass(frozen=True, slots=True)
class Activation:
    """A stage's output on its way to the next stage."""

    header: Header
    hidden: HostTensor
    """`hidden`, B×T×D in the run's codec (`core.block_format`)."""
    targets: HostTensor
    """`targets`, B×T, int32; the loss ignores −100."""
    mask: HostTensor | None = None
    """`mask`, B×T, uint8, 1 where a token may be attended to; None if every token may be."""
    reply: TensorSpec | None = field(default=None, kw_only=True)
    """Spec of the tensor expected in the reply; not sent. None: the same dtype and shape as `hidden`."""

    @property
    def reply_spec(self) -> TensorSpec:
        """Spec of the single tensor in the reply."""
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
    """Number of targets that counted."""
    served: tuple[PeerId, ...]
    """The peers that served it, from the next stage to the last."""
    finite: bool = True
    """False if a loss or gradient downstream was not finite; then `grad`, `loss_sum` and `tokens` are zero."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """The reply to an evaluation: nats summed over `tokens` targets."""

    loss_sum: float
    tokens: int


class Progress(NamedTuple):
    """How far a peer has got with a microbatch that it is serving."""

    events: int
    """Grows with every byte received or sent and every operation completed, at this peer or downstream."""
    stuck_s: float
    """Seconds for which its device has had work without completing anything; 0 if it has no work."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of data. `inputs` and `targets` are B×T int32, `mask` B×T uint8 or None."""

    inputs: HostTensor
    targets: HostTensor
    mask: HostTensor | None = None


STATE_NUMBERS = ("stage", "round", "step", "inner_steps", "adam_steps", "number", "fresh_round")
"""The fields of `ReplicaState` that are numbers. They have the same names on the wire and in checkpoints."""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The complete state of a replica, frozen between two operations of its device.

    A newcomer pulls it from a replica of its stage, and a checkpoint stores it. It has nothing of an unfinished step.
    """

    peer: PeerId  # whose state it is
    stage: int
    round: int
    """The newest outer round that it has done."""
    step: float  # its clock, in steps
    inner_steps: int  # optimizer steps taken
    adam_steps: int
    """The optimizer steps that had tokens; Adam's bias correction counts these."""
    tensors: tuple[HostTensor, ...]
    """`<kind>/<name>`: for each of the run's `state_kinds`, every parameter in the stage's order, in compute_dtype.
    Parameters that Muon updates have no `adam_square`."""
    number: int = 0
    """64 random bits, drawn when the donor froze this copy: parts of a transfer with equal numbers belong together."""
    spent: tuple[MicrobatchId, ...] = ()
    """Recently counted ids, oldest first: a replica that continues from these weights must not count them again."""
    returned_norms: tuple[float, ...] = ()
    """Norms of the most recently returned gradients (`core.guard`). Stored in checkpoints, not sent to other nodes."""
    fresh_round: int = 0  # as in `Advert`


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything, apart from code and data, that a node needs to continue as if it had never stopped."""

    state: ReplicaState
    cursor: Mapping[str, object] | None
    """`Batches.cursor` at stage 0, None at later stages."""
    random_state: tuple[Any, ...]
    """`random.Random.getstate()` of the node's own generator."""


class Holding(NamedTuple):
    """Weights that a node can offer to a node that takes over a stage: its own checkpoint, or a copy that it guards."""

    stage: int
    round: int
    step: int
    """Floor of the replica's clock."""
    fresh_round: int = 0  # as in `Advert`

    @property
    def age(self) -> int:
        """The outer rounds since these were initial weights."""
        return self.round - self.fresh_round


STREAM = "p2p"
"""The address of a peer that others reach by opening a stream over a link that this peer keeps open."""
NO_STAGE = -1
"""`Advert.stage` of a node that has not chosen one yet; such an advert is never announced."""


@dataclass(frozen=True, slots=True)
class Advert:
    """What a node publishes about itself in the DHT. It is signed with the node's key, but all it says is a claim."""

    peer_id: PeerId
    run_id: str
    stage: int
    addresses: tuple[str, ...]
    """gRPC addresses, best first: `host:port`; for a node behind NAT, `p2p` (over a link that it keeps to the caller),
    `relay/<peer id>` for each relay, and last `host:port` on its own network. A node's own copy has the address on
    which it listens, and `p2p` if nobody can dial it there."""
    metrics: str = ""
    """`http://host:port/metrics`; empty if it serves no metrics."""
    libp2p_metrics: str = ""  # the same for its libp2p daemon
    state: str = "starting"
    """One of `core.members.STATES`."""
    step: float = 0.0
    """The node's clock, in steps."""
    outer_round: int = 0
    """The newest outer round that it has done."""
    fresh_round: int = 0  # the lineage of its weights: the outer round at which they began as initial weights
    microbatches_per_s: float = 0.0
    """Speed of its device: microbatches per second of device time."""
    capacity_per_s: float = 0.0
    """Microbatches per second that the slower of its device and its line can handle; 0 if not measured yet."""
    steps_per_s: float = 0.0
    """Inner steps per second of wall time."""
    evaluated: bool = False
    """True for a finished stage-0 node that has done its last evaluation."""
    settled: bool = False
    """Its choice of a first stage is final: the stage was given, or it has made its weights."""
    stays: bool = False  # it never moves to another stage: it was started with its stage, or with `rebalance: false`
    partner_from_round: int = 0
    """The first outer round in which others may pull from it: the one after its first complete outer interval."""
    moving_to: int | None = None  # the stage that it is about to move to, unless another node does
    unserved: bool = False  # the next stage has served it nothing for a while, although it has tried
    holds: tuple[Holding, ...] = ()
    """Weights that it can offer: its own checkpoints before its first step, those that it guards afterwards."""
    version: str = ""
    announced_at: float = 0.0
    """When it was announced, on the clock of the event loop that read it; filled in by the directory, never sent."""

    @property
    def is_hidden(self) -> bool:
        """Whether nobody outside its own network can dial it. Two hidden nodes are assumed to need a relay, although
        they need none if they share a network."""
        return STREAM in self.addresses

    def needs_relay(self, peer: "Advert") -> bool:
        """Whether the two may need a relay to reach each other."""
        return self.is_hidden and peer.is_hidden


@dataclass(frozen=True, slots=True)
class NodeDescription:
    """A node's answer when it is asked directly who it is and how far it has come."""

    peer_id: PeerId
    run_id: str
    stage: int
    state: str
    step: float
    outer_round: int
    version: str
    fresh_round: int = 0
