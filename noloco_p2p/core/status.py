"""What a node reports about itself at `/status`: its progress, the peers it sees, and what it waits for. Pure values.

The target and the purpose of a wait are values, so that a diagnosis can follow waits from node to node
(ARCHITECTURE.md, "Waits and diagnosis"); they become text only where they are shown. Points in time are given as ages,
`…_s` seconds before the status was taken, because other nodes do not know this node's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId


class Resource(Enum):
    """What a node waits for, if not for another node."""

    DEVICE = "device"
    """An operation on this node's own device."""
    INNER_STEP = "inner step"
    """This node's own inner step has to end first; its other waits show why it has not ended."""
    DIRECTORY = "directory"
    """The DHT."""
    LINE = "line"
    """This node's own line has to send something else first."""
    DISK = "disk"
    DATA = "data"
    """The data set."""
    SWARM = "swarm"
    """The other nodes as a whole."""
    OWNER = "owner"
    """The person who runs this node."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class AnyReplica:
    """The target of a wait that any replica of a stage can end."""

    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A target or purpose from a node of another version that this one cannot parse: shown verbatim, never followed."""

    text: str

    def __str__(self) -> str:
        return self.text


WaitTarget = PeerId | AnyReplica | Resource | Unknown
"""The peer or thing that has to act before a wait ends."""


@dataclass(frozen=True, slots=True)
class ForMicrobatch:
    """On behalf of a microbatch: the same value on every node along its route, so that its waits can be followed."""

    peer: PeerId
    """Its origin."""
    counter: int
    held_out: bool = False
    """True if it is evaluated, not trained on."""

    def __str__(self) -> str:
        return f"{'held-out ' if self.held_out else ''}microbatch {self.counter} of {self.peer}"


@dataclass(frozen=True, slots=True)
class ForRound:
    """For an outer round of this node, or, if `asked`, for a round that a partner has asked for."""

    round: int
    asked: bool = False

    def __str__(self) -> str:
        return f"{'asked for ' if self.asked else ''}outer round {self.round}"


@dataclass(frozen=True, slots=True)
class ForGuarding:
    """To keep a copy of another stage's weights."""

    stage: int

    def __str__(self) -> str:
        return f"guards stage {self.stage}"


class Task(StrEnum):
    """The other purposes of a wait."""

    CHECKPOINT = "checkpoint"
    NEWCOMER = "for a newcomer"
    LOST_STAGE = "the weights of a lost stage"


Purpose = ForMicrobatch | ForRound | ForGuarding | Task | Unknown
"""What a wait is for."""

ACTIVATION = "activation"
"""`Wait.what` at the receiver of a call whose tensors have not all arrived: the caller has to act."""


def for_microbatch(microbatch: MicrobatchId) -> ForMicrobatch:
    """The purpose of everything done for this microbatch. Held-out microbatches have incarnation 0."""
    return ForMicrobatch(microbatch.peer, microbatch.counter, microbatch.incarnation == 0)


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a node waits for."""

    what: str
    """A noun: `gradient`, `snapshot`, `inner step`, `microbatches`."""
    whom: WaitTarget
    """The peer or thing that has to act."""
    since_s: float
    """How long it has waited so far, seconds."""
    deadline_s: float | None
    """The longest that it waits, or that such a wait can take, seconds from its start; None: no limit."""
    why: Purpose | None = None
    idle: bool = False
    """True for a background duty, often one with nothing to do: it holds nothing up."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A call from a peer that this node is serving."""

    caller: PeerId
    why: Purpose
    """As in the caller's own `Wait.why`."""
    since_s: float


@dataclass(frozen=True, slots=True)
class SeenPeer:
    """Another node, as this one knows it."""

    advert: Advert
    age_s: float = 0.0
    """Age of the advert."""
    aside_s: float = 0.0
    """How much longer it is set aside; 0 if it is not."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is currently wrong, although the node continues."""

    name: str
    """`disk`, `libp2p`, …"""
    message: str
    """What is wrong and what to do, one line."""
    since_s: float


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """What the microbatches of an inner step move between two stages."""

    per_step: int
    """Microbatches that each replica of stage 0 reads in a step."""
    activation_bytes: int
    """Size of the hidden states of one microbatch, as they travel."""
    gradient_bytes: int
    forward: str
    """Codec of the hidden states."""
    backward: str
    """Codec of their gradients."""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What the instruments of a node have counted since its start."""

    up_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    """Over about the last ten seconds; at stage 0, of the tokens that this node itself reads."""
    loss: float | None = None
    """Nats per token of the last inner step, like all losses."""
    validation_loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    replica_std: float | None = None
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Outer rounds by result."""
    microbatches: Mapping[str, int] = field(default_factory=dict)
    """By how they ended."""
    rerouted: Mapping[str, int] = field(default_factory=dict)
    """By reason."""
    distrusted: Mapping[str, int] = field(default_factory=dict)
    """What peers sent and this node did not accept as it was (`core.guard`), by what was done about it."""
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the device was idle, by cause."""
    device_s: float = 0.0
    """Seconds that the device worked for inner steps."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_per_s: float = 0.0
    """In and out, over about the last ten seconds."""
    upload_bytes_per_s: float | None = None
    """The measured upload capacity of its line; None: not measured yet."""
    download_bytes_per_s: float | None = None
    """The measured download capacity of its line; None: not measured yet."""
    round_trip_s: float | None = None
    """Round trip to a peer when nothing delays it, the median over the peers measured; None: none has been measured."""
    loop_silent_s: float = 0.0
    """Since the last heartbeat of the event loop."""
    rss_bytes: int = 0
    disk_free_bytes: int | None = None
    """On the disk of the node's directory."""
    unix_time_s: float = 0.0
    """This machine's wall clock."""


@dataclass(frozen=True, slots=True)
class Status:
    """The status of one node at one moment."""

    advert: Advert
    """Its identity and progress: peer id, run id, stage, state, step, outer round, addresses, speeds."""
    run_name: str
    stages: int
    steps: int
    """Length of the run."""
    inner_steps: int
    start_replicas: int = 0
    """Replicas that every stage needs before the run begins."""
    waits: tuple[Wait, ...] = ()
    """Everything it waits for, longest first."""
    serving: tuple[Serving, ...] = ()
    seen: tuple[SeenPeer, ...] = ()
    """All other nodes, sorted by peer id."""
    deserted: Mapping[int, float] = field(default_factory=dict)
    """Stages that nobody serves, as far as this node knows, with the seconds for which that has been so."""
    step_took_s: float | None = None
    """Median seconds between recent inner steps."""
    since_step_s: float | None = None
    """Since the last inner step ended, or training began; None while not training."""
    in_flight: int = 0
    """Microbatches admitted here that have not ended; stage 0 admits none."""
    places: int | None = None
    """Microbatches that may be in flight here at once, by memory and settings; None: no limit."""
    waiting: int = 0
    """Microbatches that wait to be admitted."""
    troubles: tuple[Trouble, ...] = ()
    closed_until: str | None = None
    """Local time of day at which the owner's hours (`limits.hours`) begin again; None: the node may work now."""
    microbatch: MicrobatchSize | None = None
    """None while the node has no weights."""
    figures: NodeFigures = NodeFigures()
