"""What the simulated nodes measure of their lines: both ends of a transfer see when its bytes begin and end to move."""

from dataclasses import dataclass

from noloco_p2p.core.line_rate import LineRate, MeasuredLine
from noloco_p2p.core.messages import PeerId


@dataclass(slots=True, eq=False)
class Transfer:
    """The tensors of one message."""

    sender: PeerId
    receiver: PeerId
    kind: str
    nbytes: int
    measured: tuple[tuple[LineRate, float], ...] = ()
    """While it moves: the directions of the two lines, and what they call its beginning."""
    moved_before: float = 0.0
    """How much of it had left then."""


class MeasuredLines:
    """The lines of all processes that are there."""

    def __init__(self) -> None:
        self._lines: dict[PeerId, MeasuredLine] = {}

    def new(self, peer: PeerId) -> MeasuredLine:
        """That of a process that begins now."""
        self._lines[peer] = line = MeasuredLine()
        return line

    def moves(self, transfer: Transfer, moved: float, now: float) -> None:
        """It moves from now on; so much of it has left."""
        sender, receiver = self._lines.get(transfer.sender), self._lines.get(transfer.receiver)
        rates = ([sender.up] if sender else []) + ([receiver.down] if receiver else [])
        for rate in rates:
            rate.carries(transfer.kind, transfer.nbytes)
        transfer.moved_before, transfer.measured = moved, tuple([(rate, rate.began(now)) for rate in rates])

    def stopped(self, transfer: Transfer, moved: float, now: float) -> None:
        """It moves no more, if it did; so much of it has left in all."""
        for rate, began in transfer.measured:
            rate.ended(began, moved - transfer.moved_before, now)
        transfer.measured = ()
