"""Converts values of `core/messages` and `core/wire` to messages of proto/noloco.proto and back. No I/O.

Snapshots and replica states are in `weights_codec`. Messages from peers are checked here, as far as that is possible
without the tensors' bytes. Shape legend: B microbatch, T sequence, D hidden size.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain, islice
from math import isfinite, prod
from typing import TypeVar

import numpy
import xxhash

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import FILLER_BYTES
from noloco_p2p.core.messages import (
    LARGEST_COUNT,
    MAX_AVOIDED,
    PEER_ID_CHARACTERS,
    Activation,
    Gradient,
    Header,
    LossSum,
    MicrobatchId,
    NodeDescription,
    Origin,
    Progress,
    TensorSpec,
    is_peer_id,
)
from noloco_p2p.errors import Busy, Declined, NolocoError, PeerError, Violation
from noloco_p2p.humanize import plain
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.frame_codec import packed, unpacked

MESSAGE_CHARACTERS = 500
"""Longest text of a refusal, sent or received; the rest is cut off."""
LARGEST_LOSS = 1e5
"""Largest loss, nats per token. No language model is that wrong, and larger values could swamp a mean of losses."""
MAX_SPECS = 3
"""Most tensors in an activation."""
HIDDEN_DTYPES = frozenset({"float64", "float32", "bfloat16", "float16", "uint8"})
"""Element types of hidden states. uint8 holds codes with their scales (core.block_format)."""

KINDS: dict[type[NolocoError], pb.Refusal.Kind.ValueType] = {
    Busy: pb.Refusal.KIND_BUSY,
    Declined: pb.Refusal.KIND_DECLINED,
    Violation: pb.Refusal.KIND_VIOLATION,
}

Streamed = TypeVar("Streamed", pb.ActivationMessage, pb.Reply, pb.SnapshotMessage, pb.StateMessage)
"""The messages that carry frames."""

digest: Callable[[memoryview | bytes], int] = xxhash.xxh3_64_intdigest
hasher = xxhash.xxh3_64
"""64-bit xxh3 (1.8 ms for 64 MiB), and the same of bytes that come one after the other (`wire.Hasher`)."""


def allocate(length: int) -> memoryview:
    """An uninitialized buffer. A bytearray would be zeroed first, so every page would be written twice."""
    return numpy.empty(length, numpy.uint8).data


def assembler(specs: tuple[TensorSpec, ...]) -> wire.Assembler:
    """An assembler for these tensors, which have already been checked."""
    return wire.Assembler(specs, hasher, allocate)


def to_refusal(error: NolocoError) -> pb.Refusal:
    """The refusal that reports an error to the caller; errors that do not concern the caller become Declined."""
    return pb.Refusal(kind=KINDS.get(type(error), pb.Refusal.KIND_DECLINED), message=str(error)[:MESSAGE_CHARACTERS])


def to_error(refusal: pb.Refusal) -> PeerError:
    """The error that corresponds to a peer's refusal; its text is made printable and shortened."""
    message = plain(refusal.message, MESSAGE_CHARACTERS)
    if refusal.kind == pb.Refusal.KIND_VIOLATION:
        return Violation(message, ours=True)
    return Busy(message) if refusal.kind == pb.Refusal.KIND_BUSY else Declined(message)


def check_served(reply: pb.Reply | pb.SnapshotMessage | pb.StateMessage | pb.ProgressReply | pb.DescribeReply) -> None:
    """Raises the error of a refusal, if the reply is one."""
    if reply.HasField("refusal"):
        raise to_error(reply.refusal)


def to_spec(spec: TensorSpec) -> pb.TensorSpec:
    """A declared tensor."""
    return pb.TensorSpec(name=spec.name, dtype=spec.dtype, shape=spec.shape)


def from_spec(spec: pb.TensorSpec) -> TensorSpec:
    """A declared tensor, not yet checked."""
    return TensorSpec(spec.name, spec.dtype, tuple(spec.shape))


def from_specs(specs: Collection[pb.TensorSpec], expected: tuple[TensorSpec, ...], what: str) -> tuple[TensorSpec, ...]:
    """The declared tensors, which must be the `expected` ones. Raises Violation otherwise.

    Surplus ones are not even parsed, beyond the first.
    """
    wire.check_same([from_spec(spec) for spec in islice(specs, len(expected) + 1)], expected, what)
    return expected


def check_counts(*counts: int) -> None:
    """Raises Violation if a count of rounds or steps exceeds LARGEST_COUNT."""
    if max(counts) > LARGEST_COUNT:
        raise Violation(f"a count of {max(counts)} rounds or steps makes no sense")


def feed(into: wire.Assembler, frames: Iterable[wire.Frame]) -> None:
    """Feeds received frames to an assembler. Raises Violation."""
    for frame in frames:
        into.feed(frame)


