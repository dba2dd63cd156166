"""One call between two simulated nodes: the request, the work, the answer, and everything that can end it early.

It is a chain of event-loop callbacks whose only task is the handler's work, because a thousand nodes make many calls.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from noloco_p2p.core.messages import Gradient, PeerId
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.ports import Handler
from noloco_p2p.sim.links import resent_after_s
from noloco_p2p.sim.network import Endpoint, Network
from noloco_p2p.sim.payloads import Payload

DEAD_LINK_S = 15.0
"""Time after which both ends of a gRPC connection notice that the other one has silently gone."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class SimCall(Generic[T]):
    """One call, which creating this object makes. Its `result` must be awaited.

    It fails with Unreachable at its deadline, at once when the callee crashes, when a cut that swallowed a message has
    lasted for DEAD_LINK_S, and, if its answer is a stream, when the stream is silent for too long.
    """

    network: Network
    caller: PeerId
    callee: PeerId
    invoke: "Callable[[Handler, SimCall[T]], Coroutine[Any, Any, T]]"
    """Makes the call at the callee, once the request has arrived."""
    deadline_s: float
    what: str
    """Name of the method, for error messages."""
    nbytes: tuple[int, int] = (0, 0)
    """Of request and answer, without tensors and beyond what every call sends."""
    apart: bool = False
    """Whether it uses a connection other than those for bodies."""
    body: Payload | None = None
    """The tensors that follow the request."""
    replying: Callable[[], None] = lambda: None
    """Called when tensors of the answer begin to arrive."""
    silence_s: tuple[float, float] | None = None
    """For a call whose answer is a stream: longest silence before the stream starts, and during it, seconds."""
    rest_s: float = float("inf")
    """Longest time that the stream may take once it has started, seconds."""
    _answer: asyncio.Future[T] = field(init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _called_at: float = field(init=False)
    _expires_at: float = field(init=False)
    """When the callee gives up on its own."""
    _deadline: asyncio.TimerHandle = field(init=False)
    _step: asyncio.TimerHandle | None = None
    """Timer of the request or answer in flight."""
    _message: Payload = field(init=False)
    """The request or answer itself."""
    _alive: bool = True
    """Whether something is still happening away from the caller: on the way or at the callee."""
    _work: asyncio.Task[T] | None = None
    _endpoint: Endpoint | None = None
    _reply: Payload | None = None
    """The tensors of the answer."""
    _listening: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Send the request."""
        self._loop = asyncio.get_running_loop()
        self._answer = self._loop.create_future()
        self._called_at = self._loop.time()
        self._expires_at = self._called_at + self.deadline_s
        late = f"gave no answer to {self.what} within {self.deadline_s:.3g} s"
        self._deadline = self._loop.call_at(self._expires_at, self._fail, late)
        self._post(
            self.caller, self.callee, self.network.control.request + self.nbytes[0], self._arrive, apart=self.apart
        )
        self._listen()

    async def result(self) -> T:
        """The answer. If the caller is cancelled meanwhile, the callee learns of it one latency later."""
        try:
            return await self._answer
        finally:
            self._end()
            del self  # An error in its answer refers to this frame.

    def _end(self) -> None:
        """The caller no longer waits."""
        if self._alive and self._endpoint is None and self.network.cut(self.caller, self.callee):
            self._give_up()
        self._deadline.cancel()
        if self._listening is not None:
            self._listening.cancel()
        self._answer.cancel()
        if self.body is not None:
            self.network.traffic.drop(self.body)
        if self._alive:
            latency_s, nbytes = self.network.latency_s(self.caller, self.callee), self.network.control.word
            word = Payload(self.caller, self.callee, "control", nbytes, on_dropped=self._find_dead)
            word.on_gone = lambda: self._loop.call_later(latency_s, self._hang_up, word)
            self.network.traffic.post(word, apart=self.apart)

    # --- at the caller --------------------------------------------------------------------------------------------

    def _settle(self, outcome: T | PeerError) -> None:
        self._alive, self._step = False, None
        self.network.traffic.take(self._message)
        if self._answer.done():
            self._drop_reply()
        elif isinstance(outcome, PeerError):
            self._drop_reply()
            self._answer.set_exception(outcome)
        else:
            if self._reply is not None:
                self.network.traffic.take(self._reply)
            self._answer.set_result(outcome)

    def _fail(self, why: str) -> None:
        if not self._answer.done():
            self._answer.set_exception(Unreachable(f"{self.callee} {why}"))

    def _notice_cut(self, sender: PeerId, receiver: PeerId) -> None:
        """A message is lost. If that is due to a cut, it was sent again until the link counts as dead."""
        if self.network.cut(sender, receiver):
            self._fail(f"has not been heard of for {DEAD_LINK_S:g} s")

    def _listen(self) -> None:
        """Give up if the stream has been silent for too long; otherwise check again when that may be the case."""
        if self.silence_s is None or self._answer.done():
            return
        if self._listening is not None:
            self._listening.cancel()
        now, stream = self._loop.time(), self._reply
        patience_s = self.silence_s[0 if stream is None else 1]
        left_s = (self._called_at if stream is None else stream.heard_at(now)) + patience_s - now
        if left_s > 0:
            self._listening = self._loop.call_later(left_s, self._listen)
            return
        self._fail(f"sent nothing in reply to {self.what} for {patience_s:g} s")

    # --- at the callee --------------------------------------------------------------------------------------------

    async def stream(self, kind: str, nbytes: int, connections: int) -> None:
        """For a handler that answers with a stream: send `nbytes` of tensors and wait until they have left."""
        traffic = self.network.traffic
        self._reply = payload = Payload(self.callee, self.caller, kind, nbytes, connections=connections)
        traffic.depart(payload)
        if (late_at := self._loop.time() + self.rest_s) < self._deadline.when():
            self._deadline.cancel()
            self._deadline = self._loop.call_at(late_at, self._fail, f"sent not all of the {kind} in time")
        self._listen()
        try:
            await traffic.whole(payload)
        except asyncio.CancelledError:
            traffic.drop(payload)
            raise

    def _arrive(self, waited_s: float = 0.0) -> None:
        self._step = None
        if self._retransmits(self.caller, self.callee, self._arrive, waited_s):
            return
        if self.network.request_lost(self.caller, self.callee):
            self._alive = False
            for payload in (self._message, self.body):
                if payload is not None:
                    self.network.traffic.drop(payload)
            self._notice_cut(self.caller, self.callee)
            return
        self.network.traffic.take(self._message)
        endpoint = self._endpoint = self.network.endpoints.get(self.callee)
        if endpoint is None:
            self._send(Unreachable(f"{self.callee} refused the connection"))
            return
        self._expires_at = self._loop.time() + self.deadline_s
        self._work = self._loop.create_task(self.invoke(endpoint.handler, self), context=endpoint.context.copy())
        endpoint.work[self._work] = None
        self._work.add_done_callback(self._worked)

    def _worked(self, work: asyncio.Task[T]) -> None:
        self._work = None
        if self._endpoint is not None:
            self._endpoint.work.pop(work, None)
        outcome = self._outcome(work)
        if not self._alive:
            return
        if outcome is None:
            self._break()
        else:
            self._answer_with(outcome)

    def _answer_with(self, outcome: T | PeerError, waited_s: float = 0.0) -> None:
        self._step = None
        if self._retransmits(self.callee, self.caller, partial(self._answer_with, outcome), waited_s):
            return
        if self.network.endpoints.get(self.callee) is not self._endpoint:
            self._break()
        elif self.network.reply_lost(self.caller, self.callee):
            self._alive = False
            self._drop_reply()
            self._notice_cut(self.callee, self.caller)
        else:
            self._reply_with(outcome)

    def _retransmits(self, sender: PeerId, receiver: PeerId, arrive: Callable[[float], None], waited_s: float) -> bool:
        """If a message first sent `waited_s` ago meets a cut, schedule its retransmission. Returns whether it did."""
        if waited_s >= DEAD_LINK_S or not self.network.cut(sender, receiver):
            return False
        later_s = resent_after_s(waited_s)
        self._step = self._loop.call_later(later_s, arrive, waited_s + later_s)
        return True

    def _reply_with(self, outcome: T | PeerError) -> None:
        """Send an answer after its tensors, if it has any. A stream has already sent its own."""
        nbytes = self.network.payload_bytes("gradient", (outcome.grad,)) if isinstance(outcome, Gradient) else 0
        if isinstance(outcome, Gradient) and nbytes:
            connections = self.body.connections if self.body is not None else 1
            self._reply = payload = Payload(
                self.callee, self.caller, "gradient", nbytes, outcome.microbatch, connections
            )
            self.network.traffic.depart(payload)
            if payload.gone_at is None:
                self._loop.call_later(self.network.latency_s(self.callee, self.caller), self.replying)
                payload.on_gone = lambda: self._send(outcome)
                payload.on_lost = self._break
                return
        self._send(outcome)

    def _break(self) -> None:
        self._settle(Unreachable(f"{self.callee} broke the connection"))

    def _send(self, outcome: T | PeerError) -> None:
        """Send the answer itself. If it has tensors, it has already waited with them."""
        apart = self.apart or self._reply is not None
        nbytes = self.network.control.answer + self.nbytes[1]
        self._post(self.callee, self.caller, nbytes, self._settle, outcome, apart=apart)
        self._message.on_lost = self._break

    def _post(
        self, sender: PeerId, receiver: PeerId, nbytes: int, then: Callable[..., None], *args: object, apart: bool
    ) -> None:
        """Send a message and call `then` when it arrives."""
        latency_s = self.network.latency_s(sender, receiver)

        def gone() -> None:
            self._step = self._loop.call_later(latency_s, then, *args)

        self._message = Payload(sender, receiver, "control", nbytes, on_gone=gone)
        self.network.traffic.post(self._message, apart=apart)

    def _outcome(self, work: asyncio.Task[T]) -> T | PeerError | None:
        """The handler's answer, or the error for its caller; None if the handler was cancelled."""
        if work.cancelled():
            return None
        error = work.exception()
        match error:
            case None:
                return work.result()
            case Violation():
                return Violation(str(error), ours=True)
            case Busy() | Declined():
                return type(error)(str(error))
            case Exception():
                if self._alive:
                    self.network.bugs.append(error)
                    self.network.news.set()
                return Declined(f"{self.callee} failed: {type(error).__name__}: {error}")
        raise error

    def _hang_up(self, word: Payload) -> None:
        """The callee learns that its caller is gone: now, or if nothing gets through, when it finds the link dead."""
        self.network.traffic.take(word)
        if self._alive and self.network.cut(self.caller, self.callee):
            self._find_dead()
        else:
            self._give_up()

    def _find_dead(self) -> None:
        """The callee gives up once it notices that the link is dead, or at its deadline."""
        self._loop.call_at(min(self._expires_at, self._loop.time() + DEAD_LINK_S), self._give_up)

    def _give_up(self) -> None:
        self._alive = False
        if self._step is not None:
            self._step.cancel()
        if self._work is not None:
            self._work.cancel()
        self.network.traffic.drop(self._message)
        self._drop_reply()

    def _drop_reply(self) -> None:
        """Nobody wants the tensors of the answer any more."""
        if self._reply is not None:
            self.network.traffic.drop(self._reply)
