"""The tensors under way in a simulated network: how long their bytes take to leave, and what became of all bytes.

Bytes flow: a letter that is dropped half-way has cost half its bytes. Where nothing limits it, it leaves at once.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from noloco_p2p.core.messages import PeerId
from noloco_p2p.sim.bandwidth import Bandwidth, Transfer, Way
from noloco_p2p.sim.cuts import Cuts
from noloco_p2p.sim.links import Geography, Link
from noloco_p2p.sim.tcp import ceiling_bytes_per_s

SAME_S = 1e-9
"""Times that differ by less are the same: what is added up of latencies is not exact."""

KINDS = ("activation", "gradient", "snapshot", "state")
"""What travels: the kinds of the ledger."""


@dataclass(slots=True)
class Account:
    """What became of one node's bytes of one kind. Over all nodes, sent = received + lost + in flight."""

    sent: int = 0
    """Left the node."""
    received: int = 0
    """Came to the node, in letters that it took."""
    lost: int = 0
    """Left the node for nothing: their letter was never whole, or nobody wanted it any more."""
    in_flight: int = 0
    """Left the node, and it is not known yet what becomes of them."""

    def add(self, other: "Account") -> None:
        """Add what another one has."""
        self.sent += other.sent
        self.received += other.received
        self.lost += other.lost
        self.in_flight += other.in_flight


class Letter:
    """The tensors of one message, from their sender to their receiver."""

    __slots__ = ("gone", "gone_at", "kind", "lost", "nbytes", "receiver", "sender", "sent_at", "stalled_at", "transfer")

    def __init__(self, sender: PeerId, receiver: PeerId, kind: str, nbytes: int, sent_at: float) -> None:
        self.sender, self.receiver, self.kind, self.nbytes, self.sent_at = sender, receiver, kind, nbytes, sent_at
        self.gone_at: float | None = None
        """When its last byte left."""
        self.stalled_at: float | None = None
        """Since when it stands still, because nothing gets through."""
        self.transfer: Transfer | None = None
        """None: nothing limits it, or it is over."""
        self.gone: Callable[[], object] | None = None
        """Called when its last byte leaves, unless it left at once."""
        self.lost: Callable[[], None] | None = None
        """Called when a crash ends it."""

    def heard_at(self, now: float) -> float:
        """When its receiver last got something of it, were there no latency."""
        if self.gone_at is not None:
            return self.gone_at
        return now if self.stalled_at is None else self.stalled_at

    def moved_bytes(self, now: float) -> int:
        """How much of it has left."""
        if self.transfer is None:
            return self.nbytes
        return math.floor(self.transfer.moved(now))


