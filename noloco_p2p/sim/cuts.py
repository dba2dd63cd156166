"""Who cannot hear whom in a simulated network: what is held, partitioned and split, and nothing else."""

from collections.abc import Collection, Sequence

from noloco_p2p.core.messages import PeerId


class Cuts:
    """The faults that swallow messages."""

    def __init__(self) -> None:
        self._held: dict[PeerId, None] = {}
        self._ways: dict[tuple[PeerId, PeerId], None] = {}
        self._group: dict[PeerId, int] = {}

    def hold(self, peer: PeerId) -> None:
        """Nothing from or to a node gets through."""
        self._held[peer] = None

    def release(self, peer: PeerId) -> None:
        """End a hold."""
        self._held.pop(peer, None)

    def cut(self, sender: PeerId, receiver: PeerId) -> None:
        """Nothing gets through in this direction."""
        self._ways[sender, receiver] = None

    def repair(self, sender: PeerId, receiver: PeerId) -> None:
        """End the cut of this direction."""
        self._ways.pop((sender, receiver), None)

    def split(self, groups: Sequence[Collection[PeerId]]) -> None:
        """Nothing gets through between nodes of different groups; who is in none is reached by all."""
        self._group = {peer: number for number, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        """End a split."""
        self._group = {}

    def between(self, sender: PeerId, receiver: PeerId) -> bool:
        """Nothing gets through from the one to the other."""
        if self._held and (sender in self._held or receiver in self._held):
            return True
        if self._ways and (sender, receiver) in self._ways:
            return True
        mine, theirs = self._group.get(sender), self._group.get(receiver)
        return mine is not None and theirs is not None and mine != theirs