def streamed(head: Streamed, stream: Iterable[wire.Frame], message_bytes: int, *, head_alone: bool) -> Iterator[bytes]:
    """The messages of a header and the tensors after it. With `head_alone` the header gets its own message."""
    alone: list[list[wire.Frame]] = [[]] if head_alone else []
    for group in chain(alone, wire.group_frames(stream, message_bytes)):
        yield packed(head, group)
        head = type(head)()


def from_microbatch(message: pb.MicrobatchId) -> MicrobatchId:
    """A microbatch's id. Raises Violation unless its peer id is valid: ids may be kept for a long time."""
    if not is_peer_id(message.peer):
        raise Violation("the peer id of a microbatch is not short printable text")
    return MicrobatchId(message.peer, message.incarnation, message.counter)


def to_activation(activation: Activation, *, head_alone: bool) -> Iterator[bytes]:
    """The messages of an activation: with `head_alone` the header comes before the tensors in its own message,
    otherwise in the first message with tensors."""
    return streamed(*_head_and_frames(activation), wire.PACK_BYTES, head_alone=head_alone)


def announced(
    activation: Activation, stripe: int = 0, filler_bytes: int = 0
) -> tuple[bytes, Callable[[int], Iterator[bytes]]]:
    """An activation's header as its own message, and a function that returns the messages of its body, given the most
    tensor bytes per message.

    If `stripe` is not 0, stripes with that number may carry some of these messages. `filler_bytes` asks for filler on
    them before the reply.
    """
    head, stream = _head_and_frames(activation)
    head.header.stripe, head.header.filler_bytes = stripe, filler_bytes
    body = pb.ActivationMessage()
    return packed(head, ()), lambda message_bytes: streamed(body, stream, message_bytes, head_alone=False)


def _head_and_frames(activation: Activation) -> tuple[pb.ActivationMessage, Iterator[wire.Frame]]:
    header, tensors = activation.header, activation.tensors
    specs = tuple(tensor.spec for tensor in tensors)
    digests = [digest(tensor.data) for tensor in tensors]
    head = pb.ActivationHeader(
        run_id=header.run_id,
        microbatch=pb.MicrobatchId(**header.microbatch._asdict()),
        origin=pb.Origin(peer=header.origin.peer, step=header.origin.step, index=header.origin.index),
        stage=header.stage,
        time_left_s=header.time_left_s,
        specs=[to_spec(spec) for spec in specs],
        digest=wire.combined_digest(specs, digests, hasher),
        patient=header.patient,
        label=header.label,
        avoid=header.avoid,
    )
    return pb.ActivationMessage(header=head), wire.frames(tensors, digests)


def fits_one_message(activation: Activation, whole_bytes: int = wire.PACK_BYTES) -> bool:
    """Whether the activation's tensors, and the gradient that answers them, each fit into `whole_bytes`."""
    return max(sum(tensor.data.nbytes for tensor in activation.tensors), activation.reply_spec.nbytes) <= whole_bytes


def from_header(message: pb.ActivationMessage, run_id: str, max_bytes: int) -> Header:
    """The header of an activation from a peer. Raises Violation if it is absent or makes no sense."""
    if not message.HasField("header"):
        raise Violation("the call carries no header")
    sent = message.header
    if sent.run_id != run_id:
        raise Violation(f"the activation belongs to run {sent.run_id[:64]!r}, this node works on {run_id!r}")
    if not (isfinite(sent.time_left_s) and sent.time_left_s > 0 and sent.stage > 0):
        raise Violation(f"an activation for stage {sent.stage} with {sent.time_left_s} s left makes no sense")
    if not is_peer_id(sent.origin.peer):
        raise Violation("the origin's id in an activation is not short printable text")
    if len(sent.avoid) > MAX_AVOIDED or not all(map(is_peer_id, sent.avoid)):
        raise Violation("the peers to avoid in an activation are too many, or not short printable text")
    if sent.filler_bytes not in (0, *FILLER_BYTES):
        raise Violation(f"{sent.filler_bytes} bytes of filler before a reply make no sense")
    check_counts(sent.origin.step, sent.origin.index)
    specs = tuple(from_spec(spec) for spec in sent.specs[: MAX_SPECS + 1])
    wire.total_bytes(specs, max_bytes)
    _check_specs(specs)
    return Header(
        run_id=run_id,
        microbatch=from_microbatch(sent.microbatch),
        origin=Origin(sent.origin.peer, sent.origin.step, sent.origin.index),
        stage=sent.stage,
        time_left_s=sent.time_left_s,
        specs=specs,
        digest=sent.digest,
        patient=sent.patient,
        label=sent.label,
        avoid=tuple(sent.avoid),
    )


