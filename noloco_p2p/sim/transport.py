"""The Transport port of one node: calls between the nodes of one process over `network`.

It gives the same guarantees as the real one: the handler decides on the header while the body is still in flight, it is
cancelled when its caller is gone or the deadline has passed, and the contents of a reply are checked.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

from noloco_p2p.core import wire
from noloco_p2p.core.line_rate import PART_BYTES, MeasuredLine, Sending
from noloco_p2p.core.messages import (
    Activation,
    Advert,
    Gradient,
    Header,
    HostTensor,
    LossSum,
    MicrobatchId,
    NodeDescription,
    PeerId,
    Progress,
    ReplicaState,
    TensorSpec,
)
from noloco_p2p.core.snapshots import Snapshot, SnapshotRequest
from noloco_p2p.core.timeouts import CAPTURE_S, DESCRIBE_S, LONGEST_CALL_S, SILENCE_S
from noloco_p2p.errors import Declined, PeerError, Unreachable, Violation
from noloco_p2p.ports import ALONE, Body, Claim, Handler
from noloco_p2p.sim.calls import SimCall
from noloco_p2p.sim.links import resent_after_s
from noloco_p2p.sim.network import Network
from noloco_p2p.sim.payloads import Payload

RESUMES_S = 20.0
"""Longest silence during a state transfer: about as long as the gRPC calls that try to resume it take."""

T = TypeVar("T")
Method = Callable[[PeerId, Header, Body], Coroutine[Any, Any, T]]
"""`propagate` or `evaluate` of a handler."""


class SimTransport:
    """The Transport port of one node."""

    def __init__(self, network: Network, me: PeerId) -> None:
        self.dead = False
        """The node's process has crashed; nothing that its tasks still do has any effect."""
        self._network = network
        self._me = me
        self._warming: dict[PeerId, asyncio.Task[None]] = {}
        self.line = network.traffic.lines[me] = MeasuredLine()
        """See `ports.Transport`."""

    def sending(self, activation: Activation, peer: Advert) -> Sending:
        """See `ports.Transport`."""
        nbytes, now = self._network.payload_bytes("activation", activation.tensors), asyncio.get_running_loop().time()
        return self.line.sending(peer.peer_id, nbytes, now, fits=nbytes <= wire.PACK_BYTES)

    def warm(self, peers: Sequence[Advert], nbytes: int) -> None:
        """See `ports.Transport`."""
        sizes, line = self._network.sizes, self.line
        size = sizes.activation_bytes if sizes else nbytes
        for peer in peers:
            id, filler = peer.peer_id, partial(line.filler_bytes, peer.peer_id, size, peers=len(peers))
            far = size >= PART_BYTES if line.round_trip_s(id) is None else filler()
            if far and id not in self._warming:
                self._warming[id] = task = asyncio.create_task(self._warm(peer, size, filler))
                task.add_done_callback(lambda _, id=id: self._warming.pop(id))  # type: ignore[misc]

    async def _warm(self, peer: Advert, size: int, filler: Callable[[], int]) -> None:
        with suppress(PeerError):
            if self.line.round_trip_s(peer.peer_id) is None:
                await self.describe(peer)
            if each := filler():
                self._network.traffic.fill(self._me, peer.peer_id, self.line.connections(peer.peer_id, size), each)

    async def propagate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> Gradient:
        """See `ports.Transport`."""
        sent = _sent(activation)
        gradient = await self._submit(peer, sent, claim, "propagate", lambda handler: handler.propagate)
        if gradient.microbatch != sent.header.microbatch:
            raise Violation(f"{peer.peer_id} answered for another microbatch")
        if gradient.grad.spec[1:] != sent.reply_spec[1:]:
            raise Violation(f"{peer.peer_id} answered {gradient.grad.spec}, not {sent.reply_spec}")
        return replace(gradient, grad=_copy(gradient.grad))

    async def evaluate(self, peer: Advert, activation: Activation, claim: Claim = ALONE) -> LossSum:
        """See `ports.Transport`."""
        return await self._submit(peer, _sent(activation), claim, "evaluate", lambda handler: handler.evaluate)

    async def fetch_snapshot(
        self, peer: Advert, request: SnapshotRequest, deadline_s: float, expected: tuple[TensorSpec, ...]
    ) -> Snapshot:
        """See `ports.Transport`."""
        kind, wait_s = request.kind, request.wait_s
        connections = await self._connections(peer, kind, request.stage, expected)

        async def invoke(handler: Handler, call: SimCall[Snapshot]) -> Snapshot:
            snapshot = await handler.fetch_snapshot(self._me, request)
            began = asyncio.get_running_loop().time()
            await call.stream(kind, self._network.payload_bytes(kind, snapshot.tensors, request.stage), connections)
            took_s = asyncio.get_running_loop().time() - began
            return replace(snapshot, tensors=tuple(map(_copy, snapshot.tensors)), took_s=took_s)

        limits = {"silence_s": (wait_s + SILENCE_S, SILENCE_S), "rest_s": deadline_s}
        snapshot = await self._call(peer, invoke, wait_s + deadline_s, "fetch_snapshot", **limits)
        wire.check_same(tuple(tensor.spec for tensor in snapshot.tensors), expected, kind)
        return snapshot

    async def fetch_state(self, peer: Advert, deadline_s: float, expected: tuple[TensorSpec, ...]) -> ReplicaState:
        """See `ports.Transport`. Interruptions shorter than RESUMES_S only cause a delay: the donor keeps its copy."""

        connections = await self._connections(peer, "state", peer.stage, expected)

        async def invoke(handler: Handler, call: SimCall[ReplicaState]) -> ReplicaState:
            async with handler.lend_state(self._me, None) as state:
                nbytes = self._network.payload_bytes("state", state.tensors, state.stage)
                await call.stream("state", nbytes, connections)
                return replace(state, tensors=tuple(map(_copy, state.tensors)))

        state = await self._call(peer, invoke, deadline_s, "fetch_state", silence_s=(CAPTURE_S, RESUMES_S))
        if state.stage != peer.stage:
            raise Declined(f"{peer.peer_id} holds stage {state.stage} now, not {peer.stage}")
        wire.check_same(tuple(tensor.spec for tensor in state.tensors), expected, "state")
        return state

    async def progress(
        self, peer: Advert, microbatches: Sequence[MicrobatchId], timeout_s: float
    ) -> list[Progress | None]:
        """See `ports.Transport`."""

        async def invoke(handler: Handler, call: SimCall[list[Progress | None]]) -> list[Progress | None]:
            reports = handler.progress(self._me, microbatches)
            for place, microbatch in enumerate(microbatches):
                replied = self._network.traffic.replied_bytes(peer.peer_id, self._me, microbatch)
                if replied is not None:
                    reports[place] = Progress(wire.REPLYING + replied, 0.0)
            return reports

        each = self._network.control
        nbytes = each.question * len(microbatches), each.report * len(microbatches)
        began = asyncio.get_running_loop().time()
        reports = await self._call(peer, invoke, timeout_s, "progress", nbytes=nbytes, apart=True)
        self.line.answered(peer.peer_id, asyncio.get_running_loop().time() - began)
        return reports

    async def describe(self, peer: Advert) -> NodeDescription:
        """See `ports.Transport`."""

        async def invoke(handler: Handler, call: SimCall[NodeDescription]) -> NodeDescription:
            return handler.describe(self._me)

        began = asyncio.get_running_loop().time()
        said = await self._call(peer, invoke, DESCRIBE_S, "describe", apart=True)
        self.line.answered(peer.peer_id, asyncio.get_running_loop().time() - began)
        return said

    async def serve(self, handler: Handler) -> None:
        """See `ports.Transport`."""
        self._network.serve(self._me, handler)

    async def close(self) -> None:
        """See `ports.Transport`."""
        for task in self._warming.values():
            task.cancel()
        if not self.dead:
            await self._network.stop(self._me)

    async def _connections(self, peer: Advert, kind: str, stage: int, expected: tuple[TensorSpec, ...]) -> int:
        """Number of connections for receiving these tensors. Measures an unknown round trip first, as over gRPC."""
        sizes = self._network.sizes
        nbytes = sizes.of(kind, stage) if sizes else sum(spec.nbytes for spec in expected)
        if nbytes >= PART_BYTES and self.line.round_trip_s(peer.peer_id) is None:
            await self.describe(peer)
        return self.line.connections(peer.peer_id, nbytes, comes=True)

    async def _submit(
        self, peer: Advert, sent: Activation, claim: Claim, what: str, method: Callable[[Handler], Method[T]]
    ) -> T:
        """Make a call with an activation. Small tensors follow the header at once, large ones when granted a place."""
        self._check_alive()
        nbytes = self._network.payload_bytes("activation", sent.tensors)
        connections = self.line.connections(peer.peer_id, nbytes)
        payload = Payload(self._me, peer.peer_id, "activation", nbytes, connections=connections)
        body, began = _SimBody(self._network, sent, payload, claim), asyncio.get_running_loop().time()
        body.filler_bytes = self.line.filler_bytes(peer.peer_id, nbytes, comes=True) if connections > 1 else 0
        if not claim.asked and nbytes <= wire.PACK_BYTES:
            self._network.traffic.depart(payload)

        def invoke(handler: Handler, _: SimCall[T]) -> Coroutine[Any, Any, T]:
            body.latency_s = asyncio.get_running_loop().time() - began
            return method(handler)(self._me, sent.header, body)

        sending = {"nbytes": (self._network.control.header, 0), "apart": connections > 1, "body": payload}
        return await self._call(peer, invoke, LONGEST_CALL_S, what, **sending, replying=claim.replying)

    async def _call(
        self,
        peer: Advert,
        invoke: Callable[[Handler, SimCall[T]], Coroutine[Any, Any, T]],
        deadline_s: float,
        what: str,
        **options: Any,
    ) -> T:
        """Make one call. `options`: further fields of `SimCall`."""
        self._check_alive()
        answer: T = await SimCall(self._network, self._me, peer.peer_id, invoke, deadline_s, what, **options).result()
        return answer

    def _check_alive(self) -> None:
        if self.dead:
            raise Unreachable(f"{self._me} has crashed")


