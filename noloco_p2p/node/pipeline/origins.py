"""Which origins a replica waits for under `balanced`, where each of its slots in a step belongs to one origin."""

from collections.abc import Sequence
from math import inf

from noloco_p2p.core.messages import Origin, PeerId
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState


class Origins:
    """The origins that this replica has given up, because it received nothing from them for longer than steps take."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._given_up: set[PeerId] = set()

    def heard(self, origin: Origin) -> None:
        """Note that a microbatch has arrived, whatever the answer to it: its origin is waited for again."""
        self._swarm.heard(origin)
        if origin.peer in self._given_up:
            self._given_up.remove(origin.peer)
            self._node.waits.pulse()

    def give_up(self, missing: Sequence[PeerId], began: float, silence_s: float) -> list[PeerId]:
        """Give up, and return, the `missing` origins from which nothing has come for `silence_s`. Their slots in the
        step that began at `began` are still empty.

        An advert counts as a sign of life only if all origins are missing, because then all may be waiting for
        something else: an origin may be able to announce itself but to call nobody. One that is waiting or fetching its
        weights counts as silent, because it sends nothing.
        """
        members, now = self._swarm.members, self._node.now()
        all_wait = len(missing) == len(self._swarm.view.origins)

        def was_heard(origin: PeerId) -> bool:
            advert, at = members.get(origin), members.last_sign(origin) if all_wait else members.heard_at(origin)
            at_work = advert is not None and advert.state not in ("waiting", "syncing")
            return at_work and max(began, at or began) > now - silence_s

        silent = [origin for origin in missing if not was_heard(origin)]
        self._given_up = {*filter(members.get, self._given_up), *silent}
        return silent

    def is_silent(self, origin: PeerId) -> bool:
        """Whether the origin was given up, and none of its microbatches has come since; or is doubted, and none ever
        came."""
        members = self._swarm.members
        return origin in self._given_up or (origin in members.doubted() and members.heard_at(origin) == -inf)
