"""What a node needs of the world: seven ports, each with one real implementation and one simulated one.

`io/` (and `compute/` for stage and device) has the real ones, `sim/` the others, in files of the same name. A port
leaks neither. Times are seconds; a `deadline_s` counts from the call. Shape legend: B microbatch, T sequence, D hidden
size.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from typing import Protocol, TypeVar

from noloco_p2p.core.gradient_pairs import GradientLikeness
from noloco_p2p.core.line_rate import MeasuredLine, Sending
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Batch,
    Checkpoint,
    Gradient,
    Header,
    Holding,
    HostTensor,
    LossSum,
    MicrobatchId,
    NodeDescription,
    PeerId,
    Progress,
    ReplicaState,
)
from noloco_p2p.core.snapshots import FrozenRound, PartnerVector, Snapshot, SnapshotRequest
from noloco_p2p.core.stage_values import Contribution, StageState, StepLabel, StepResult, TensorSpecs


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to a body that leaves when a peer has asked for it, or at once."""

    take: Callable[[], bool]
    """A peer has asked: may it leave for this one? False: another peer was faster, the call is over."""
    left: Callable[[], None]
    """All of it has been sent."""
    replying: Callable[[], None] = lambda: None
    """The reply begins to come."""
    asked: bool = True
    """False: the body leaves at once, unless it is too large."""


ALONE = Claim(lambda: True, lambda: None, asked=False)
"""Of a call to a peer that is the only one to get the body."""


class Body(Protocol):
    """The tensors of an activation whose header is known. A large body is not sent before it is asked for."""

    @property
    def received(self) -> int:
        """Bytes that have come so far."""

    def reply_soon(self) -> None:
        """The reply follows within a few round trips: connections that have rested are made fast for it."""

    async def __call__(self) -> Activation:
        """Ask for them and take them in. Raises Violation (digest, length, order) or Unreachable."""