def _check_specs(specs: tuple[TensorSpec, ...]) -> None:
    """Raises Violation unless these are `hidden` (B×T×D floating point, or one dimension of bytes), `targets` (B×T
    int32), and optionally `mask` (B×T uint8)."""
    hidden, batch = specs[:1], specs[1:]
    rest = (("targets", "int32"), ("mask", "uint8"))[: max(1, len(batch))]
    rows = batch[0].shape if batch else ()
    if (
        [spec.name for spec in hidden] != ["hidden"]
        or hidden[0].dtype not in HIDDEN_DTYPES
        or len(rows) != 2
        or (len(hidden[0].shape) != 1 if hidden[0].dtype == "uint8" else hidden[0].shape[:-1] != rows)
        or [tuple(spec) for spec in batch] != [(name, dtype, rows) for name, dtype in rest]
    ):
        shown = ", ".join(f"{s.name[:32]} {s.dtype} {s.shape}" for s in specs[:4])
        raise Violation(
            f"an activation is hidden B×T×D or bytes, targets B×T int32 and optionally mask B×T uint8, not: {shown}"
        )


def to_gradient(gradient: Gradient, message_bytes: int = wire.PACK_BYTES) -> Iterator[bytes]:
    """The messages of a gradient; the first has the header and the first chunk."""
    head = pb.GradientHeader(
        microbatch=pb.MicrobatchId(**gradient.microbatch._asdict()),
        loss_sum=gradient.loss_sum,
        tokens=gradient.tokens,
        served=gradient.served,
        spec=to_spec(gradient.grad.spec),
        finite=gradient.finite,
    )
    stream = wire.frames([gradient.grad], [digest(gradient.grad.data)])
    return streamed(pb.Reply(gradient=head), stream, message_bytes, head_alone=False)


def to_progress(reports: Iterable[Progress | None]) -> pb.ProgressReply:
    """The answer to a request for progress; None stands for an unknown microbatch."""
    known = (pb.Progress(known=True, events=one.events, stuck_s=one.stuck_s) if one else None for one in reports)
    return pb.ProgressReply(progress=[one or pb.Progress() for one in known])


def from_progress(reply: pb.ProgressReply, count: int) -> list[Progress | None]:
    """How far a peer is with `count` microbatches. Raises the error of a refusal, or Violation for nonsense."""
    check_served(reply)
    if len(reply.progress) != count or not all(isfinite(one.stuck_s) and one.stuck_s >= 0 for one in reply.progress):
        raise Violation(f"{len(reply.progress)} progress reports instead of {count}, or a time that makes no sense")
    return [Progress(one.events, one.stuck_s) if one.known else None for one in reply.progress]


def check_loss(loss_sum: float, tokens: int, spec: TensorSpec) -> None:
    """Raises Violation for a loss that is too large, or over more tokens than the targets `spec` have."""
    if not (tokens <= prod(spec.shape) and abs(loss_sum) <= LARGEST_LOSS * max(1, tokens)):
        raise Violation(f"a loss of {loss_sum:g} nats over {tokens} of {prod(spec.shape)} tokens makes no sense")


def to_loss(loss: LossSum) -> bytes:
    """The single message of a reply with a loss."""
    return pb.Reply(loss=pb.LossSum(loss_sum=loss.loss_sum, tokens=loss.tokens)).SerializeToString()


def to_description(d: NodeDescription) -> pb.Description:
    """What a node says about itself."""
    said = ("stage", "state", "step", "outer_round", "version", "fresh_round")
    return pb.Description(**{name: getattr(d, name) for name in said})


def from_description(reply: pb.DescribeReply) -> NodeDescription:
    """A peer's description of itself. Raises the error of a refusal, or Violation if there is no valid description."""
    check_served(reply)
    if not reply.HasField("description"):
        raise Violation("the peer's description of itself is missing")
    d = reply.description
    if not (isfinite(d.step) and d.fresh_round <= d.outer_round < LARGEST_COUNT):
        raise Violation("the peer's clock makes no sense")
    peer_id, run_id = plain(reply.peer_id, PEER_ID_CHARACTERS), plain(reply.run_id, PEER_ID_CHARACTERS)
    state, version = plain(d.state, 32), plain(d.version, 32)
    return NodeDescription(peer_id, run_id, d.stage, state, d.step, d.outer_round, version, d.fresh_round)


def from_loss(raw: bytes, targets: TensorSpec) -> LossSum:
    """The loss in the reply to an evaluation. Raises the error of a refusal, or Violation for any other reply."""
    reply, _ = unpacked(raw, pb.Reply)
    check_served(reply)
    if not reply.HasField("loss"):
        raise Violation("the reply to an evaluation is not a loss")
    check_loss(reply.loss.loss_sum, reply.loss.tokens, targets)
    return LossSum(reply.loss.loss_sum, reply.loss.tokens)
