"""Barriers of a simulated network. Equal ones are interchangeable, so a test can remove one without having kept it."""

from collections.abc import Collection
from dataclasses import dataclass

from noloco_p2p.core.messages import PeerId


@dataclass(frozen=True)
class Held:
    """Blocks everything from and to a node."""

    peer: PeerId

    def __call__(self, sender: PeerId, receiver: PeerId) -> bool:
        return self.peer in (sender, receiver)


@dataclass(frozen=True)
class Between:
    """Blocks everything between two nodes."""

    one: PeerId
    other: PeerId

    def __call__(self, sender: PeerId, receiver: PeerId) -> bool:
        return {sender, receiver} == {self.one, self.other}


@dataclass(frozen=True)
class OneWay:
    """Blocks everything from one node to another."""

    sender: PeerId
    receiver: PeerId

    def __call__(self, sender: PeerId, receiver: PeerId) -> bool:
        return (sender, receiver) == (self.sender, self.receiver)


@dataclass(frozen=True)
class Around:
    """Blocks everything between these nodes and all others."""

    peers: Collection[PeerId]

    def __call__(self, sender: PeerId, receiver: PeerId) -> bool:
        return (sender in self.peers) != (receiver in self.peers)