class Traffic:
    """All letters under way, and the ledger of all that ever were."""

    def __init__(self, geography: Geography, link_of: Callable[[PeerId, PeerId], Link], cuts: Cuts) -> None:
        self._geography, self._link_of, self._cuts = geography, link_of, cuts
        self._bandwidth = Bandwidth()
        self._access: dict[PeerId, tuple[Way | None, Way | None]] = {}
        self._link_ways: dict[tuple[PeerId, PeerId], Way | None] = {}
        self._open: dict[Letter, None] = {}
        self._accounts: dict[PeerId, dict[str, Account]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- the ledger -----------------------------------------------------------------------------------------------

    def ledger(self) -> dict[PeerId, dict[str, Account]]:
        """What became of the bytes of every node that had any, by kind, as of now or of the end of the run."""
        book = {peer: {kind: Account() for kind in KINDS} for peer in sorted(self._accounts)}
        for peer, kinds in self._accounts.items():
            for kind, account in kinds.items():
                book[peer][kind].add(account)
        for letter in self._open:
            moved = letter.moved_bytes(self._now())
            book[letter.sender][letter.kind].add(Account(sent=moved, in_flight=moved))
        return book

    # --- letters --------------------------------------------------------------------------------------------------

    def depart(self, sender: PeerId, receiver: PeerId, kind: str, nbytes: int) -> Letter:
        """Begin to send; `gone_at` is set at once where nothing limits it."""
        self._account(sender, kind)
        self._account(receiver, kind)
        letter = Letter(sender, receiver, kind, nbytes, self._now())
        self._open[letter] = None
        ways = self._ways(sender, receiver) if nbytes else ()
        if not ways:
            letter.gone_at = letter.sent_at
            return letter
        letter.transfer = Transfer(nbytes, lambda: self._has_left(letter))
        if self._cuts.between(sender, receiver):
            letter.stalled_at = letter.sent_at
        else:
            self._bandwidth.go(letter.transfer, ways)
        return letter

    async def whole(self, letter: Letter, latency_s: float = 0.0) -> None:
        """Until its last byte has left, and had `latency_s` to arrive; for ever when it is dropped before that."""
        loop = asyncio.get_running_loop()
        left_s = 0.0 if letter.gone_at is None else letter.gone_at + latency_s - loop.time()
        if letter.gone_at is not None and left_s <= SAME_S:
            return
        here: asyncio.Future[None] = loop.create_future()
        if letter.gone_at is not None:
            loop.call_later(left_s, _wake, here)
        elif latency_s:
            letter.gone = lambda: loop.call_later(latency_s, _wake, here)
        else:
            letter.gone = lambda: _wake(here)
        await here

    def take(self, letter: Letter) -> None:
        """Its receiver has it and wants it."""
        if letter in self._open:
            del self._open[letter]
            self._account(letter.sender, letter.kind).sent += letter.nbytes
            self._account(letter.receiver, letter.kind).received += letter.nbytes

    def drop(self, letter: Letter) -> None:
        """Send no more of it, and count what has left as lost; nothing happens to one that was taken or dropped."""
        if letter not in self._open:
            return
        moved = letter.moved_bytes(self._now())
        del self._open[letter]
        account = self._account(letter.sender, letter.kind)
        account.sent += moved
        account.lost += moved
        if letter.transfer is not None:
            self._bandwidth.stop(letter.transfer)
        letter.transfer = letter.gone = None

    # --- when the network changes ---------------------------------------------------------------------------------

    def review(self) -> None:
        """After a change of the cuts: what cannot get through stalls, what can goes on where it was.

        TCP would go on a while later, at its next retransmission.
        """
        for letter in list(self._open):
            if letter.transfer is None:
                continue
            cut = self._cuts.between(letter.sender, letter.receiver)
            if cut and letter.stalled_at is None:
                letter.stalled_at = self._now()
                self._bandwidth.stop(letter.transfer)
            elif not cut and letter.stalled_at is not None:
                letter.stalled_at = None
                self._bandwidth.go(letter.transfer, self._ways(letter.sender, letter.receiver))

    def relink(self, sender: PeerId, receiver: PeerId) -> None:
        """After a change of a link: what is under way between the two goes on at what is left to it now."""
        self._link_ways.pop((sender, receiver), None)
        for letter in list(self._open):
            if letter.transfer is None or (letter.sender, letter.receiver) != (sender, receiver):
                continue
            if letter.stalled_at is not None:
                continue
            self._bandwidth.stop(letter.transfer)
            ways = self._ways(sender, receiver)
            if ways:
                self._bandwidth.go(letter.transfer, ways)
            else:
                self._has_left(letter)

    def crash(self, peer: PeerId) -> None:
        """A node is gone: what it has not sent, and what it has not taken, is lost. Calls `lost` of those letters."""
        for letter in list(self._open):
            if letter.receiver == peer or (letter.sender == peer and letter.gone_at is None):
                self.drop(letter)
                if letter.lost is not None:
                    letter.lost()
                letter.lost = None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _has_left(self, letter: Letter) -> None:
        letter.gone_at, letter.transfer = self._now(), None
        if letter.gone is not None:
            letter.gone()
            letter.gone = letter.lost = None

    def _ways(self, sender: PeerId, receiver: PeerId) -> tuple[Way, ...]:
        """What limits a letter between the two: the sender's access, the link, the receiver's access."""
        ways = (self._access_of(sender)[0], self._link_way(sender, receiver), self._access_of(receiver)[1])
        return tuple([way for way in ways if way is not None])

    def _access_of(self, peer: PeerId) -> tuple[Way | None, Way | None]:
        if peer not in self._access:
            access = self._geography.access(peer)
            up, down = access.up_bytes_per_s, access.down_bytes_per_s
            self._access[peer] = (Way(up) if up else None, Way(down) if down else None)
        return self._access[peer]

    def _link_way(self, sender: PeerId, receiver: PeerId) -> Way | None:
        """All that goes one way between two nodes shares one connection, and so its ceiling."""
        way = (sender, receiver)
        if way not in self._link_ways:
            link = self._link_of(sender, receiver)
            round_trip_s = link.latency_s + self._link_of(receiver, sender).latency_s
            speed = min(link.bytes_per_s or math.inf, ceiling_bytes_per_s(link.loss, round_trip_s))
            self._link_ways[way] = Way(speed) if speed < math.inf else None
        return self._link_ways[way]

    def _account(self, peer: PeerId, kind: str) -> Account:
        kinds = self._accounts.get(peer)
        if kinds is None:
            kinds = self._accounts[peer] = {}
        account = kinds.get(kind)
        if account is None:
            account = kinds[kind] = Account()
        return account

    def _now(self) -> float:
        """Virtual time; that of the end when the run is over."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop.time()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
