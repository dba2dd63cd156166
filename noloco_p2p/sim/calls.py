"""One call between two simulated nodes: the way there, the work, the way back, and everything that can end it early.

It is a chain of the loop's callbacks, and the handler's work is its only task: a thousand nodes make many calls.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import Busy, Declined, PeerError, Unreachable, Violation
from noloco_p2p.ports import Handler
from noloco_p2p.sim.traffic import Letter, Traffic

T = TypeVar("T")


@dataclass(slots=True)
class Endpoint:
    """A node that serves, and what its handlers are doing."""

    handler: Handler
    work: dict[asyncio.Task[Any], None] = field(default_factory=dict)


class Roads(Protocol):
    """What a call needs of the network."""

    traffic: Traffic
    bugs: list[Exception]

    def latency_s(self, sender: PeerId, receiver: PeerId) -> float:
        """Time on the way for one message."""
        ...

    def endpoint(self, peer: PeerId) -> Endpoint | None:
        """Who serves there; None: nobody."""
        ...

    def request_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """A call that arrives now is swallowed."""
        ...

    def reply_lost(self, caller: PeerId, callee: PeerId) -> bool:
        """An answer that sets out now is swallowed."""
        ...

    def cut(self, sender: PeerId, receiver: PeerId) -> bool:
        """Nothing gets through from the one to the other."""
        ...

    def reply_bytes(self, reply: object) -> int:
        """Bytes of the tensors in an answer that is no stream."""
        ...


@dataclass(slots=True)
class Flow:
    """What the caller of a streamed answer has heard of it, and how long it waits for more."""

    patience_s: float
    """Longest silence before the stream begins, seconds."""
    silence_s: float
    """Longest silence in it."""
    letter: Letter | None = None
    """The stream; None: it has not begun."""
    listen: Callable[[], None] | None = None
    """Called when it begins."""


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """What is called."""

    caller: PeerId
    callee: PeerId
    invoke: Callable[[Handler], Coroutine[Any, Any, T]]
    """Makes the call at the callee; begun when the request arrives."""
    deadline_s: float
    what: str
    """The method, for messages."""
    body: Letter | None = None
    """The tensors that follow the request."""
    flow: Flow | None = None
    """Of a call whose answer is a stream: `invoke` hands it to `Network.stream`."""


class Call(Generic[T]):
    """A request on its way. `answer` gets what comes of it; `end` must be called by whoever waited for that."""

    def __init__(self, roads: Roads, request: Request[T]) -> None:
        self._roads, self._request = roads, request
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[T] = self._loop.create_future()
        self._called_at = self._loop.time()
        self._expires_at = self._called_at + request.deadline_s
        """When the callee gives it up by itself."""
        self._alive = True
        """Something of it goes on beyond the caller."""
        self._step: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[T] | None = None
        self._endpoint: Endpoint | None = None
        self._reply: Letter | None = None
        self._listening: asyncio.TimerHandle | None = None
        self._deadline = self._loop.call_at(self._expires_at, self._too_late)
        self._step = self._loop.call_later(roads.latency_s(request.caller, request.callee), self._arrive)
        if request.flow is not None:
            request.flow.listen = self._listen
            self._listen()

    def end(self) -> None:
        """The caller waits no longer, whatever for; the callee hears of it a latency later."""
        caller, callee = self._request.caller, self._request.callee
        self._deadline.cancel()
        if self._listening is not None:
            self._listening.cancel()
        self.answer.cancel()
        if self._request.flow is not None:
            self._request.flow.listen = None
        if self._request.body is not None:
            self._roads.traffic.drop(self._request.body)
        if self._alive:
            self._loop.call_later(self._roads.latency_s(caller, callee), self._hang_up)

    # --- at the caller --------------------------------------------------------------------------------------------

    def _settle(self, outcome: T | PeerError) -> None:
        self._alive, self._step = False, None
        if self.answer.done():
            self._forget()
        elif isinstance(outcome, PeerError):
            self._forget()
            self.answer.set_exception(outcome)
        else:
            letter = self._reply_letter()
            if letter is not None:
                self._roads.traffic.take(letter)
            self.answer.set_result(outcome)

    def _too_late(self) -> None:
        if not self.answer.done():
            what, deadline_s = self._request.what, self._request.deadline_s
            message = f"{self._request.callee} gave no answer to {what} within {deadline_s:.3g} s"
            self.answer.set_exception(Unreachable(message))

    def _listen(self) -> None:
        """Give the call up when nothing has come for as long as its flow allows; else look again when that may be."""
        flow = self._request.flow
        if flow is None or self.answer.done():
            return
        if self._listening is not None:
            self._listening.cancel()
        now, letter = self._loop.time(), flow.letter
        patience_s = flow.patience_s if letter is None else flow.silence_s
        left_s = (self._called_at if letter is None else letter.heard_at(now)) + patience_s - now
        if left_s > 0:
            self._listening = self._loop.call_later(left_s, self._listen)
            return
        message = f"nothing more of {self._request.what} came from {self._request.callee} for {patience_s:g} s"
        self.answer.set_exception(Unreachable(message))

    # --- at the callee --------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        request, roads = self._request, self._roads
        self._step = None
        if roads.request_lost(request.caller, request.callee):
            self._alive = False
            if request.body is not None:
                roads.traffic.drop(request.body)
            return
        endpoint = roads.endpoint(request.callee)
        if endpoint is None:
            self._send(Unreachable(f"{request.callee} refused the connection"))
            return
        self._expires_at = self._loop.time() + request.deadline_s
        self._work = self._loop.create_task(request.invoke(endpoint.handler))
        endpoint.work[self._work] = None
        self._endpoint = endpoint
        self._work.add_done_callback(self._worked)

    def _worked(self, work: asyncio.Task[T]) -> None:
        self._work = None
        if self._endpoint is not None:
            self._endpoint.work.pop(work, None)
        caller, callee = self._request.caller, self._request.callee
        outcome = self._outcome(work)
        if not self._alive:
            return
        if outcome is None:
            self._settle(Unreachable(f"{callee} broke the connection"))
        elif self._roads.reply_lost(caller, callee):
            self._alive = False
            self._forget()
        else:
            self._reply_with(outcome)

    def _reply_with(self, outcome: T | PeerError) -> None:
        """The tensors of an answer go before it; a stream has sent its own."""
        request, roads = self._request, self._roads
        nbytes = roads.reply_bytes(outcome)
        if not nbytes:
            self._send(outcome)
            return
        self._reply = letter = roads.traffic.depart(request.callee, request.caller, "gradient", nbytes)
        if letter.gone_at is not None:
            self._send(outcome)
            return
        letter.gone = lambda: self._send(outcome)
        letter.lost = lambda: self._settle(Unreachable(f"{request.callee} broke the connection"))

    def _send(self, outcome: T | PeerError) -> None:
        latency_s = self._roads.latency_s(self._request.callee, self._request.caller)
        self._step = self._loop.call_later(latency_s, self._settle, outcome)

    def _outcome(self, work: asyncio.Task[T]) -> T | PeerError | None:
        """What the handler gave; None when it was cancelled."""
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
                    self._roads.bugs.append(error)
                return Declined(f"{self._request.callee} failed: {type(error).__name__}: {error}")
        raise error

    def _hang_up(self) -> None:
        """The callee learns that its caller is gone, unless nothing gets through: then its deadline ends the work."""
        if self._alive and self._roads.cut(self._request.caller, self._request.callee):
            self._loop.call_at(self._expires_at, self._give_up)
        else:
            self._give_up()

    def _give_up(self) -> None:
        self._alive = False
        if self._step is not None:
            self._step.cancel()
        if self._work is not None:
            self._work.cancel()
        self._forget()

    def _reply_letter(self) -> Letter | None:
        return self._reply if self._request.flow is None else self._request.flow.letter

    def _forget(self) -> None:
        """What there is of an answer is for nobody."""
        letter = self._reply_letter()
        if letter is not None:
            self._roads.traffic.drop(letter)
