"""What a node says of itself at `/status`: its progress, the peers it sees, and what it waits for. Pure values.

Whom and what a wait is for are values, which a diagnosis follows from node to node (ARCHITECTURE.md, "Waits and
diagnosis"); their words are made where they are shown. Points in time are given as ages, `…_s` seconds before the
moment of asking: nobody else knows this node's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId


class Resource(Enum):
    """What a node waits for when it does not wait for another node."""

    DEVICE = "device"
    """An operation on this node's own device."""
    INNER_STEP = "inner step"
    """This node's own inner step has to end first: its other waits say why it has not."""
    DIRECTORY = "directory"
    """The DHT."""
    LINE = "line"
    """This node's own line has to send first what goes before."""
    DISK = "disk"
    DATA = "data"
    """The data set."""
    SWARM = "swarm"
    """All other nodes together."""
    OWNER = "owner"
    """A person."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class AnyReplica:
    """Whoever holds a stage: a wait that any of its replicas can end."""

    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Unknown:
    """What a node of another version says in words that this one does not know: shown as it came, never followed."""

    text: str

    def __str__(self) -> str:
        return self.text


WaitTarget = PeerId | AnyReplica | Resource | Unknown
"""Who or what has to act before a wait ends."""


@dataclass(frozen=True, slots=True)
class ForMicrobatch:
    """On behalf of a microbatch: the same value on every node that it comes by, so that its waits can be followed."""

    peer: PeerId
    """The node of stage 0 that it comes from."""
    counter: int
    held_out: bool = False
    """It is evaluated, not trained on."""

    def __str__(self) -> str:
        return f"{'held-out ' if self.held_out else ''}microbatch {self.counter} of {self.peer}"


@dataclass(frozen=True, slots=True)
class ForRound:
    """For an outer round: the own one, or one that a partner has asked for."""

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
    """What else a wait may be for."""

    CHECKPOINT = "checkpoint"
    NEWCOMER = "for a newcomer"
    LOST_STAGE = "the weights of a lost stage"


Purpose = ForMicrobatch | ForRound | ForGuarding | Task | Unknown
"""What a wait is for."""

ACTIVATION = "activation"
"""`Wait.what` of the receiver of a call whose tensors have not all come: it is the caller that has to act."""


def for_microbatch(microbatch: MicrobatchId) -> ForMicrobatch:
    """The purpose of everything that is done for this microbatch; held-out ones have incarnation 0."""
    return ForMicrobatch(microbatch.peer, microbatch.counter, microbatch.incarnation == 0)


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a node waits for."""

    what: str
    """A noun: `gradient`, `snapshot`, `inner step`, `microbatches`."""
    whom: WaitTarget
    """Who or what has to act."""
    since_s: float
    """How long it has waited, seconds."""
    deadline_s: float | None
    """How long it waits, or such a wait takes, at most, seconds from its beginning; None: as long as it takes."""
    why: Purpose | None = None
    idle: bool = False
    """A duty beside the training, often one with nothing to do: nothing is held up by it."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A call of a peer that this node has in hand."""

    caller: PeerId
    why: Purpose
    """As in the caller's own `Wait.why`."""
    since_s: float


@dataclass(frozen=True, slots=True)
class SeenPeer:
    """Another node, as this one knows it."""

    advert: Advert
    age_s: float = 0.0
    """Since it announced itself like this."""
    aside_s: float = 0.0
    """It has failed, and is not asked again for this time."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong now, although the node goes on."""

    name: str
    """`disk`, `libp2p`, …"""
    message: str
    """What is wrong and what to do, one line."""
    since_s: float


@dataclass(frozen=True, slots=True)
class MicrobatchSize:
    """What an inner step of the run moves between two stages."""

    per_step: int
    """Microbatches that each replica of stage 0 reads."""
    activation_bytes: int
    """Hidden states of one, as they travel."""
    gradient_bytes: int
    forward: str
    """Codec of the hidden states."""
    backward: str
    """Of their gradients."""


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What the instruments of a node have counted since its start."""

    up_s: float = 0.0
    tokens: int = 0
    tokens_per_s: float = 0.0
    """Over about the last ten seconds; at stage 0, what this node trains on."""
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
    """What peers sent and was not taken as it was (`core.guard`), by what came of it."""
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the device waited, by cause."""
    device_s: float = 0.0
    """Seconds that the device worked for inner steps."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_per_s: float = 0.0
    """In and out, over about the last ten seconds."""
    upload_bytes_per_s: float | None = None
    """What its line up can do, as measured; None: not yet."""
    download_bytes_per_s: float | None = None
    """What its line down can do, likewise."""
    round_trip_s: float | None = None
    """To a peer with nothing in between, the median over those that it asked; None: not yet, or there are none."""
    loop_silent_s: float = 0.0
    """Since the event loop came to its heartbeat last."""
    rss_bytes: int = 0
    disk_free_bytes: int | None = None
    """Where the node's directory is."""
    unix_time_s: float = 0.0
    """This machine's wall clock."""


@dataclass(frozen=True, slots=True)
class Status:
    """One node, now."""

    advert: Advert
    """Who it is: peer id, run id, stage, state, step, outer round, addresses, speeds."""
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
    """Everybody else, sorted by peer id."""
    deserted: Mapping[int, float] = field(default_factory=dict)
    """Stages that nobody serves, as far as this node knows, and for how many seconds."""
    step_took_s: float | None = None
    """Median seconds from one inner step to the next, of the last ones."""
    since_step_s: float | None = None
    """Since the last inner step ended, or training began; None while not training."""
    in_flight: int = 0
    """Microbatches admitted here that have not ended; stage 0 admits none."""
    places: int | None = None
    """Microbatches that may be in flight here at once, by memory and settings; None: any number."""
    waiting: int = 0
    """Microbatches that wait to be admitted."""
    troubles: tuple[Trouble, ...] = ()
    closed_until: str | None = None
    """The time of day, where this node is, at which its owner's hours begin again; None: they are on."""
    microbatch: MicrobatchSize | None = None
    """None while the node has no weights."""
    figures: NodeFigures = NodeFigures()