class Handler(Protocol):
    """What a transport calls when a peer calls this node; implemented by `node.rpc_handler`.

    `caller` is the peer id that the caller's certificate proves. Every method may raise Busy, Declined or Violation,
    which the caller's transport raises again on the other side (a Violation with `ours` set); anything else is a bug
    and reaches the caller as Declined. The handler is cancelled when its caller is gone or its deadline has passed.
    """

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """Serve one microbatch. Decides on the header; `body` is awaited at most once, and only if it is wanted."""

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """Forward one held-out microbatch to its loss; leaves no trace."""

    async def fetch_snapshot(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        """What is asked for of the round wanted, or after at most `wait_s` of the newest one held.

        Of a stage that is not this node's own there are weights only, the newest that it guards, at once.
        """

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        """This replica's state, frozen, for as long as the context lasts; shared by all who ask at about the same time.

        `number` asks for the very copy of which the caller has a part already; Declined when it is gone.
        """

    def progress(self, caller: PeerId, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """How far this node is with each of them; None for one that it does not have in hand."""

    def describe(self, caller: PeerId) -> NodeDescription:
        """Who this node is and how far it has come."""


class Transport(Protocol):
    """Calls to peers, and calls from them. Called by the node, from its event loop only."""

    line: MeasuredLine
    """What the bodies that came and went have shown of this node's line."""

    def sending(self, activation: Activation, peer: Advert) -> Sending:
        """How an activation had better go to a peer."""

    def warm(self, peers: Sequence[Advert], nbytes: int) -> None:
        """A body of about this size may go to one of these peers within a few round trips: if connections for it have
        rested and it is worth it, make them fast with filler. Returns at once; what fails here, the body's own call
        will find."""

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        """Send an activation, wait for the gradient as long as the link and the peer's process are there.

        The body leaves when the peer has asked for it and `claim` lets it, or at once.
        Fills in the header's `specs` and `digest`. The gradient returned is of `activation.reply_spec` and has the same
        microbatch id (else Violation). Raises Busy, Declined, Violation, Unreachable.
        """

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> LossSum:
        """Send a held-out activation, wait for its loss. Raises as propagate."""

    async def progress(
        self, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        """Ask how far the peer is with each of them, past everything that is being sent. Raises as propagate."""

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: TensorSpecs
    ) -> Snapshot:
        """Fetch what `request` asks for, tensor by tensor, from a replica of its stage or from a guardian.

        The peer may hold the answer back up to `wait_s` until it has reached the round; after that `deadline_s` bounds
        the transfer, and a silence ends it much earlier. Raises Violation unless the tensors are exactly `expected`, in
        that order, and digests agree.
        """

    async def fetch_state(self, peer: Advert, deadline_s: float, expected: TensorSpecs) -> ReplicaState:
        """Fetch a replica's whole state, tensor by tensor, within `deadline_s`.

        A transfer that is cut goes on with the same copy of the same peer. Raises Unreachable when the peer is gone for
        good, Declined when it has no state to give or the copy is gone, Violation as `fetch_snapshot`.
        """

    async def describe(self, peer: Advert) -> NodeDescription:
        """Ask a peer who it is and how far it has come (a few seconds at most). Only the peer itself can answer so, and
        only now: raises Violation for anything else. Raises as propagate."""

    async def serve(self, handler: Handler) -> None:
        """Start to answer calls with `handler`. Raises LocalError when the port is in use."""

    async def close(self) -> None:
        """Refuse new calls, end those in flight, free everything."""


class Directory(Protocol):
    """Who else is in the swarm."""

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """Publish or renew this node's advert. Raises Unreachable when the directory cannot be written to."""

    async def peers(self) -> Sequence[Advert]:
        """All live adverts of this run, own one included, with `announced_at`, sorted by peer id. Raises Unreachable.

        A node that has withdrawn is listed for a while in state `left`. Not to be changed: others read the same list.
        """

    async def withdraw(self) -> None:
        """Announce that this node has left, so that nobody waits for its advert to expire."""


class Stage(Protocol):
    """One pipeline stage: its weights, its optimizer, its slow weights. Synchronous: the node runs it on a `Device`.

    `graph` is a handle to a kept autograd graph.
    """

    @property
    def state(self) -> StageState:
        """What it is; never changes."""

    @property
    def places(self) -> int | None:
        """Microbatches for which there is memory at once, as last measured; None: for any number. From any thread."""

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Forward with a graph: (graph, `hidden` as it travels).

        `inputs`: B×T int32 tokens at stage 0, `hidden` later. Raises Violation: not finite, not of this run's shape.
        """

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """Backward through a kept graph, which is freed; adds gradients and tokens unless the id is spent here."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """The last stage: forward, summed loss and backward in one operation. Raises Violation as forward."""

    def discard(self, graph: int) -> None:
        """Free a graph that will not be used. Returns at once; unknown handles are ignored."""

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """Forward without a graph: hidden states, or at the last stage the loss."""

    def is_sound(self) -> bool:
        """Its weights and what it makes of a microbatch of its own are finite; nothing of it is counted or kept."""

    def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """Of two gradients that came for the same data. Works beside the device. Raises Violation as `backward`."""

    def inner_step(self, label: StepLabel) -> StepResult:
        """Divide by the tokens, clip, move θ (METHOD.md, "Inner step"), zero the accumulators."""

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Freeze what the outer rule offers, and θ of now; later changes do not touch them.

        Where the rule takes from all replicas its `view` has the digest, and nobody yet.
        """

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """What `caller` asks for of a frozen round, as it travels. Works beside the device.

        Raises Violation for a request that nothing answers to, Declined when what was frozen is not finite.
        """

    def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """What a partner's answer to `request` comes to. Works beside the device. Raises Violation: unfit, not finite.

        Where something is `missing` the partner is asked for that, of the same round, and its answer is decoded with
        what was there `before`, which is used up. `mine` is what the bounds of the request are of.
        """

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """The outer rule and N3 (METHOD.md, "Outer rules") with the newest frozen round and others', or alone.

        Returns the replica std, estimated from θ before the merge (METHOD.md, "Measures"); None when alone.
        Not `counted`: with the others' only, of whom there are some. Of gradients, the coming inner step takes the sum.
        No graph is open. Inner steps taken since then stay in θ. Audited if there is an audit.
        """

    def adopt(self, theirs: Snapshot) -> None:
        """Start from a replica's weights alone: θ = θ_f, the rule and the optimizer begin anew. Raises as `restore`."""

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Freeze everything of now but the inner step under way; later changes do not touch it."""

    def restore(self, theirs: ReplicaState) -> None:
        """Become that replica: weights, momentum, optimizer, spent ids; the inner step under way is forgotten.

        Raises Violation, and changes nothing, when it does not fit or is not finite.
        """


class Operation(Enum):
    """What a stage does on its device."""

    FORWARD = auto()
    BACKWARD = auto()
    LOSS_BACKWARD = auto()
    EVALUATE = auto()
    INNER_STEP = auto()
    OUTER = auto()
    """A snapshot, merge, adoption, capture or restoration."""

    @property
    def priority(self) -> int:
        """The lowest goes first, and within a priority the order is that of the calls.

        A backward pass ends what the previous stage waits for and frees a graph, so it goes before a forward pass,
        which only adds to what is in flight (as in the "one forward, one backward" schedule of pipelines). An inner
        step or a merge is as urgent, because the replica admits nothing until it is done. Evaluation has no deadline.
        """
        return 1 if self is Operation.FORWARD else 2 if self is Operation.EVALUATE else 0


R = TypeVar("R")
DEVICE_CLOSED = "the device has been closed"


class Device(Protocol):
    """Runs the operations of a stage one at a time, each to its end."""

    async def call(self, operation: Operation, work: Callable[[], R], *, lost: Callable[[R], None] | None = None) -> R:
        """The result of `work`, or what it raised (out of memory: LocalError).

        If cancelled before the work starts, it is not run. If cancelled later, it runs to its end and `lost` gets the
        result, on the loop. Raises LocalError: the device is closed.
        """

    async def beside(self, work: Callable[[], R]) -> R:
        """The result of work on host memory that waits for nothing on the device."""

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` soon without waiting for it. After `close` it is dropped."""

    def take_busy_s(self) -> float:
        """Seconds of work since the last call of this. Called inside `work`."""

    def close(self) -> None:
        """Free the device and its memory after the operation in hand; waiting calls get LocalError. Returns at once."""


class Batches(Protocol):
    """Training and held-out data; used by stage 0 only."""

    async def next(self) -> Batch:
        """The next training microbatch; never ends. Raises LocalError when the data cannot be read."""

    def validation(self) -> Iterator[Batch]:
        """The run's held-out microbatches: the same ones, in the same order, on every node and at every call."""

    @property
    def cursor(self) -> dict[str, object]:
        """JSON-ready position after the last batch that `next` returned; a stream made from it goes on there."""

    def close(self) -> None:
        """End the reading thread."""


class Checkpoints(Protocol):
    """What this node wrote for itself, and finds again after a restart. One node's, of one run."""

    async def held(self) -> list[Holding]:
        """The checkpoints that look whole, oldest first; those of another run or node are passed over."""

    async def save(self, checkpoint: Checkpoint, *, pin: bool = False) -> None:
        """Write one, all or nothing, and remove those too many. Raises LocalError (a full disk): the old ones stay.

        `pin`: the one before it stays until another one is pinned.
        """

    async def load(self, held: Holding) -> Checkpoint | None:
        """Read one. None when it turns out torn or corrupt: then the one before is the newest."""


class Telemetry(Protocol):
    """Events and durations of a node, for its observers. Can never raise into its caller, never blocks."""

    def event(self, kind: str, /, **fields: object) -> None:
        """Something happened."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Measures the seconds inside the `with`, by name (ARCHITECTURE.md, "Metrics")."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a node needs of the world. The two makers run once the node has chosen its stage.

    `make_batches` goes on at a `cursor`, or begins with None; it runs again for a node that comes to stage 0 anew.
    """

    transport: Transport
    directory: Directory
    telemetry: Telemetry
    checkpoints: Checkpoints
    make_stage: Callable[[int], Awaitable[tuple[Stage, Device]]]
    make_batches: Callable[[Mapping[str, object] | None], Awaitable[Batches]]
    secret: int | None
    """At least 64 random bits of this process that no peer knows; None: no data is sent twice, so nothing is secret."""
    local_time: Callable[[], datetime]
    """What the clock on the wall shows."""
