"""Snapshots and replica states as messages of proto/noloco.proto, and back. No I/O.

Nothing is allocated for tensors that were not expected, and none is returned before all of them have come whole.
"""

from collections.abc import Iterator
from math import isfinite

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Advert, ReplicaState, Snapshot, TensorSpec
from noloco_p2p.errors import Declined, Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.frame_codec import packed, unpacked

PEER_ID_CHARACTERS = 128
"""Longest peer id that is believed; an Ed25519 one has 52."""
LARGEST_COUNT = 2**53
"""Counts of rounds and steps beyond this are none: a clock in steps could not hold them."""


def to_snapshot(snapshot: Snapshot) -> Iterator[bytes]:
    """The messages of a snapshot: the header alone, so that it tells when the transfer begins, then the tensors."""
    specs = [message_codec.to_spec(tensor.spec) for tensor in snapshot.tensors]
    header = pb.SnapshotHeader(peer=snapshot.peer, round=snapshot.round, step=snapshot.step, specs=specs)
    yield packed(pb.SnapshotMessage(header=header), ())
    digests = (message_codec.digest(tensor.data) for tensor in snapshot.tensors)
    for pack in wire.packs(wire.frames(snapshot.tensors, digests)):
        yield packed(pb.SnapshotMessage(), pack)


def to_state(state: ReplicaState, tensor: int, offset: int) -> Iterator[bytes]:
    """The messages of a state from byte `offset` of tensor `tensor` on: the header alone, then the tensors.

    Raises Violation at the first message when there is no such place in it.
    """
    if not (tensor < len(state.tensors) and offset <= state.tensors[tensor].data.nbytes) and (tensor, offset) != (0, 0):
        raise Violation(f"a state of {len(state.tensors)} tensors has no byte {offset} of tensor {tensor}")
    header = pb.StateHeader(
        peer=state.peer,
        number=state.number,
        stage=state.stage,
        round=state.round,
        step=state.step,
        inner_steps=state.inner_steps,
        adam_steps=state.adam_steps,
        specs=[message_codec.to_spec(one.spec) for one in state.tensors],
    )
    yield packed(pb.StateMessage(header=header), ())
    rest = state.tensors[tensor:]
    digests = (message_codec.digest(one.data) for one in rest)
    for pack in wire.packs(wire.frames(rest, digests, first=tensor, offset=offset)):
        yield packed(pb.StateMessage(), pack)


class SnapshotReader:
    """Puts a snapshot together: of exactly the `expected` tensors, or of any sane ones with so many bytes in all."""

    def __init__(self, expected: tuple[TensorSpec, ...] | int) -> None:
        self._expected = expected
        self._head: pb.SnapshotHeader | None = None
        self._assembler: wire.Assembler | None = None

    def feed(self, raw: bytes) -> Snapshot | None:
        """The snapshot, once all of it has come. Raises what a refusal means, Violation unless it is as expected."""
        message, frames = unpacked(raw, pb.SnapshotMessage)
        if self._assembler is None:
            if message.HasField("refusal"):
                raise message_codec.to_error(message.refusal)
            self._head = message.header
            specs = self._checked(message.header)
            self._assembler = message_codec.assembler(specs, sum(spec.nbytes for spec in specs))
        message_codec.feed(self._assembler, frames)
        if not self._assembler.complete or self._head is None:
            return None
        return Snapshot(self._head.peer, self._head.round, self._head.step, self._assembler.finish())

    def _checked(self, header: pb.SnapshotHeader) -> tuple[TensorSpec, ...]:
        _check_peer(header.peer)
        _check_counts(header.round, header.step)
        specs = tuple(message_codec.from_spec(spec) for spec in header.specs)
        if isinstance(self._expected, int):
            wire.check_snapshot(specs, self._expected)
        else:
            wire.check_same(specs, self._expected, "snapshot")
        return specs


class StateReader:
    """Puts the state of one replica together, over several calls if need be, all of the same frozen copy."""

    def __init__(self, peer: Advert, expected: tuple[TensorSpec, ...]) -> None:
        self._peer = peer
        self._expected = expected
        self._head: pb.StateHeader | None = None
        self._at_header = True
        self._assembler: wire.Assembler | None = None

    @property
    def place(self) -> tuple[int, int] | None:
        """The tensor and the byte of it that are due; None before the first header. It only grows."""
        return None if self._assembler is None else self._assembler.place

    def request(self) -> pb.StateRequest:
        """What to ask in the next call; the reply to it is fed from its beginning."""
        self._at_header = True
        if self._head is None or self._assembler is None:
            return pb.StateRequest()
        tensor, offset = self._assembler.place
        return pb.StateRequest(resume=pb.StateRequest.Resume(number=self._head.number, tensor=tensor, offset=offset))

    def feed(self, raw: bytes) -> ReplicaState | None:
        """The state, once all of it has come. Raises what a refusal means, Violation unless it is as expected."""
        message, frames = unpacked(raw, pb.StateMessage)
        if self._at_header:
            if message.HasField("refusal"):
                raise message_codec.to_error(message.refusal)
            self._begin(message.header)
            self._at_header = False
        if self._assembler is None or self._head is None:
            raise Violation("the state has no header")
        message_codec.feed(self._assembler, frames)
        if not self._assembler.complete:
            return None
        head = self._head
        return ReplicaState(
            peer=head.peer,
            stage=head.stage,
            round=head.round,
            step=head.step,
            inner_steps=head.inner_steps,
            adam_steps=head.adam_steps,
            tensors=self._assembler.finish(),
            number=head.number,
        )

    def discard(self) -> None:
        """Free what has come."""
        if self._assembler is not None:
            self._assembler.discard()

    def _begin(self, header: pb.StateHeader) -> None:
        """The first header is checked and kept; those of later calls must be equal to it."""
        if self._head is not None:
            if header != self._head:
                raise Violation(f"{self._peer.peer_id} goes on with another copy of its state than it began with")
            return
        if header.peer != self._peer.peer_id:
            raise Violation(f"the state is of {header.peer[:64]!r}, not of {self._peer.peer_id!r}")
        if header.stage != self._peer.stage:
            raise Declined(f"{self._peer.peer_id} holds stage {header.stage} now, not {self._peer.stage}")
        _check_counts(header.round, header.inner_steps)
        if not (isfinite(header.step) and header.step >= 0 and header.adam_steps <= header.inner_steps):
            raise Violation(
                f"a state at step {header.step} after {header.adam_steps} of {header.inner_steps} steps makes no sense"
            )
        wire.check_same(tuple(message_codec.from_spec(spec) for spec in header.specs), self._expected, "state")
        self._head = header
        self._assembler = message_codec.assembler(self._expected, sum(spec.nbytes for spec in self._expected))


def _check_peer(peer: str) -> None:
    if not (0 < len(peer) <= PEER_ID_CHARACTERS and peer.isascii() and peer.isprintable()):
        raise Violation("the snapshot is of a peer whose id is no short printable text")


def _check_counts(*counts: int) -> None:
    if max(counts) > LARGEST_COUNT:
        raise Violation(f"a count of {max(counts)} rounds or steps makes no sense")
