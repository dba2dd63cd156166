"""Pauses a node while its owner has the device, by command or outside `limits.hours`. Also detects that the node has
stood still, because its machine slept, its process was stopped, or it was cut off from the others, and a device that
hangs."""

from collections.abc import Callable
from datetime import datetime

from noloco_p2p.core import hours
from noloco_p2p.core.status import Resource
from noloco_p2p.errors import LocalError
from noloco_p2p.node.checkpointing import Checkpointer
from noloco_p2p.node.join import Joining
from noloco_p2p.node.outer_round import OuterRounds
from noloco_p2p.node.state import NodeState

LOOK_S = 5.0
"""Seconds between two looks at the wall clock, which may be set back or forward."""
HUNG_S = 900.0
"""A device hangs if one call to it takes this many seconds."""
UNLUCKY_STEPS = 8
"""For up to this many inner steps, a replica of a later stage may by chance receive no microbatch."""


class Pauses:
    """Keeps `NodeState.closed_until` and `stood_still`, and pauses the node while its owner has the device."""

    def __init__(self, node: NodeState, local_time: Callable[[], datetime]) -> None:
        self._node = node
        self._local_time = local_time
        self._looked_at = self._slept_until = local_time().timestamp()
        self._trained = (0, 0.0, 0.0)
        """Number of inner steps with microbatches since this node got its weights; when the last of them ended, on the
        loop's clock; and the seconds spent in evaluations until then."""
        self.check_clock()

    async def keep_watch(self) -> None:
        """Look at the clock and at the device every LOOK_S.

        Raises LocalError if a call to the device does not end: another node can then take this one's place, and a
        supervisor can start it again. Two looks must find it so: after a standstill of the process it may end at once.
        """
        node, late, running_s = self._node, 0, 0.0
        while late < 2:
            await node.waits.until(lambda: False, "next look at the clock", Resource.OWNER, LOOK_S, idle=True)
            self.check_clock()
            node.waits.pulse()
            running_s = 0.0 if node.microbatch is None else node.stage.running_s()
            late = late + 1 if running_s >= HUNG_S else 0
        node.stage.close(hung=True)
        raise LocalError(f"the device has not completed its work for {running_s:.0f} s: check it, then start again")

    async def until_open(self) -> None:
        """Wait until the owner's hours begin, before this node joins or is announced."""
        node = self._node
        if node.closed_until is None:
            return
        what = f"device at {node.closed_until}"
        node.event("info", message=f"waiting until {node.closed_until}, when limits.hours begin")
        await node.waits.until(lambda: node.closed_until is None or node.draining, what, Resource.OWNER)
        if node.config.stage is not None and not node.draining:
            node.publish(stage=node.config.stage)

    async def pause(self, rounds: OuterRounds, joining: Joining, checkpointer: Checkpointer) -> None:
        """Wait until the owner gives the device back; then copy newer weights if the others are far ahead. A node that
        has only stood still copies them at once.

        If this is the last replica of its stage, guardians can pull its weights meanwhile.
        """
        node = self._node
        if node.stood_still:
            slept_until = None
            if not node.draining:
                node.enter("stand still", "it finds out how far the others are")
            while slept_until != self._slept_until:
                slept_until = self._slept_until
                self._trained = 0 if await joining.catch_up() else self._trained[0], node.now(), node.evaluated_s
            node.stand_still(False)
            if not node.draining:
                node.enter("synced")
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
                # The weights were frozen for the guardians under the number of the next round.
                await rounds.freeze_anew()
        if not node.draining:
            node.enter("resume", "the device is back")

    def check_clock(self) -> bool:
        """Look at the wall clock: is now within the owner's hours, and has this node stood still since the last look?
        Returns whether it has still to catch up.

        It has if the last look is longer ago than 2·LOOK_S and than an outer interval. The loop's clock would not show
        it, because it does not advance while the machine sleeps. A wall clock that is set forward looks like sleep,
        too, which only costs a few requests.
        """
        node, local_time = self._node, self._local_time()
        node.close_until(hours.closed_until(node.config.limits.hours, local_time))
        now = local_time.timestamp()
        still_s, self._looked_at = now - self._looked_at, now
        if still_s > self._longest_s():
            node.event("info", message=f"stood still for {still_s:,.0f} s, as if the machine had slept")
            self._slept_until = now
            node.stand_still(True)
        return node.stood_still

    def begin(self) -> None:
        """Start counting anew, because this node begins to train with new weights."""
        self._trained = (0, 0.0, 0.0)

    def stepped(self, microbatches: int) -> None:
        """Note that an inner step of `microbatches` has ended. If all steps have been empty for longer than an advert
        lives, a standstill takes, and UNLUCKY_STEPS steps take, then either this node was cut off or the whole swarm
        waited: it asks the others before it continues.

        An empty step is no sign that others can reach this node. Before it has taken a few steps, the node cannot judge
        how long they take.
        """
        node, now, (steps, at_s, evaluated_s) = self._node, self._node.now(), self._trained
        idle_s = now - at_s - (node.evaluated_s - evaluated_s) if steps >= UNLUCKY_STEPS else 0.0
        if idle_s > max(node.config.directory.ttl_s, self._longest_s(UNLUCKY_STEPS)) and not node.stood_still:
            node.event("info", message=f"trained on nothing for {idle_s:,.0f} s: asking the others how far they are")
            node.stand_still(True)
        if microbatches:
            self._trained = steps + 1, now, node.evaluated_s

    def _longest_s(self, steps: int = 0) -> float:
        """The longest time that is no standstill: 2·LOOK_S, an outer interval, or `steps` inner steps, in seconds."""
        speed, m = self._node.advert.steps_per_s, self._node.manifest.outer.inner_steps
        return max(2 * LOOK_S, max(m, steps) / speed if speed else 0.0)
