"""Which origins a replica waits for if stages go in step; under `balanced` each of its slots belongs to one origin."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from noloco_p2p.core.messages import Origin, PeerId
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.state import NodeState

LONGEST_STEP = 4.0
"""How long a step waits for an origin that sends, but does not fill its slots, in units of the silence after which one
that sends nothing is given up."""
LONGEST_PAUSE = 32.0
"""The longest pause in which an origin that was given up repeatedly is not waited for, in the same unit. A lapse is
forgotten when as much time has passed since the end of its pause."""


class _Lapse(NamedTuple):
    """When an origin was given up, on the loop's clock, and for how long after that it is not waited for."""

    at: float
    pause_s: float


class Origins:
    """The origins that this replica has given up, because it received nothing from them for longer than steps take."""

    def __init__(self, node: NodeState, swarm: Membership) -> None:
        self._node = node
        self._swarm = swarm
        self._lapses: dict[PeerId, _Lapse] = {}

    def heard(self, origin: Origin) -> None:
        """Note that a microbatch has arrived, whatever the answer to it: its origin is waited for again, at once or, if
        it was given up repeatedly, after its pause."""
        self._swarm.heard(origin)
        if origin.peer in self._lapses:
            self._node.waits.pulse()

    def give_up(self, missing: Sequence[PeerId], began: float, silence_s: float) -> None:
        """Give up the `missing` origins from which nothing has come for `silence_s`, or that have not filled their
        slots for LONGEST_STEP times as long. The step began at `began`.

        An advert counts as a sign of life only if all origins are missing, because then all may be waiting for
        something else: an origin may be able to announce itself but to call nobody. One that is waiting or fetching its
        weights counts as silent, because it sends nothing.
        """
        members, now = self._swarm.members, self._node.now()
        all_wait = len(missing) == len(self._swarm.view.origins)
        endless = not all_wait and now - began > LONGEST_STEP * silence_s

        def was_heard(origin: PeerId) -> bool:
            advert, at = members.get(origin), members.last_sign(origin) if all_wait else members.heard_at(origin)
            at_work = advert is not None and advert.state not in ("waiting", "syncing")
            return at_work and max(began, at or began) > now - silence_s

        silent = [origin for origin in missing if endless or not was_heard(origin)]
        longest_s = LONGEST_PAUSE * silence_s
        recent = [peer for peer, one in self._lapses.items() if self.is_silent(peer) or now < sum(one) + longest_s]
        lapses = {peer: self._lapses[peer] for peer in filter(members.get, recent)}
        for origin in silent:
            again = min(max(silence_s, 2 * lapses[origin].pause_s), longest_s) if origin in lapses else 0.0
            lapses[origin] = _Lapse(now, again)
        self._lapses = lapses

    def is_silent(self, origin: PeerId) -> bool:
        """Whether the origin was given up, and none of its microbatches has come since; or is doubted, and none ever
        came."""
        members, lapse = self._swarm.members, self._lapses.get(origin)
        given_up = lapse is not None and members.heard_at(origin) <= lapse.at
        return given_up or (origin in members.doubted() and members.heard_at(origin) == -inf)

    def waits_for(self, origin: PeerId) -> bool:
        """Whether the origin is not silent, and not in the pause that follows repeated lapses. Such pauses count only
        while another origin is waited for."""
        now, speaking = self._node.now(), [one for one in self._swarm.view.origins if not self.is_silent(one)]
        regular = [one for one in speaking if one not in self._lapses or sum(self._lapses[one]) <= now]
        return origin in (regular or speaking)
