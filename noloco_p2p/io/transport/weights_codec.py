"""Converts snapshots and replica states to messages of proto/noloco.proto and back. No I/O."""

from collections.abc import Iterator
from itertools import pairwise
from math import isfinite

from google.protobuf.message import Message

from noloco_p2p.core import wire
from noloco_p2p.core.agreement import LARGEST_GROUP, GroupView
from noloco_p2p.core.lattice_format import LatticeRequest
from noloco_p2p.core.messages import STATE_NUMBERS, Advert, HostTensor, ReplicaState, TensorSpec, is_peer_id
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.reply_reader import ReplyMessage, ReplyReader, V

MAX_SPENT = 16_384
"""Most spent ids in a state; only the newest are sent. A replica keeps at least a quarter as many."""


def from_request(message: pb.SnapshotRequest) -> SnapshotRequest:
    """A peer's request for a snapshot, not yet checked."""
    round = message.round if message.HasField("round") else None
    weights = message.weights if message.HasField("weights") else None
    lattice = LatticeRequest(message.bounds, tuple(message.chunks)) if message.HasField("bounds") else None
    return SnapshotRequest(message.stage, round, message.wait_s, weights, lattice)


def _check_counts(round: int, steps: int, fresh_round: int) -> None:
    """Raises Violation if the counts of received weights make no sense."""
    message_codec.check_counts(round, steps)
    if fresh_round > round:
        raise Violation(f"weights of round {round} that began at round {fresh_round} make no sense")


def to_snapshot(snapshot: Snapshot, message_bytes: int = wire.PACK_BYTES) -> Iterator[bytes]:
    """The messages of a snapshot: first the header alone, so that the receiver sees it begin, then the tensors."""
    specs = [message_codec.to_spec(tensor.spec) for tensor in snapshot.tensors]
    header = pb.SnapshotHeader(peer=snapshot.peer, round=snapshot.round, step=snapshot.step, specs=specs)
    header.fresh_round = snapshot.fresh_round
    if snapshot.view is not None:
        header.digest = snapshot.view.digest
        header.group.extend(snapshot.view.peers)
    stream = _frames(snapshot.tensors)
    return message_codec.streamed(pb.SnapshotMessage(header=header), stream, message_bytes, head_alone=True)


def to_state(state: ReplicaState, tensor: int, offset: int, message_bytes: int = wire.PACK_BYTES) -> Iterator[bytes]:
    """The messages of a state from byte `offset` of tensor `tensor` on: first the header alone, then the tensors.

    Raises Violation if the state has no such place.
    """
    if not (tensor < len(state.tensors) and offset <= state.tensors[tensor].data.nbytes) and (tensor, offset) != (0, 0):
        raise Violation(f"a state of {len(state.tensors)} tensors has no byte {offset} of tensor {tensor}")
    header = pb.StateHeader(
        peer=state.peer,
        specs=[message_codec.to_spec(one.spec) for one in state.tensors],
        spent=[pb.MicrobatchId(**one._asdict()) for one in state.spent[-MAX_SPENT:]],
        **{name: getattr(state, name) for name in STATE_NUMBERS},
    )
    stream = _frames(state.tensors[tensor:], tensor, offset)
    return message_codec.streamed(pb.StateMessage(header=header), stream, message_bytes, head_alone=True)


def _frames(tensors: tuple[HostTensor, ...], first: int = 0, offset: int = 0) -> Iterator[wire.Frame]:
    """See `wire.frames`. The digests grow as the chunks leave: that of a vector of 1 GiB would take 40 ms at once."""
    digest = message_codec.hasher(tensors[0].data[:offset] if tensors else b"")
    for frame in wire.frames(tensors, (0,) * len(tensors), first=first, offset=offset):
        if isinstance(frame, wire.Chunk):
            digest.update(frame.data)
        else:
            frame, digest = frame._replace(digest=digest.intdigest()), message_codec.hasher(b"")
        yield frame


class WeightsReader(ReplyReader[ReplyMessage, V]):
    """Reads the reply to a call that fetches weights."""

    method: str
    what: str
    """What is fetched, for error messages and the count of bytes."""

    def request(self, stripe: int) -> Message:
        """The request of the next call, whose reply is fed from its beginning; `stripe`: the number of its stripes."""
        raise NotImplementedError


