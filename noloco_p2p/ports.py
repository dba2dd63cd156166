"""What a node needs from the outside world: seven ports, each with a real and a simulated implementation.

The real ones are in `io/` (`compute/` for stage and device), the simulated ones in `sim/`, in files of the same name. A
port exposes no detail of either. Times are seconds; a `deadline_s` counts from the call. Shape legend: B microbatch, T
sequence, D hidden size.
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
    """One call's claim to the body of an activation, which is sent once the peer asks for it, or at once."""

    take: Callable[[], bool]
    """Called when the peer asks for the body: may it be sent there? False ends the call: another was faster."""
    left: Callable[[], None]
    """Called once all of the body has been sent."""
    replying: Callable[[], None] = lambda: None
    """Called when the reply begins to arrive."""
    asked: bool = True
    """Whether the peer must ask first; if not, the body is sent at once, unless it is too large."""


ALONE = Claim(lambda: True, lambda: None, asked=False)
"""The claim of a call that competes with no other: its peer gets the body in any case, and at once if it is small."""


class Body(Protocol):
    """The tensors of an activation whose header has arrived. A large body is sent only once it is asked for."""

    @property
    def received(self) -> int:
        """Bytes received so far."""

    def reply_soon(self) -> None:
        """Give notice that the reply follows within a few round trips: idle connections are warmed up for it."""

    async def __call__(self) -> Activation:
        """Ask for the tensors and receive them. Raises Violation (wrong digest, length or order) or Unreachable."""


class Handler(Protocol):
    """What a transport calls when a peer calls this node; implemented by `node.rpc_handler`.

    `caller` is the peer id that the caller's certificate proves. Every method may raise Busy, Declined or Violation,
    which the caller's transport raises again on the other side (a Violation with `ours` set); anything else is a bug
    and reaches the caller as Declined. A method is cancelled when its caller disconnects or its deadline passes.
    """

    async def propagate(self, caller: PeerId, header: Header, body: Body) -> Gradient:
        """Serve one microbatch. Decides on the header alone; `body` is awaited at most once, and only if needed."""

    async def evaluate(self, caller: PeerId, header: Header, body: Body) -> LossSum:
        """Take one held-out microbatch forward to its loss; nothing of it is counted or kept."""

    async def fetch_snapshot(self, caller: PeerId, request: SnapshotRequest) -> Snapshot:
        """What `request` asks for, from its round, or if that is not reached within `wait_s`, from another one held:
        the newest, or the nearest under a `lasting` rule.

        For a stage that is not this node's own only weights are available: the newest that it guards, without a wait.
        """

    def lend_state(self, caller: PeerId, number: int | None) -> AbstractAsyncContextManager[ReplicaState]:
        """This replica's state, frozen while the context lasts. Callers at about the same time share one copy.

        `number` asks for the very copy of which the caller already has a part. Raises Declined if that copy is gone.
        """

    def progress(self, caller: PeerId, microbatches: Sequence[MicrobatchId]) -> list[Progress | None]:
        """How far this node is with each microbatch; None for a microbatch that it is not working on."""

    def describe(self, caller: PeerId) -> NodeDescription:
        """Who this node is and how far it has come."""


class Transport(Protocol):
    """Calls to peers and from peers. Used by the node, from its event loop only."""

    line: MeasuredLine
    """The speed of this node's line, measured on the bodies that it has sent and received."""

    def sending(self, activation: Activation, peer: Advert) -> Sending:
        """The best way to send an activation to a peer."""

    def warm(self, peers: Sequence[Advert], nbytes: int) -> None:
        """A body of about `nbytes` may be sent to one of these peers within a few round trips: if its connections have
        been idle and it is worth it, warm them up with filler. Returns at once. A failure here is ignored: the body's
        own call will run into it."""

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        """Send an activation, and wait for its gradient for as long as the link and the peer's process are alive.

        The body is sent once the peer has asked for it and `claim` allows it, or at once. Fills in the header's `specs`
        and `digest`. The returned gradient has `activation.reply_spec` and the same microbatch id (otherwise
        Violation). Raises Busy, Declined, Violation, Unreachable.
        """

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> LossSum:
        """Send a held-out activation, and wait for its loss. Raises the same errors as `propagate`."""

    async def progress(
        self, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        """Ask how far the peer is with each microbatch. The request does not queue behind bodies that are being sent.
        Raises the same errors as `propagate`."""

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: TensorSpecs
    ) -> Snapshot:
        """Fetch what `request` asks for, tensor by tensor, from a replica of its stage or from a guardian.

        The peer may delay its answer by up to `wait_s`, until it has reached the round. From then on `deadline_s`
        bounds the transfer, and a silence ends it much earlier. Raises Violation unless the tensors are exactly
        `expected`, in that order, and the digests agree.
        """

    async def fetch_state(self, peer: Advert, deadline_s: float, expected: TensorSpecs) -> ReplicaState:
        """Fetch a replica's whole state, tensor by tensor, within `deadline_s`.

        An interrupted transfer resumes with the same copy of the same peer. Raises Unreachable if the peer is gone for
        good, Declined if it has no state to give or the copy is gone, Violation as `fetch_snapshot` does.
        """

    async def describe(self, peer: Advert) -> NodeDescription:
        """Ask a peer who it is and how far it has come, which takes a few seconds at most. The answer must prove that
        it is from the peer itself and made for this call; anything else is a Violation. Raises the same errors as
        `propagate`."""

    async def serve(self, handler: Handler) -> None:
        """Start answering calls with `handler`. Raises LocalError if the port is in use."""

    async def close(self) -> None:
        """Refuse new calls, end those in flight, free everything."""


