"""What the simulated nodes measure of their lines. Both ends of a transfer see when its bytes start and stop moving."""

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
    """While it moves: the line directions that measure it, each with the start time that it returned."""
    moved_before: float = 0.0
    """Bytes that had left by then."""


class MeasuredLines:
    """The lines of all running processes."""

    def __init__(self) -> None:
        self._lines: dict[PeerId, MeasuredLine] = {}

    def new(self, peer: PeerId) -> MeasuredLine:
        """The line of a process that starts now."""
        self._lines[peer] = line = MeasuredLine()
        return line

    def moves(self, transfer: Transfer, moved: float, now: float) -> None:
        """The transfer starts to move now. `moved`: bytes that have left so far."""
        sender, receiver = self._lines.get(transfer.sender), self._lines.get(transfer.receiver)
        rates = ([sender.up] if sender else []) + ([receiver.down] if receiver else [])
        for rate in rates:
            rate.carries(transfer.kind, transfer.nbytes)
        transfer.moved_before, transfer.measured = moved, tuple([(rate, rate.began(now)) for rate in rates])

    def stopped(self, transfer: Transfer, moved: float, now: float) -> None:
        """The transfer stops, if it was moving. `moved`: bytes that have left in total."""
        for rate, began in transfer.measured:
            rate.ended(began, moved - transfer.moved_before, now)
        transfer.measured = ()
