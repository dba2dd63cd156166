"""What a node tells of itself at `/status`: where it stands, whom it sees, and what it waits for. Pure values.

Points in time are told as ages, `…_s` seconds before the moment of asking: nobody else knows this node's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_p2p.core.messages import Advert, MicrobatchId, PeerId

DEVICE = "device"
"""`Wait.whom` of an operation on this node's own device."""
INNER_STEP = "inner step"
"""`Wait.whom` of what goes on when this node's own inner step does: its other waits tell why that has not ended."""
DIRECTORY, DISK, DATA, SWARM, OWNER = "directory", "disk", "data", "swarm", "owner"
"""`Wait.whom` of waits for what the name says: the DHT, the file system, the data set, all other nodes, a person."""


def of_stage(stage: int) -> str:
    """`Wait.whom` of a wait for anybody of a stage."""
    return f"stage {stage}"


def of_microbatch(microbatch: MicrobatchId) -> str:
    """`Wait.why` and `Serving.why` of what is done for one microbatch: the same on every node that it comes by."""
    kind = "microbatch" if microbatch.incarnation else "held-out microbatch"
    return f"{kind} {microbatch.counter} of {microbatch.peer}"


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that a node waits for."""

    what: str
    """A noun: `gradient`, `snapshot`, `inner step`, `microbatches`."""
    whom: str
    """Who has to act: a peer id, `stage 1` (anybody of it), `device`, or one of the other names above."""
    since_s: float
    """How long it has waited, seconds."""
    deadline_s: float | None
    """How long it waits, or such a wait takes, at most, seconds from its beginning; None: as long as it takes."""
    why: str = ""
    """On whose behalf (`of_microbatch`), or what for."""
    idle: bool = False
    """A duty beside the training, often one with nothing to do: nothing is held up by it."""


@dataclass(frozen=True, slots=True)
class Serving:
    """A call of a peer that this node has in hand."""

    caller: PeerId
    why: str
    """As in the caller's own `Wait.why`."""
    since_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Another node, as this one knows it."""

    advert: Advert
    age_s: float = 0.0
    """Since it announced itself like this."""
    aside_s: float = 0.0
    """It has failed, and is not asked again for so long."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that is wrong now, although the node goes on."""

    name: str
    """`disk`, `libp2p`, …"""
    message: str
    """What is wrong and what to do, one line."""
    since_s: float


@dataclass(frozen=True, slots=True)
class Figures:
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
    idle_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the device waited, by cause."""
    device_s: float = 0.0
    """Seconds that the device worked for inner steps."""
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_per_s: float = 0.0
    """In and out, over about the last ten seconds."""
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
    seen: tuple[Seen, ...] = ()
    """Everybody else, sorted by peer id."""
    deserted: Mapping[int, float] = field(default_factory=dict)
    """Stages that nobody serves, as far as this node knows, and since how many seconds."""
    step_took_s: float | None = None
    """Median seconds from one inner step to the next, of the last ones."""
    since_step_s: float | None = None
    """Since the last inner step ended, or training began; None while not training."""
    in_flight: int = 0
    """Microbatches admitted, or under way."""
    waiting: int = 0
    """Microbatches that wait at the door."""
    troubles: tuple[Trouble, ...] = ()
    figures: Figures = Figures()
