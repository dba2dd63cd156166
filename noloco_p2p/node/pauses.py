"""When the owner has the device: told so, or outside of the hours that the owner gives (`limits.hours`). And what
follows when this node has stood still: its machine slept, its process was stopped, or it was cut off from the
others."""

from collections.abc import Callable
from datetime import datetime

from noloco_p2p.core import hours
from noloco_p2p.core.status import Resource
from noloco_p2p.node.checkpointing import Checkpointer
from noloco_p2p.node.join import Joining
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState

LOOK_S = 5.0
"""Seconds between two looks at the clock on the wall, which may be put back or forward."""
UNLUCKY_STEPS = 8
"""A replica of a later stage may by chance be sent nothing for this many inner steps."""


class Pauses:
    """Keeps `NodeState.closed_until` and `stood_still`, and pauses the node while its owner has the device."""

    def __init__(self, node: NodeState, local_time: Callable[[], datetime]) -> None:
        self._node = node
        self._local_time = local_time
        self._looked_at = self._slept_until = local_time().timestamp()
        self._trained = (0, 0.0, 0.0)
        """Number of inner steps with microbatches since this node had its weights, when the last one ended, on the
        loop's clock, and the seconds spent in evaluations until then."""
        self.look()

    async def keep_hours(self) -> None:
        """Look at the clock from time to time. Never ends."""
        while True:
            await self._node.waits.until(lambda: False, "next look at the clock", Resource.OWNER, LOOK_S, idle=True)
            pausing = self._node.pausing
            self.look()
            if self._node.pausing != pausing:
                self._node.waits.pulse()

    async def until_open(self) -> None:
        """Before this node joins: until its owner's hours begin. It is not announced before."""
        node = self._node
        if node.closed_until is None:
            return
        what = f"device at {node.closed_until}"
        node.event("info", message=f"waits for its {what}, when the hours of limits.hours begin")
        await node.waits.until(lambda: node.closed_until is None or node.draining, what, Resource.OWNER)
        if node.config.stage is not None and not node.draining:
            node.publish(stage=node.config.stage)

    async def pause(self, rounds: OuterRounds, joining: Joining, checkpointer: Checkpointer) -> None:
        """Until the owner gives the device back; then the weights of now, if the others have gone far ahead. The same
        at once for a node that has stood still.

        A last replica's weights are there for its guardians to pull meanwhile.
        """
        node = self._node
        if node.stood_still:
            slept_until = None
            while slept_until != self._slept_until:
                slept_until = self._slept_until
                if await joining.catch_up():
                    self.begin()
            node.stand_still(False)
            return
        await rounds.forget()
        entrusted = await checkpointer.entrust()
        if node.draining:
            return
        until = node.closed_until
        node.update(moving_to=None)
        node.enter("pause", "the owner needs the device" if until is None else f"until {until}")
        what = "device" if until is None else f"device at {until}"
        await node.waits.until(lambda: not node.wanted_by_owner or node.draining, what, Resource.OWNER)
        if not node.draining:
            await joining.catch_up()
            self.begin()
            if entrusted:
                # What was frozen for the guardians has the number of a round that is yet to come.
                await rounds.go_on_from(node.advert.outer_round)
        if not node.draining:
            node.enter("resume", "the device is back")

    def look(self) -> None:
        """Look at the clock: are these the owner's hours, and has this node stood still since it last looked?

        It has if that was longer ago than two looks are apart, and longer than an outer interval. The loop's clock
        would not tell: it does not count the time in which the machine sleeps. A clock that is put forward looks like
        a sleep, too, which costs a few questions.
        """
        node, local_time = self._node, self._local_time()
        node.close_until(hours.closed_until(node.config.limits.hours, local_time))
        now = local_time.timestamp()
        still_s, self._looked_at = now - self._looked_at, now
        if still_s > self._longest_s():
            node.event("info", message=f"stood still for {still_s:.0f} s, as if the machine had slept")
            self._slept_until = now
            node.stand_still(True)

    def begin(self) -> None:
        """This node begins to train, with the weights of now."""
        self._trained = (0, 0.0, 0.0)

    def stepped(self, microbatches: int) -> None:
        """An inner step of so many microbatches has ended. If none had any for longer than adverts live and than a
        standstill lasts, this node was cut off, or the whole swarm waited: it asks the others before it goes on.

        An empty step is no sign that others reach this node. Before it has taken a few steps, it cannot judge how long
        they take.
        """
        node, now, (steps, at_s, evaluated_s) = self._node, self._node.now(), self._trained
        idle_s = now - at_s - (node.evaluated_s - evaluated_s) if steps >= UNLUCKY_STEPS else 0.0
        longest_s = max(node.config.directory.ttl_s, self._longest_s(UNLUCKY_STEPS))
        if idle_s > longest_s and not node.stood_still:
            node.event("info", message=f"trained nothing for {idle_s:.0f} s, and asks the others how far they are")
            node.stand_still(True)
        if microbatches:
            self._trained = steps + 1, now, node.evaluated_s

    def _longest_s(self, steps: int = 0) -> float:
        """Longest time that is no standstill: two looks, an outer interval, or so many `steps`, at a known speed."""
        speed, m = self._node.advert.steps_per_s, self._node.manifest.outer.inner_steps
        return max(2 * LOOK_S, max(m, steps) / speed if speed else 0.0)