class Directory(Protocol):
    """Who else is in the swarm."""

    async def announce(self, advert: Advert, ttl_s: float) -> None:
        """Publish or renew this node's advert. Raises Unreachable if the directory cannot be written to."""

    async def peers(self) -> Sequence[Advert]:
        """All live adverts of this run, including our own, with `announced_at`, sorted by peer id. Raises Unreachable.

        A node that has withdrawn stays listed for a while, in state `left`. Callers share one list and must not change
        it.
        """

    async def withdraw(self, step: float) -> None:
        """Announce that this node has left at this clock, so that nobody waits for its advert to expire."""


class Stage(Protocol):
    """One pipeline stage: its weights, its optimizer, its slow weights. Synchronous: the node runs it on a `Device`.

    `graph` is a handle to an autograd graph that the stage keeps.
    """

    @property
    def state(self) -> StageState:
        """The stage's fixed properties: index, size, tensor shapes."""

    @property
    def places(self) -> int | None:
        """How many microbatches fit into memory at once, as last measured; None: any number. Callable on any thread."""

    def forward(self, inputs: HostTensor, mask: HostTensor | None) -> tuple[int, HostTensor]:
        """Forward pass that keeps its graph. Returns (graph, hidden states as they are sent).

        `inputs`: B×T int32 tokens at stage 0, hidden states at later ones. Raises Violation if they are not finite or
        not of this run's shape.
        """

    def check(self, gradient: Gradient) -> None:
        """Raise Violation unless the gradient has this run's shape and codec, and no more tokens than a microbatch. Its
        values may still not be finite. Returns at once; callable on any thread."""

    def backward(self, graph: int, microbatch: MicrobatchId, gradient: Gradient) -> Contribution:
        """Backward pass through a kept graph, which is then freed. Adds gradients and tokens, unless the microbatch id
        has been spent here. The gradient must pass `check`."""

    def loss_backward(
        self, microbatch: MicrobatchId, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None
    ) -> Contribution:
        """The last stage: forward, summed loss and backward in one operation. Raises Violation as `forward` does."""

    def discard(self, graph: int) -> None:
        """Free a graph that will not be used. Returns at once; unknown handles are ignored."""

    def evaluate(self, inputs: HostTensor, targets: HostTensor, mask: HostTensor | None) -> HostTensor | LossSum:
        """Forward pass without a graph. Returns hidden states, or at the last stage the loss."""

    def is_sound(self) -> bool:
        """Whether the weights, and the output for a microbatch that the stage makes itself, are finite. Nothing of that
        pass is counted or kept."""

    def compare(self, one: Gradient, other: Gradient) -> GradientLikeness:
        """Compare two gradients of the same data. Does not occupy the device. Raises Violation as `check` does."""

    def inner_step(self, label: StepLabel) -> StepResult:
        """Divide by the tokens, clip, move θ (METHOD.md, "Inner step"), zero the accumulators."""

    def snapshot(self, round: int, step: int) -> FrozenRound:
        """Freeze what the outer rule offers, and the present θ; later changes do not touch them.

        Under a rule that takes from all replicas, `view` has the digest but names no replicas yet.
        """

    def encode(self, frozen: FrozenRound, request: SnapshotRequest, caller: PeerId) -> Snapshot:
        """What `caller` asks for from a frozen round, encoded for the wire. Does not occupy the device.

        Raises Violation for a request that cannot be answered, Declined if the frozen values are not finite.
        """

    def decode(
        self, mine: FrozenRound, request: SnapshotRequest, theirs: Snapshot, before: PartnerVector | None = None
    ) -> PartnerVector:
        """Decode a partner's answer to `request`. Does not occupy the device. Raises Violation if it does not fit or is
        not finite.

        If something is `missing` from the result, request that from the partner, for the same round, and decode the
        answer with this result as `before`, which is consumed. `mine` is the frozen round from which the bounds of the
        request were made.
        """

    def merge(self, mine: FrozenRound, theirs: Sequence[PartnerVector] = (), counted: bool = True) -> float | None:
        """Apply the outer rule and N3 (METHOD.md, "Outer rules") to the newest frozen round, with others' or alone.

        Returns the replica std, estimated from θ before the merge (METHOD.md, "Measures"); None if alone. Unless
        `counted`, only the others' vectors are merged, and there must be some. Under a rule of gradients, the coming
        inner step takes the sum. No graph may be open. Inner steps taken since the freeze stay in θ. Written to the
        audit, if there is one.
        """

    def adopt(self, theirs: Snapshot) -> None:
        """Start from a replica's weights alone: θ = θ_f; rule and optimizer start afresh. Raises as `restore` does."""

    def capture(self, round: int, step: float, inner_steps: int) -> ReplicaState:
        """Freeze everything as it is now, except the inner step under way; later changes do not touch it."""

    def restore(self, theirs: ReplicaState) -> None:
        """Become that replica: weights, momentum, optimizer, spent ids; the inner step under way is forgotten.

        Raises Violation, and changes nothing, if the state does not fit or is not finite.
        """


