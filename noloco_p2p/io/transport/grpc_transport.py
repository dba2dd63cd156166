"""The Transport port over gRPC: a node's calls to its peers, and the server that answers theirs (`servicer`).

An activation goes out as one call, and the reply is its gradient. A small activation is sent whole. For a large one the
header goes first, and the tensors follow once the peer has granted them a place.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from dataclasses import replace
from functools import partial
from secrets import randbits
from typing import Any, TypeVar

from noloco_p2p.config import LimitSettings, ListenSettings
from noloco_p2p.core.line_cap import Precedence
from noloco_p2p.core.line_rate import PART_BYTES, Sending, stripe_bytes
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    LossSum,
    MicrobatchId,
    NodeDescription,
    Progress,
    ReplicaState,
    TensorSpec,
)
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.timeouts import CAPTURE_S, DESCRIBE_S, LONGEST_CALL_S, SILENCE_S
from noloco_p2p.errors import Unreachable, Violation
from noloco_p2p.io.transport import callers, message_codec, service, servicer, slow_transfers, stripes, weights_codec
from noloco_p2p.io.transport import noloco_pb2 as pb
from noloco_p2p.io.transport.capped_line import OwnersLine, Read, rank_of
from noloco_p2p.io.transport.channels import ChannelPool, PeerChannel, Turns
from noloco_p2p.io.transport.exchange import Fetched, SentActivation
from noloco_p2p.io.transport.filler import Warming
from noloco_p2p.io.transport.grpc_errors import translated_errors
from noloco_p2p.io.transport.peer_links import Links
from noloco_p2p.io.transport.reply_reader import GradientReader
from noloco_p2p.io.transport.stripes import Duplex, StripeCall
from noloco_p2p.ports import ALONE, Claim, Handler, Telemetry

RESUMES, RESUME_PAUSE_S = 3, 0.5
"""Consecutive calls without progress after which an interrupted transfer of a state is abandoned, and the pause before
each, seconds, which gives a flapping link time to come back."""

T = TypeVar("T")
Weights = TypeVar("Weights", Snapshot, ReplicaState)


class GrpcTransport:
    """Calls to and from peers, for one node of one run. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        links: Links,
        listen: ListenSettings,
        telemetry: Telemetry,
        max_body_bytes: int,
        limits: LimitSettings | None = None,
    ) -> None:
        """`max_body_bytes` bounds the tensors of an activation that a peer sends; `limits` has the owner's caps."""
        self.port = 0
        """TCP port of the server once it listens, 0 before."""
        self._listen = listen
        self._count = partial(telemetry.event, "bytes")
        limits = limits or LimitSettings()
        self._line = OwnersLine(limits, links.own)
        self._links = links
        self._metadata: Callable[[], Any] = lambda: callers.metadata(self._line.wanted_bytes)
        self.line = self._line.measured
        """See `ports.Transport`."""
        bounds = max_body_bytes, limits.microbatch_deadline_s
        self._servicer = servicer.GrpcServicer(links, telemetry, self._line, bounds)
        self.unread = self._servicer.callers.unread
        """See `Callers`."""
        self._channels = ChannelPool(links, self._line.grpc_options, self._line.unsent.set)
        self._turns = Turns(self.line)
        self._warming = Warming(self._line, self._calling, self.describe)
        self.warm = self._warming.warm
        """See `ports.Transport`."""
        self._server: Any = None

    async def listen(self) -> None:
        """Start the server; it declines calls until `serve` sets a handler. Raises LocalError if the port is in use."""
        if self._server is not None:
            return
        self._server, self.port = service.bound(self._servicer, self._links, self._listen, self._line.grpc_options)
        await self._server.start()
        self._line.unsent.set()

    async def serve(self, handler: Handler) -> None:
        """Start answering calls with `handler`. Raises LocalError if the port is in use."""
        self._servicer.handler = handler
        await self.listen()

    async def close(self) -> None:
        """Refuse new calls, cancel those in flight in both directions, and free everything."""
        await self._warming.close()
        await self._channels.close()
        if self._server is not None:
            await self._server.stop(grace=None)

    def sending(self, activation: Activation, peer: Advert) -> Sending:
        """See `ports.Transport`."""
        fits = message_codec.fits_one_message(activation, self._line.whole_bytes)
        size, now = sum(one.data.nbytes for one in activation.tensors), asyncio.get_running_loop().time()
        return self.line.sending(peer.peer_id, size, now, fits=fits)

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        """Send an activation and wait for its gradient. Raises Busy, Declined, Violation, Unreachable."""
        with closing(GradientReader(activation)) as reader:
            gradient = await self._exchange(peer, "Propagate", "gradient", activation, claim, reader.feed)
        self._count(direction="in", kind="gradient", bytes=gradient.grad.data.nbytes)
        self.line.down.carries("gradient", gradient.grad.data.nbytes)
        return gradient

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> LossSum:
        """Send a held-out activation and wait for its loss. Raises the same errors as `propagate`."""
        feed = partial(message_codec.from_loss, targets=activation.targets.spec)
        return await self._exchange(peer, "Evaluate", "loss", activation, claim, feed)

    async def progress(
        self, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        """Ask how far the peer is with each microbatch. Raises the same errors as `propagate`."""
        request = pb.ProgressRequest(microbatches=[pb.MicrobatchId(**one._asdict()) for one in microbatches])
        async with self._calling(peer, "report of progress", timeout_s, control=True) as (channel, seconds):
            sent, began = request.SerializeToString(), asyncio.get_running_loop().time()
            raw = await channel.send_whole("Progress", sent, timeout=seconds, metadata=self._metadata())
            self.line.answered(peer.peer_id, asyncio.get_running_loop().time() - began)
            reply = pb.ProgressReply.FromString(raw)
        self._line.charge(sent=len(sent), received=len(raw))
        return message_codec.from_progress(reply, len(microbatches))

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: tuple[TensorSpec, ...]
    ) -> Snapshot:
        """Fetch a snapshot from its replica or a guardian. Raises Violation unless it is as `expected`, Unreachable
        when nothing has come for SILENCE_S (before the first message, `wait_s` longer), and otherwise as
        `propagate`."""
        reader, wait_s = weights_codec.SnapshotReader(request, expected), request.wait_s
        limits_s = wait_s + deadline_s, wait_s + SILENCE_S, deadline_s
        due = slow_transfers.steady_reading(expected, deadline_s) if request.weights else lambda read: read
        with closing(reader):
            snapshot, took_s = await self._fetch(peer, reader, expected, limits_s, due)
        return replace(snapshot, took_s=took_s)

    async def fetch_state(self, peer: Advert, deadline_s: float, expected: tuple[TensorSpec, ...]) -> ReplicaState:
        """Fetch a replica's whole state. Raises Violation unless it is as `expected`, and otherwise as `propagate`.

        A transfer that is interrupted after its header resumes where it stopped, from the same copy, after a pause and
        over a new connection, until RESUMES consecutive calls have brought nothing, the pauses have used up the time
        that the bytes earn, or the deadline leaves none."""
        clock = asyncio.get_running_loop().time
        give_up_at, futile = clock() + deadline_s, 0
        reader = weights_codec.StateReader(peer, expected)
        due = slow_transfers.steady_reading(expected, deadline_s)
        with closing(reader):
            while True:
                place = reader.place
                try:
                    limits_s = give_up_at - clock(), CAPTURE_S if place is None else SILENCE_S, None
                    return (await self._fetch(peer, reader, expected, limits_s, due))[0]
                except Unreachable as error:
                    futile = 0 if reader.place != place else futile + 1
                    late = isinstance(error, slow_transfers.Silent) or clock() + RESUME_PAUSE_S >= give_up_at
                    if late or reader.place is None or futile == RESUMES:
                        raise
                    await due(partial(asyncio.sleep, RESUME_PAUSE_S))()

    async def _fetch(
        self,
        peer: Advert,
        reader: weights_codec.WeightsReader[Any, Weights],
        expected: tuple[TensorSpec, ...],
        limits_s: tuple[float, float, float | None],
        due: Callable[[Read], Read],
    ) -> tuple[Weights, float]:
        """Fetch weights over one call and its stripes: the result of `reader`, and the seconds from the first message
        on. Raises Unreachable beyond `limits_s` (whole call, first message, time after it), or after SILENCE_S between
        two messages. `due` wraps the function that reads all messages but the first, and may raise, too."""
        what, size, (seconds, first_s, rest_s) = reader.what, sum(spec.nbytes for spec in expected), limits_s
        if size >= PART_BYTES and self.line.round_trip_s(peer.peer_id) is None:
            began = asyncio.get_running_loop().time()
            await self.describe(peer, min(DESCRIBE_S, seconds))
            seconds -= asyncio.get_running_loop().time() - began
        async with self._calling(peer, what, seconds) as (channel, left_s):
            others = channel.at_most(self.line.connections(peer.peer_id, size, comes=True)) - 1
            fetched = Fetched(reader.feed, f"{what} came from {peer.peer_id}")
            reading = partial(self._line.receiver, first_at_once=True, held=fetched.held)
            stripe = (what, left_s, lambda call: (self._line.sender(call.write), reading(due(call.read))))
            number, further = self._further_calls(peer, others, stripe)
            request = reader.request(number)
            self._line.charge(sent=request.ByteSize(), received=0)
            call = channel.fetch(reader.method, request, timeout=left_s, metadata=self._metadata())
            reads = reading(call.read), reading(due(call.read), first_at_once=False)
            result, took_s = await fetched.within(call, further, reads, (first_s, SILENCE_S, rest_s))
        self._count(direction="in", kind=what, bytes=sum(tensor.data.nbytes for tensor in result.tensors))
        return result, took_s

    async def describe(self, peer: Advert, seconds: float = DESCRIBE_S) -> NodeDescription:
        """See `ports.Transport`; takes at most 5 s, or `seconds`."""
        async with self._calling(peer, "description", seconds, control=True) as (channel, left_s):
            began = asyncio.get_running_loop().time()
            raw = await channel.send_whole("Describe", b"", timeout=left_s, metadata=self._metadata())
            self.line.answered(peer.peer_id, asyncio.get_running_loop().time() - began)
            self._count(direction="in", kind="control", bytes=len(raw))
            said = message_codec.from_description(pb.DescribeReply.FromString(raw))
        if (said.peer_id, said.run_id) != (peer.peer_id, self._links.run_id):
            raise Violation(f"another node or run answers for {peer.peer_id}")
        return said

    async def _exchange(
        self,
        peer: Advert,
        method: str,
        what: str,
        activation: Activation,
        claim: Claim,
        feed: Callable[[bytes], T | None],
    ) -> T:
        """Send an activation; `feed` receives the messages of the reply until it returns the complete reply."""
        activation = replace(activation, header=self._links.labelled(activation.header))
        size, line = sum(tensor.data.nbytes for tensor in activation.tensors), self._line
        at_once = not claim.asked and message_codec.fits_one_message(activation, line.whole_bytes)
        most = self.line.connections(peer.peer_id, size)
        async with self._calling(peer, what, LONGEST_CALL_S, control=most > 1) as (channel, seconds):
            options = {"timeout": seconds, "metadata": self._metadata()}
            line.measured.up.carries("activation", size)
            leaves = partial(self._count, direction="out", kind="activation", bytes=size)
            if most > 1 or not at_once:
                out, back = (rank_of(activation.header, one) for one in (Precedence.ACTIVATION, Precedence.GRADIENT))

                def duplex_of(call: Any) -> Duplex:
                    return line.sender(call.write, out), line.receiver(call.read, back, first_at_once=True)

                stripe = what, seconds, duplex_of
                number, further = self._further_calls(peer, channel.at_most(most) if most > 1 else 0, stripe)
                turn = (self._turns.at_once if at_once else self._turns.of)(peer.peer_id, leaves)
                call = channel.send_stream(method, **options)
                longest = stripe_bytes(size, len(further)) if number else size
                filler_bytes = self.line.filler_bytes(peer.peer_id, size, comes=True) if number else 0
                head, body = message_codec.announced(activation, number, filler_bytes)

                sent = head, lambda n: (self.line.granted(peer.peer_id, size, n), body(min(longest, line.agreed(n))))
                return await SentActivation(sent, turn, claim, feed, further, at_once).exchange(call, duplex_of(call))
            leaves()
            [message] = message_codec.to_activation(activation, head_alone=False)
            line.charge(sent=len(message), received=0)
            line.charge(sent=0, received=len(reply := await channel.send_whole(method, message, **options)))
            if (result := feed(reply)) is not None:
                return result
            raise Violation(f"the {what} from {peer.peer_id} is incomplete")

    def _further_calls(
        self, peer: Advert, connections: int, call: StripeCall
    ) -> tuple[int, list[AbstractAsyncContextManager[Duplex]]]:
        """A number for a body, and one stripe for each further connection; the number is 0 if there are none. It is
        random, because the peer may not have noticed yet that calls of an earlier process of this node have ended."""
        number = 1 + randbits(63) if connections else 0
        return number, [self._stripe(peer, number, part, *call) for part in range(1, connections + 1)]

    @asynccontextmanager
    async def _stripe(
        self, peer: Advert, number: int, part: int, what: str, seconds: float, duplex_of: Callable[[Any], Duplex]
    ) -> AsyncIterator[Duplex]:
        """A `Stripe` call on a connection of its own, which carries part of the body with this number."""
        async with self._calling(peer, what, seconds, part=part) as (channel, left_s):
            call = channel.send_stream("Stripe", timeout=left_s, metadata=self._metadata())
            try:
                duplex = duplex_of(call)
                await duplex[0](stripes.to_stripe(number))
                yield duplex
            finally:
                call.cancel()

    @asynccontextmanager
    async def _calling(
        self, peer: Advert, what: str, seconds: float, *, control: bool = False, part: int = 0
    ) -> AsyncIterator[tuple[PeerChannel, float]]:
        """A connection for one call, and the seconds left once it is open; gRPC's errors are translated to ours."""
        if seconds <= 0:
            raise Unreachable(f"no time is left to wait for a {what} from {peer.peer_id}")
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + seconds
        async with self._channels.acquire(peer, seconds, control=control, part=part) as channel:
            with translated_errors(peer.peer_id, what, seconds, give_up_at):
                yield channel, max(0.001, give_up_at - clock())
