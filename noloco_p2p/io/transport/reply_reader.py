"""Assembles replies that carry tensors, from messages that are not trusted."""

from typing import Generic, TypeVar

from noloco_p2p.core import wire
from noloco_p2p.core.messages import Activation, Gradient, HostTensor, TensorSpec, is_peer_id
from noloco_p2p.errors import Violation
from noloco_p2p.io.transport import message_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.frame_codec import unpacked

ReplyMessage = TypeVar("ReplyMessage", pb.Reply, pb.SnapshotMessage, pb.StateMessage)
V = TypeVar("V")
MAX_SERVED = 1024
"""Most peers that one microbatch can have passed through; a run has fewer stages."""


class ReplyReader(Generic[ReplyMessage, V]):
    """Assembles a reply from its messages: a refusal, or a header and the tensors that it declares.

    Nothing is allocated before the header has been checked, and nothing is returned before all tensors are complete.
    """

    def __init__(self, kind: type[ReplyMessage]) -> None:
        self._kind: type[ReplyMessage] = kind
        self._header_due = True
        self._assembler: wire.Assembler | None = None

    def feed(self, raw: bytes) -> V | None:
        """Take in a message; returns the reply once it is complete, None before. Raises the error of a refusal, and
        Violation unless the reply is as expected."""
        message, frames = unpacked(raw, self._kind)
        if self._header_due:
            message_codec.check_served(message)
            specs = self._begin(message)
            self._assembler = self._assembler or message_codec.assembler(specs)
            self._header_due = False
        assert self._assembler is not None
        message_codec.feed(self._assembler, frames)
        return self._finish(self._assembler.finish()) if self._assembler.complete else None

    def close(self) -> None:
        """Free what has arrived, although a cancelled task still refers to it until the next garbage collection."""
        if self._assembler is not None:
            self._assembler.discard()

    def _begin(self, message: ReplyMessage) -> tuple[TensorSpec, ...]:
        """Check and keep the header in the first message; returns the tensors due. Raises Violation, Declined."""
        raise NotImplementedError

    def _finish(self, tensors: tuple[HostTensor, ...]) -> V:
        """Make the reply from its header and tensors."""
        raise NotImplementedError


class GradientReader(ReplyReader[pb.Reply, Gradient]):
    """Assembles the reply to an activation."""

    def __init__(self, activation: Activation) -> None:
        super().__init__(pb.Reply)
        self._microbatch = activation.header.microbatch
        self._spec = activation.reply_spec
        self._targets = activation.targets.spec
        self._head = pb.GradientHeader()

    def _begin(self, message: pb.Reply) -> tuple[TensorSpec, ...]:
        self._head = message.gradient
        if message_codec.from_microbatch(self._head.microbatch) != self._microbatch:
            raise Violation("the reply is not the gradient of the microbatch that was sent")
        spec = message_codec.from_spec(self._head.spec)
        if spec != self._spec:
            raise Violation(f"the gradient is {spec}, not {self._spec}"[: message_codec.MESSAGE_CHARACTERS])
        message_codec.check_loss(self._head.loss_sum, self._head.tokens, self._targets)
        if len(self._head.served) > MAX_SERVED or not all(map(is_peer_id, self._head.served)):
            raise Violation(f"the reply names more than {MAX_SERVED} peers, or one without a valid peer id")
        return (spec,)

    def _finish(self, tensors: tuple[HostTensor, ...]) -> Gradient:
        head = self._head
        return Gradient(self._microbatch, tensors[0], head.loss_sum, head.tokens, tuple(head.served), head.finite)