class Operation(Enum):
    """The operations of a stage on its device."""

    FORWARD = auto()
    BACKWARD = auto()
    LOSS_BACKWARD = auto()
    EVALUATE = auto()
    INNER_STEP = auto()
    OUTER = auto()
    """A snapshot, merge, adoption, capture or restoration."""

    @property
    def priority(self) -> int:
        """The lowest number goes first; operations of equal priority run in the order of their calls.

        A backward pass completes what the previous stage waits for and frees a graph, so it goes before a forward pass,
        which only adds to what is in flight (as in the "one forward, one backward" schedule of pipelines). An inner
        step or a merge is just as urgent, because the replica admits nothing until it is done. Evaluation has no
        deadline.
        """
        return 1 if self is Operation.FORWARD else 2 if self is Operation.EVALUATE else 0


R = TypeVar("R")
DEVICE_CLOSED = "the device has been closed"


class Device(Protocol):
    """Runs the operations of a stage one at a time, each to its end."""

    async def call(self, operation: Operation, work: Callable[[], R], *, lost: Callable[[R], None] | None = None) -> R:
        """Return the result of `work`, or raise what it raised (LocalError if out of memory).

        If cancelled before the work starts, the work does not run. If cancelled later, it runs to its end and `lost`
        receives the result, on the event loop. Raises LocalError if the device is closed.
        """

    async def on_host(self, work: Callable[[], R]) -> R:
        """The result of work on host memory, which runs in parallel with the device and waits for nothing on it."""

    def post(self, work: Callable[[], object]) -> None:
        """Run `work` soon, without waiting for it. After `close` it is dropped."""

    def take_busy_s(self) -> float:
        """Seconds of work since the previous call of this method. Must be called inside `work`."""

    def running_s(self) -> float:
        """For how many seconds the running operation has run; 0.0 if none runs."""

    def close(self, *, hung: bool = False) -> None:
        """Free the device and its memory after the running operation. Waiting calls get LocalError, and so does the
        running one if it is `hung`. Returns at once."""


class Batches(Protocol):
    """Training and held-out data; used by stage 0 only."""

    async def next(self) -> Batch:
        """The next training microbatch; the data never end. Raises LocalError if they cannot be read."""

    def validation(self) -> Iterator[Batch]:
        """The run's held-out microbatches: the same ones, in the same order, on every node and at every call."""

    @property
    def cursor(self) -> dict[str, object]:
        """JSON-ready position after the last batch that `next` returned; a stream opened with it continues there."""

    def close(self) -> None:
        """Stop the reader thread."""


class Checkpoints(Protocol):
    """The checkpoints of one node in one run, for its own restart."""

    async def held(self) -> list[Holding]:
        """The checkpoints that look complete, oldest first; those of other runs and nodes are skipped. Raises
        LocalError."""

    async def save(self, checkpoint: Checkpoint, *, pin: bool = False) -> None:
        """Write a checkpoint atomically, and remove old ones beyond the limit. Raises LocalError (such as a full disk);
        then the old ones stay.

        `pin`: the previous checkpoint of the same stage, if there is one, stays until another one is pinned.
        """

    async def load(self, held: Holding) -> Checkpoint | None:
        """Read a checkpoint. None if it turns out to be torn or corrupt; then use the one before. Raises LocalError."""


class Telemetry(Protocol):
    """Events and durations of a node, for its observers. Never raises into its caller and never blocks it."""

    def event(self, kind: str, /, **fields: object) -> None:
        """Record an event of this kind."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Measure the seconds spent inside the `with`, under this name (ARCHITECTURE.md, "Metrics")."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a node needs from the outside world. The two makers run once the node has chosen its stage.

    `make_batches` continues at a cursor, or starts at the beginning if given None. It runs again if the node returns
    to stage 0.
    """

    transport: Transport
    directory: Directory
    telemetry: Telemetry
    checkpoints: Checkpoints
    make_stage: Callable[[int], Awaitable[tuple[Stage, Device]]]
    make_batches: Callable[[Mapping[str, object] | None], Awaitable[Batches]]
    secret: int | None
    """At least 64 random bits of this process that no peer knows; None: no data is sent twice."""
    local_time: Callable[[], datetime]
    """The time on the machine's wall clock."""