class SnapshotReader(WeightsReader[pb.SnapshotMessage, Snapshot]):
    """Assembles a snapshot with exactly the `expected` tensors."""

    method = "FetchSnapshot"

    def __init__(self, request: SnapshotRequest, expected: tuple[TensorSpec, ...]) -> None:
        super().__init__(pb.SnapshotMessage)
        self.what = request.kind
        self._request = request
        self._expected = expected
        self._head = pb.SnapshotHeader()

    def request(self, stripe: int) -> pb.SnapshotRequest:
        """See `WeightsReader`; there is only one request."""
        r = self._request
        sent = pb.SnapshotRequest(round=r.round, wait_s=r.wait_s, stage=r.stage, weights=r.weights, stripe=stripe)
        if r.lattice is not None:
            sent.bounds = r.lattice.bounds
            sent.chunks.extend(r.lattice.some)
        return sent

    def _begin(self, message: pb.SnapshotMessage) -> tuple[TensorSpec, ...]:
        self._head = header = message.header
        if not is_peer_id(header.peer):
            raise Violation("the peer id of the snapshot is not short printable text")
        if len(header.group) > LARGEST_GROUP or not all(map(is_peer_id, header.group)):
            raise Violation(f"the snapshot names more than {LARGEST_GROUP} peers, or one without a valid peer id")
        if any(one >= other for one, other in pairwise(header.group)):
            raise Violation("the snapshot's peers are not in ascending order")
        _check_counts(header.round, header.step, header.fresh_round)
        return message_codec.from_specs(header.specs, self._expected, self.what)

    def _finish(self, tensors: tuple[HostTensor, ...]) -> Snapshot:
        head = self._head
        view = GroupView(tuple(head.group), head.digest) if head.HasField("digest") else None
        return Snapshot(head.peer, head.round, head.step, tensors, view, head.fresh_round)


class StateReader(WeightsReader[pb.StateMessage, ReplicaState]):
    """Assembles the state of one replica, over several calls if necessary, all from the same frozen copy."""

    method, what = "FetchState", "state"

    def __init__(self, peer: Advert, expected: tuple[TensorSpec, ...]) -> None:
        super().__init__(pb.StateMessage)
        self._peer = peer
        self._expected = expected
        self._head: pb.StateHeader | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """The tensor (its index) and the byte of it that are due next; None before the first header. Only grows."""
        return None if self._assembler is None else self._assembler.place

    def request(self, stripe: int) -> pb.StateRequest:
        """See `WeightsReader`; requests what has not arrived yet."""
        self._header_due = True
        if self._head is None or self._assembler is None:
            return pb.StateRequest(stripe=stripe)
        self._assembler.rewind()
        tensor, offset = self._assembler.place
        resume = pb.StateRequest.Resume(number=self._head.number, tensor=tensor, offset=offset)
        return pb.StateRequest(resume=resume, stripe=stripe)

    def _begin(self, message: pb.StateMessage) -> tuple[TensorSpec, ...]:
        """Checks and keeps the first header; those of later calls must equal it."""
        header = message.header
        if self._head is not None:
            if header != self._head:
                raise Violation(f"{self._peer.peer_id} continues with another copy of its state than it began with")
            return self._expected
        if header.peer != self._peer.peer_id:
            raise Violation(f"the state is of {header.peer[:64]!r}, not of {self._peer.peer_id!r}")
        if header.stage != self._peer.stage:
            raise Declined(f"{self._peer.peer_id} holds stage {header.stage} now, not {self._peer.stage}")
        _check_counts(header.round, header.inner_steps, header.fresh_round)
        if not (isfinite(header.step) and header.step >= 0 and header.adam_steps <= header.inner_steps):
            raise Violation(
                f"a state at step {header.step} after {header.adam_steps} of {header.inner_steps} steps makes no sense"
            )
        message_codec.from_specs(header.specs, self._expected, "state")
        if len(header.spent) > MAX_SPENT or not all(is_peer_id(one.peer) for one in header.spent):
            raise Violation(f"the state names more than {MAX_SPENT} microbatches, or one without an origin's id")
        self._head = header
        return self._expected

    def _finish(self, tensors: tuple[HostTensor, ...]) -> ReplicaState:
        head = self._head
        assert head is not None
        numbers = {name: getattr(head, name) for name in STATE_NUMBERS}
        spent = tuple(map(message_codec.from_microbatch, head.spent))
        return ReplicaState(head.peer, tensors=tensors, spent=spent, **numbers)
