"""The answering half of the gRPC transport: turns peers' calls into calls of the node's handler.

gRPC cancels a call when its caller disconnects or its deadline passes, which frees everything the call holds. A large
body arrives only when the handler asks for it, so a waiting call costs little memory. `callers` limits what callers may
hold and how long this node waits for them.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import grpc.aio

from noloco_p2p.core import wire
from noloco_p2p.core.line_cap import Precedence
from noloco_p2p.core.messages import Header, MicrobatchId, PeerId, Progress
from noloco_p2p.core.timeouts import TRANSFER_DEADLINE_S
from noloco_p2p.errors import Declined, NolocoError, Unreachable, Violation
from noloco_p2p.io.transport import callers, message_codec, slow_transfers, weights_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.callers import Caller, Callers
from noloco_p2p.io.transport.capped_line import FIRST_MESSAGE, OwnersLine, Write, rank_of
from noloco_p2p.io.transport.channels import Turns
from noloco_p2p.io.transport.exchange import to_grant
from noloco_p2p.io.transport.frame_codec import unpacked
from noloco_p2p.io.transport.incoming import CANCEL_GRACE_S, IncomingActivation
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.io.transport.reply_reader import ReplyMessage
from noloco_p2p.io.transport.slow_transfers import Patience, Silent, Unread, least_rate
from noloco_p2p.io.transport.stripes import NO_MORE, Duplex, StripedCalls, no_body
from noloco_p2p.ports import Body, Handler, Telemetry

ReplyParts = tuple[Callable[[int], Iterable[bytes]], str, int]
"""A reply: its messages, given the most tensor bytes of each; the kind under which it is counted; its size, bytes."""
Serve = Callable[[Handler, PeerId, Header, Body], Awaitable[ReplyParts]]
"""Has the handler serve an activation, and returns the reply."""


@dataclass(eq=False, slots=True)
class _Reply:
    """A reply to an activation that is being sent to its caller."""

    caller: PeerId
    microbatch: MicrobatchId
    sent: int = 0
    """Bytes sent so far."""


class GrpcServicer:
    """Implements the service of proto/noloco.proto with a handler; declines calls until there is one.

    This package's errors become refusals. Any other is a bug, which gRPC logs and reports to the caller as a status.
    """

    def __init__(self, links: Links, telemetry: Telemetry, line: OwnersLine, bounds: tuple[int, float]) -> None:
        """`bounds` of an activation: the most bytes of its tensors, and the longest time without progress, seconds."""
        self.links = links
        self._count = partial(telemetry.event, "bytes")
        self._max_body_bytes, self._longest_s = bounds
        self._line = line
        self.callers = Callers()
        self._replies: dict[_Reply, None] = {}
        """Replies that are being sent or wait for their turn."""
        self._turns = Turns(line.measured)
        self._striped = StripedCalls()
        self.handler: Handler | None = None

    async def serve_activation(self, serve: Serve, claimed: Caller, context: Any, held: ExitStack) -> None:
        """Answer Propagate or Evaluate: check the header, and let `serve` decide on it before the body is read.

        This writes to the call instead of yielding messages, so that a cancelled call gives its turn back at once.
        """
        try:
            caller, incoming, parts = await self._served(serve, claimed, context, held)
        except Unread:
            raise
        except Silent as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        except NolocoError as error:
            error.with_traceback(None)  # The traceback's frames hold what the caller has sent.
            held.close()
            await self.callers.delay(claimed, error)
            await callers.refuse(self._line.sender(Patience().writing(context.write)), pb.Reply, error)
            await self.callers.drain(claimed, context)
            return
        reply = _Reply(caller.name, incoming.header.microbatch)
        self._replies[reply] = None
        held.callback(self._replies.pop, reply, None)
        takes_turns = parts[1] == "gradient" and not incoming.whole
        patience = self.callers.taking(caller)
        try:
            async with self._turns.of(caller.name) if takes_turns else nullcontext():
                await self._send(patience.writing(context.write), context, incoming, reply, parts)
        except Unread:
            del self._replies[reply]  # A caller that asks for progress then learns that the reply is lost.
            raise
        except grpc.aio.BaseError as error:
            # gRPC could not write, so a connection to the caller is broken.
            error.with_traceback(None)  # The traceback's frames hold the reply.
            if incoming.stripes is not None:
                raise Unreachable("a connection that carried the reply was lost") from None
            return
        self._line.measured.down.carries("activation", sum(spec.nbytes for spec in incoming.header.specs))
        if not incoming.complete:
            await self.callers.drain(claimed, context)

    async def _served(
        self, serve: Serve, claimed: Caller, context: Any, held: ExitStack
    ) -> tuple[Caller, IncomingActivation, ReplyParts]:
        caller, handler = self._admit(claimed, context)
        header, incoming = await self._incoming(context, caller, held)
        return caller, incoming, await serve(handler, caller.name, header, incoming)

    async def _send(
        self, write: Write, context: Any, incoming: IncomingActivation, reply: _Reply, parts: ReplyParts
    ) -> None:
        write = self._line.sender(write, rank_of(incoming.header, Precedence.GRADIENT))
        most = wire.PACK_BYTES if incoming.whole else self._line.agreed(callers.wanted_bytes(context))
        stripes = incoming.stripes
        if stripes is not None:
            await stripes.reply(self._counted(parts, stripes.message_bytes(parts[2], most), reply), write)
            return
        for message in self._counted(parts, most, reply):
            await write(message)

    def _counted(self, parts: ReplyParts, most: int, reply: _Reply | None = None) -> Iterator[bytes]:
        """Yields the messages. Their bytes are counted when the last one is drawn and not after it has been sent,
        because a caller may end its call as soon as it has them all."""
        messages_of, kind, size = parts
        left = size
        for message in messages_of(most):
            if 0 < left <= len(message):
                self._count(direction="out", kind=kind, bytes=size)
                self._line.measured.up.carries(kind, size)
            left -= len(message)
            yield message
            if reply is not None:
                reply.sent += len(message)

    async def stripe(self, claimed: Caller, context: Any, held: ExitStack) -> None:
        """Answer Stripe: carry part of what another call has announced or requested."""
        try:
            caller, _ = self._admit(claimed, context, observers=True)
            first = await self._first_message(context)
            found = None if first is grpc.aio.EOF else await self._striped.of(caller.name, first)
            if found is not None and await found[0].carry(*found[1](context)):
                return
        except Unread:
            raise
        except Silent:
            return
        except NolocoError:
            pass
        if await self.callers.drain(claimed, context, NO_MORE.__ne__):
            raise Unreachable("this node does not expect this part of a body")

    async def fetch_snapshot(self, claimed: Caller, context: Any, held: ExitStack) -> None:
        """Answer FetchSnapshot: send a snapshot."""
        async with self._refusing(pb.SnapshotMessage, Patience(), context):
            request = pb.SnapshotRequest.FromString(await slow_transfers.read_request(context))
            self._line.charge(sent=0, received=request.ByteSize())
            caller, handler = self._admit(claimed, context, observers=True)
            held.enter_context(self.callers.holding(callers.TRANSFERS, caller))
            wanted = weights_codec.from_request(request)
            snapshot = await handler.fetch_snapshot(caller.name, wanted)
            parts = partial(weights_codec.to_snapshot, snapshot), wanted.kind, snapshot.nbytes
            await self._send_weights(context, caller, request.stripe, parts, Patience().writing)

    async def fetch_state(self, claimed: Caller, context: Any, held: ExitStack) -> None:
        """Answer FetchState: send this replica's state, or the rest of it."""
        patience = Patience(slow_transfers.STATE_RESERVE_S)
        async with self._refusing(pb.StateMessage, patience, context):
            request = pb.StateRequest.FromString(await slow_transfers.read_request(context))
            resume = request.resume
            caller, handler = self._admit(claimed, context)
            held.enter_context(self.callers.holding(callers.TRANSFERS, caller))
            async with handler.lend_state(caller.name, resume.number if request.HasField("resume") else None) as state:
                size = sum(one.data.nbytes for one in state.tensors[resume.tensor :]) - resume.offset
                parts = partial(weights_codec.to_state, state, resume.tensor, resume.offset), "state", size
                writing = partial(patience.writing, least_bytes_per_s=least_rate(size, TRANSFER_DEADLINE_S))
                await self._send_weights(context, caller, request.stripe, parts, writing)

    @asynccontextmanager
    async def _refusing(self, kind: type[ReplyMessage], patience: Patience, context: Any) -> AsyncIterator[None]:
        """Within the context weights are sent; its errors are reported to the caller."""
        try:
            yield
        except (Unread, Unreachable):
            raise
        except NolocoError as error:
            await callers.refuse(self._line.sender(patience.writing(context.write)), kind, error)
        except grpc.aio.InternalError:
            pass  # gRPC could not write: the connection to the caller is broken, so a refusal would not arrive either.

    async def _send_weights(
        self, context: Any, caller: Caller, number: int, parts: ReplyParts, writing: Callable[[Write], Write]
    ) -> None:
        """Send weights, also over stripes with this number unless it is 0; `writing` wraps the write of each call."""
        most, patience = self._line.agreed(callers.wanted_bytes(context)), Patience()

        def duplex(context: Any) -> Duplex:
            return self._line.sender(writing(context.write)), patience.reading(context.read)

        with self._striped.may_carry(caller.name, number, duplex) as stripes:
            stripes.expect(no_body)
            most = stripes.message_bytes(parts[2], most) if number else most
            await stripes.reply(self._counted(parts, most), duplex(context)[0])

    async def progress(self, claimed: Caller, request: pb.ProgressRequest, context: Any) -> pb.ProgressReply:
        """Report how far this node is with the caller's microbatches, including those whose reply is being sent."""
        try:
            caller, handler = self._admit(claimed, context)
            if len(request.microbatches) > callers.MAX_CALLS:
                raise Violation(f"{len(request.microbatches)} microbatches are more than a node serves at a time")
            microbatches = [message_codec.from_microbatch(one) for one in request.microbatches]
            sent = {reply.microbatch: reply.sent for reply in self._replies if reply.caller == caller.name}
            reports = [
                Progress(wire.REPLYING + sent[microbatch], 0.0) if microbatch in sent else report
                for microbatch, report in zip(microbatches, handler.progress(caller.name, microbatches), strict=True)
            ]
        except NolocoError as error:
            return pb.ProgressReply(refusal=message_codec.to_refusal(error))
        reply = message_codec.to_progress(reports)
        self._line.charge(sent=reply.ByteSize(), received=request.ByteSize())
        return reply

    async def describe(self, claimed: Caller, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        """Describe this node."""
        reply = pb.DescribeReply(peer_id=self.links.me, run_id=self.links.run_id)
        try:
            caller, handler = self._admit(claimed, context, observers=True)
            d = handler.describe(caller.name)
        except NolocoError as error:
            reply.refusal.CopyFrom(message_codec.to_refusal(error))
        else:
            reply.description.CopyFrom(message_codec.to_description(d))
        self._count(direction="out", kind="control", bytes=reply.ByteSize())
        return reply

    async def warm(self, claimed: Caller, filler: pb.Filler, context: Any) -> pb.Filler:
        """Accept filler, which did its work by being sent, and ignore its content."""
        self._line.charge(sent=0, received=filler.ByteSize())
        return pb.Filler()

    def _admit(self, claimed: Caller, context: Any, *, observers: bool = False) -> tuple[Caller, Handler]:
        """The caller, with the name that its certificate proves, and the handler. Raises Violation for a stranger, and
        Declined if there is no handler yet."""
        callers.check_admissible(context)
        caller = claimed._replace(name=self.links.caller(context, observers=observers))
        if self.handler is None:
            raise Declined("the node is starting")
        return caller, self.handler

    async def _first_message(self, context: Any) -> Any:
        return await self._line.receiver(Patience().reading(context.read), FIRST_MESSAGE)()

    async def _incoming(self, context: Any, caller: Caller, leaving: ExitStack) -> tuple[Header, IncomingActivation]:
        patience = leaving.enter_context(self.callers.sending(caller))
        first = await self._first_message(context)
        if first is grpc.aio.EOF:
            await asyncio.sleep(CANCEL_GRACE_S)
            raise Violation("the call carries no header")
        head, frames = unpacked(first, pb.ActivationMessage)
        header = message_codec.from_header(head, self.links.run_id, self._max_body_bytes)
        self.links.check_label(header, caller.name)
        header = replace(header, time_left_s=min(header.time_left_s, self._longest_s))
        rate = least_rate(sum(spec.nbytes for spec in header.specs), header.time_left_s)
        # Bodies that take turns would be late together, and gRPC opens their windows at the same time: in bursts.
        rank = rank_of(header, Precedence.ACTIVATION, asyncio.get_running_loop().time())

        def duplex(context: Any) -> Duplex:
            write, read = Patience().writing(context.write), patience.reading(context.read, rate)
            return self._line.sender(write, rank_of(header, Precedence.GRADIENT)), self._line.receiver(read, rank)

        ask = partial(Patience().writing(context.write), to_grant(self._line.wanted_bytes))
        ahead = partial(self._line.in_transit, rank)
        incoming = IncomingActivation(header, frames, self._count, duplex(context)[1], ask, patience, ahead)
        if head.header.stripe and not frames:
            incoming.stripes = leaving.enter_context(self._striped.may_carry(caller.name, head.header.stripe, duplex))
            if nbytes := head.header.filler_bytes:
                incoming.reply_soon = partial(incoming.stripes.fill, self._line.measured, caller.name, nbytes)
        return header, incoming
