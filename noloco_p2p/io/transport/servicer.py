"""The answering half of the gRPC transport: calls of peers become calls of the node's handler.

A call is cancelled by gRPC when its caller is gone or its deadline has passed; what it holds is freed with it. A large
body comes only when the handler asks for it, so a waiting call costs little memory.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core import wire
from noloco_p2p.core.line_cap import Precedence
from noloco_p2p.core.line_rate import stripe_bytes
from noloco_p2p.core.messages import Header, MicrobatchId, PeerId, Progress
from noloco_p2p.errors import Declined, NolocoError, Violation
from noloco_p2p.io.transport import message_codec, weights_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import AT_THE_DOOR, OwnersLine, Write, rank_of
from noloco_p2p.io.transport.channels import KEEPALIVE, KEEPALIVE_MS, Turns
from noloco_p2p.io.transport.exchange import to_grant
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.incoming import CANCEL_GRACE_S, IncomingActivation
from noloco_p2p.io.transport.stripes import NO_MORE, Stripes, from_stripe
from noloco_p2p.ports import Body, Handler, Telemetry

PROTOCOL = "4"
"""Version of proto/noloco.proto that this node speaks."""
MAX_CALL_S = 3600.0
"""Longest deadline that a caller may set; a call without one could hold memory for ever."""
MAX_CALLS = 2048
"""Calls served at once; a further one is refused as Busy."""
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.so_reuseport", 0),
    *KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    # Calls may be silent for minutes: no connection ends for too many pings.
    ("grpc.http2.max_ping_strikes", 0),
)

Messages = Callable[[int], Iterable[bytes]]
ReplyParts = tuple[Messages, str, int]
"""The messages of a reply, of at most so many tensor bytes each, their kind in the count of bytes, and the bytes."""
Serve = Callable[[Handler, PeerId, Header, Body], Awaitable[ReplyParts]]
"""Serves an activation."""


def metadata(me: PeerId, run_id: str, wanted_bytes: int = 0) -> tuple[tuple[str, str], ...]:
    """What every call of a node carries, which would like to have messages of so many tensor bytes; 0: of any size."""
    wanted = (("noloco-message-bytes", str(wanted_bytes)),) if wanted_bytes else ()
    return ("noloco-peer", me), ("noloco-run", run_id), ("noloco-protocol", PROTOCOL), *wanted


@dataclass(eq=False, slots=True)
class _Reply:
    """A reply to an activation on its way to its caller."""

    caller: PeerId
    microbatch: MicrobatchId
    sent: int = 0
    """Bytes."""


async def _drain(context: Any) -> None:
    """Takes in what the caller sends until it has seen that it has its reply.

    If the call ended before, gRPC would fail the caller's pending write, and with it drop a reply not yet read.
    """
    while await context.read() is not grpc.aio.EOF:
        pass


async def _refuse(write: Write, refusal: bytes) -> None:
    """Tell the caller, if it is still there."""
    with suppress(grpc.aio.InternalError):
        await write(refusal)


class GrpcServicer:
    """Implements the service of proto/noloco.proto by a handler; before there is one, calls are declined.

    Errors of this package become refusals; any other is a bug, which gRPC logs and reports by a status.
    """

    def __init__(self, me: PeerId, run_id: str, telemetry: Telemetry, max_body_bytes: int, line: OwnersLine) -> None:
        self._me = me
        self._run_id = run_id
        self._count = partial(telemetry.event, "bytes")
        self._max_body_bytes = max_body_bytes
        self._line = line
        self._replies: dict[_Reply, None] = {}
        """Those that are being sent, or wait for their turn."""
        self._turns = Turns()
        self._grant = to_grant(line.wanted_bytes)
        self._striped: dict[tuple[PeerId, int], tuple[Stripes, Header]] = {}
        """The activations that may come over several calls, by their callers and the numbers that these gave them."""
        self.handler: Handler | None = None

    async def serve_activation(self, serve: Serve, request_iterator: Any, context: Any) -> None:
        """Propagate and Evaluate: the header is checked, and `serve` decides on it before the body is read.

        Writes instead of yielding: so a call that is cancelled gives its turn back at once.
        """
        with ExitStack() as leaving:
            try:
                caller, handler = self._admit(context)
                header, incoming = await self._incoming(context, caller, leaving)
                messages_of, kind, size = await serve(handler, caller, header, incoming)
            except NolocoError as error:
                await _refuse(self._line.sender(context.write), message_codec.to_refused(error))
                await _drain(context)
                return
            reply = _Reply(caller, header.microbatch)
            self._replies[reply] = None
            leaving.callback(self._replies.pop, reply)
            try:
                async with self._turns.of(caller, size):
                    await self._send(context, incoming, reply, messages_of, size)
            except grpc.aio.BaseError:
                # gRPC could not write: a link to the caller is broken.
                if incoming.stripes is not None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "a connection was lost that carried the reply")
                return
        self._count(direction="out", kind=kind, bytes=size)
        self._line.measured.up.carries(kind, size)
        self._line.measured.down.carries("activation", sum(spec.nbytes for spec in header.specs))
        if not incoming.complete:
            await _drain(context)

    async def _send(
        self, context: Any, incoming: IncomingActivation, reply: _Reply, messages_of: Messages, size: int
    ) -> None:
        write = self._line.sender(context.write, rank_of(incoming.header, Precedence.GRADIENT))
        most, stripes = wire.PACK_BYTES if incoming.whole else self._message_bytes(context), incoming.stripes

        def counted(messages: Iterable[bytes]) -> Iterator[bytes]:
            for message in messages:
                yield message
                reply.sent += len(message)

        if stripes is not None:
            await stripes.reply(counted(messages_of(min(most, stripe_bytes(size)))), write)
            return
        for message in counted(messages_of(most)):
            await write(message)

    async def stripe(self, request_iterator: Any, context: Any) -> None:
        """Carry part of an activation that another call has announced, and of its reply."""
        try:
            caller, _ = self._admit(context)
            first = await self._line.receiver(context.read, AT_THE_DOOR)()
            found = None if first is grpc.aio.EOF else self._striped.get((caller, from_stripe(first)))
        except NolocoError:
            found = None
        if found is not None:
            stripes, header = found
            write = self._line.sender(context.write, rank_of(header, Precedence.GRADIENT))
            if await stripes.carry(write, self._line.receiver(context.read, rank_of(header, Precedence.ACTIVATION))):
                return
        while (message := await context.read()) is not grpc.aio.EOF:
            if message != NO_MORE:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody here expects this part of a body")

    async def fetch_snapshot(self, request: pb.SnapshotRequest, context: Any) -> None:
        """Send a snapshot."""
        self._line.charge(sent=0, received=request.ByteSize())
        write = self._line.sender(context.write)
        try:
            caller, handler = self._admit(context)
            wanted = weights_codec.from_request(request)
            snapshot = await handler.fetch_snapshot(caller, wanted)
        except NolocoError as error:
            await _refuse(write, pb.SnapshotMessage(refusal=message_codec.to_refusal(error)).SerializeToString())
            return
        try:
            for message in weights_codec.to_snapshot(snapshot, self._message_bytes(context)):
                await write(message)
        except grpc.aio.InternalError:
            # gRPC could not write: the link to the caller is broken.
            return
        self._count(direction="out", kind=wanted.kind, bytes=snapshot.nbytes)

    async def fetch_state(self, request: pb.StateRequest, context: Any) -> None:
        """Send this replica's state, or the rest of it.

        Writes instead of yielding: so a call that is cancelled gives the copy back at once.
        """
        resume = request.resume if request.HasField("resume") else None
        tensor, offset = (resume.tensor, resume.offset) if resume else (0, 0)
        write = self._line.sender(context.write)
        try:
            caller, handler = self._admit(context)
            async with handler.lend_state(caller, resume.number if resume else None) as state:
                for message in weights_codec.to_state(state, tensor, offset, self._message_bytes(context)):
                    await write(message)
                size = sum(one.data.nbytes for one in state.tensors[tensor:]) - offset
        except NolocoError as error:
            await _refuse(write, pb.StateMessage(refusal=message_codec.to_refusal(error)).SerializeToString())
            return
        except grpc.aio.InternalError:
            # gRPC could not write: the link to the caller is broken, and so is the way of a refusal.
            return
        self._count(direction="out", kind="state", bytes=size)

    async def progress(self, request: pb.ProgressRequest, context: Any) -> pb.ProgressReply:
        """Say how far this node is with microbatches of the caller; one whose reply is being sent is in hand, too."""
        try:
            caller, handler = self._admit(context)
            if len(request.microbatches) > MAX_CALLS:
                raise Violation(f"{len(request.microbatches)} microbatches are more than a node serves at once")
            microbatches = [message_codec.from_microbatch(one) for one in request.microbatches]
            sent = {reply.microbatch: reply.sent for reply in self._replies if reply.caller == caller}
            reports = [
                Progress(wire.REPLYING + sent[microbatch], 0.0) if microbatch in sent else report
                for microbatch, report in zip(microbatches, handler.progress(caller, microbatches), strict=True)
            ]
        except NolocoError as error:
            return pb.ProgressReply(refusal=message_codec.to_refusal(error))
        reply = message_codec.to_progress(reports)
        self._line.charge(sent=reply.ByteSize(), received=request.ByteSize())
        return reply

    async def describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """Describe this node."""
        reply = pb.DescribeReply(peer_id=self._me, run_id=self._run_id)
        try:
            caller, handler = self._admit(context)
            d = handler.describe(caller)
        except NolocoError as error:
            reply.refusal.CopyFrom(message_codec.to_refusal(error))
        else:
            reply.description.CopyFrom(
                pb.Description(stage=d.stage, state=d.state, step=d.step, outer_round=d.outer_round, version=d.version)
            )
        self._count(direction="out", kind="control", bytes=reply.ByteSize())
        return reply

    def _admit(self, context: Any) -> tuple[PeerId, Handler]:
        """The caller, and the handler. Raises Violation: a stranger to this run; Declined: there is no handler yet."""
        sent = dict(context.invocation_metadata())
        protocol, run_id = sent.get("noloco-protocol"), sent.get("noloco-run")
        if protocol != PROTOCOL:
            raise Violation(
                f"the caller speaks protocol {protocol!r}, this node speaks {PROTOCOL!r}: use equal versions"
            )
        if run_id != self._run_id:
            raise Violation(f"the caller works on run {run_id!r}, this node on run {self._run_id!r}")
        seconds = context.time_remaining()
        if seconds is None or seconds > MAX_CALL_S:
            raise Violation(f"a call needs a deadline of at most {MAX_CALL_S:g} s")
        if self.handler is None:
            raise Declined("the node is starting")
        return str(sent.get("noloco-peer", "")), self.handler

    def _message_bytes(self, context: Any) -> int:
        """Most tensor bytes in one message to this caller."""
        wanted = dict(context.invocation_metadata()).get("noloco-message-bytes", "")
        return self._line.agreed(int(wanted) if re.fullmatch("[0-9]{1,9}", wanted) else 0)

    async def _incoming(self, context: Any, caller: PeerId, leaving: ExitStack) -> tuple[Header, IncomingActivation]:
        first = await self._line.receiver(context.read, AT_THE_DOOR)()
        if first is grpc.aio.EOF:
            await asyncio.sleep(CANCEL_GRACE_S)
            raise Violation("the call carries no header")
        head, frames = unpacked(first, pb.ActivationMessage)
        header = message_codec.from_header(head, self._run_id, self._max_body_bytes)
        read = self._line.receiver(context.read, rank_of(header, Precedence.ACTIVATION))
        incoming = IncomingActivation(context, header, frames, self._count, read, self._grant)
        key = caller, head.header.stripe
        if head.header.stripe and not frames:
            if key in self._striped:
                raise Violation("the numbers of two activations are equal")
            incoming.stripes = stripes = Stripes()
            self._striped[key] = stripes, header
            leaving.callback(self._striped.pop, key)
            leaving.callback(stripes.end)
        return header, incoming
