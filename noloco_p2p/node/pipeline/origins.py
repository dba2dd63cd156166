"""Which origins a replica waits for under `balanced`, where each of its places in a step is for one of them."""

from collections.abc import Sequence

from noloco_p2p.core.messages import Origin, PeerId
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState


class Origins:
    """Those that this replica has given up, because nothing was heard of them for longer than steps ever take."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._given_up: set[PeerId] = set()

    def heard(self, origin: Origin) -> None:
        """A microbatch came, whatever the answer is: its origin is waited for again."""
        self._swarm.heard(origin)
        if origin.peer in self._given_up:
            self._given_up.remove(origin.peer)
            self._node.waits.pulse()

    def give_up(self, missing: Sequence[PeerId], began: float, silence_s: float) -> list[PeerId]:
        """Give up those of `missing`, whose slots in the step that `began` then are empty, from which nothing came for
        `silence_s`; returns them. An advert counts only while the slots of all are missing, so that all may wait for
        something else: an origin may announce itself and be able to call nobody. One that fetches its weights sends
        nothing.
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
        """It was given up, and no microbatch of it has come since."""
        return origin in self._given_up