class _SimBody:
    """The tensors of one activation in flight to a handler."""

    def __init__(self, network: Network, sent: Activation, payload: Payload, claim: Claim) -> None:
        self._network, self._sent, self._payload, self._claim = network, sent, payload, claim
        self.latency_s = 0.0
        """Seconds that the header took."""
        self.filler_bytes = 0
        """Bytes of filler to send on each connection before the reply."""

    @property
    def received(self) -> int:
        """See `ports.Body`."""
        return self._payload.moved_bytes(asyncio.get_running_loop().time())

    def reply_soon(self) -> None:
        """See `ports.Body`."""
        if self.filler_bytes:
            payload = self._payload
            self._network.traffic.fill(payload.receiver, payload.sender, payload.connections, self.filler_bytes)

    async def __call__(self) -> Activation:
        """See `ports.Body`. Once it has left, the last byte takes as long as the header did."""
        payload, network = self._payload, self._network
        if payload.sent_at is None and not payload.over:
            granting, asked = payload.receiver, payload.sender
            word, apart = network.control.word, payload.connections > 1
            await network.traffic.deliver(granting, asked, word, network.latency_s(granting, asked), apart=apart)
            waited_s = 0.0
            while network.cut(granting, asked):
                later_s = resent_after_s(waited_s)
                await asyncio.sleep(later_s)
                waited_s += later_s
            if not payload.over and self._claim.take():
                network.traffic.depart(payload)
        await network.traffic.whole(payload, self.latency_s)
        self._claim.left()
        network.traffic.take(payload)
        return self._sent


def _copy(tensor: HostTensor) -> HostTensor:
    """A copy of a tensor: as on a real wire, what arrives are the values at the time of sending."""
    return HostTensor(tensor.name, tensor.dtype, tensor.shape, memoryview(bytes(tensor.data)))


def _sent(activation: Activation) -> Activation:
    """The activation as it travels: a copy with specs and digest filled in."""
    tensors = [_copy(tensor) for tensor in activation.tensors]
    digest = blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.data)
    header = replace(
        activation.header,
        specs=tuple(tensor.spec for tensor in tensors),
        digest=int.from_bytes(digest.digest(), "little"),
    )
    return Activation(header, *tensors, reply=activation.reply)
