"""Lends this replica's state to newcomers. Those that ask at about the same time share one frozen copy
(ARCHITECTURE.md, "Joining")."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from noloco_p2p.core.members import TRAINED
from noloco_p2p.core.messages import PeerId, ReplicaState
from noloco_p2p.core.seeds import generator
from noloco_p2p.core.status import Task
from noloco_p2p.errors import Declined
from noloco_p2p.node.state import NodeState

KEPT_S = 30.0
"""How long a copy is kept after its last use, seconds: a newcomer whose transfer broke off returns for the rest."""
MAX_COPIES = 2
"""One copy that is still being read, and a fresh one. No more, because a copy is up to five times the weights."""
STALE_INTERVALS = 2
"""Outer intervals by which a copy may lag behind; then the next newcomer gets a fresh one."""


@dataclass(slots=True, eq=False)
class _Copy:
    number: int
    step: float
    """This replica's clock when the copy was requested."""
    round: int
    """Its newest outer round at that time."""
    weights: int
    """How often this replica had taken over weights by then."""
    task: asyncio.Task[ReplicaState]
    users: int = 0
    drop: asyncio.TimerHandle | None = None


class StateDonor:
    """Makes and keeps the copies of one replica's state. A node that moves gets a new donor.

    `incarnation` is the node's, so that no two processes give a copy the same number.
    """

    def __init__(self, node: NodeState, incarnation: int) -> None:
        self._node = node
        self._incarnation = incarnation
        self._copies: list[_Copy] = []
        self._made = 0

    @asynccontextmanager
    async def lend_state(self, caller: PeerId, number: int | None) -> AsyncIterator[ReplicaState]:
        """See ports.Handler. A copy is kept while it is in use, and for KEPT_S afterwards."""
        copy = self._fitting(caller) if number is None else self._numbered(number)
        copy.users += 1
        if copy.drop is not None:
            copy.drop.cancel()
        try:
            yield await self._captured(copy)
        finally:
            copy.users -= 1
            if copy.users == 0 and copy in self._copies:
                if copy.task.done() and (copy.task.cancelled() or copy.task.exception() is not None):
                    self._copies.remove(copy)
                else:
                    copy.drop = asyncio.get_running_loop().call_later(KEPT_S, self._copies.remove, copy)

    def close(self) -> None:
        """Forget all copies, because the node ends or moves. A call that is reading one keeps it until it ends."""
        for copy in list(self._copies):
            self._forget(copy)

    @staticmethod
    async def _captured(copy: _Copy) -> ReplicaState:
        """The state, once it has been captured. Raises Declined if it will not be, because the node ends or moves."""
        try:
            return await asyncio.shield(copy.task)
        except asyncio.CancelledError:
            if not copy.task.cancelled():
                raise
            # Without an answer the caller would wait until it considers this node silent.
            raise Declined("this node is leaving its stage: it has no state to give any more") from None

    def _numbered(self, number: int) -> _Copy:
        """The copy of which the caller already has a part; no other copy would fit. Raises Declined if it is gone."""
        for copy in self._copies:
            if copy.number == number:
                return copy
        raise Declined(f"this node no longer has copy {number} of its state")

    def _fitting(self, caller: PeerId) -> _Copy:
        """The newest copy if it is fresh enough, or if no other may be made now; otherwise a new one."""
        node = self._node
        if node.advert.state not in TRAINED:
            raise Declined(f"this node is {node.advert.state}: it has no trained state to give")
        if self._copies and self._is_fresh(self._copies[-1]):
            return self._copies[-1]
        if len(self._copies) >= MAX_COPIES:
            idle = [copy for copy in self._copies if copy.users == 0]
            if not idle:
                return self._copies[-1]
            self._forget(idle[0])
        return self._begin(caller)

    def _is_fresh(self, copy: _Copy) -> bool:
        """Whether a copy is of the weights that this replica trains now, and at most STALE_INTERVALS old, by its clock
        and by its round: a replica that was out of reach takes over the others' clock first. Under a rule that takes
        from all replicas it must be of the newest round: otherwise a newcomer would lack what the others have merged
        since, and have to copy again. Rules of gradients are exempt, because gradients are kept longer."""
        outer, advert = self._node.manifest.outer, self._node.advert
        newest = outer.update.common and not outer.update.gradients
        if advert.outer_round - copy.round > (0 if newest else STALE_INTERVALS):
            return False
        return copy.weights == self._node.taken_over and advert.step - copy.step <= STALE_INTERVALS * outer.inner_steps

    def _begin(self, caller: PeerId) -> _Copy:
        node = self._node
        self._made += 1
        purpose = ("donor", node.me, self._incarnation, node.index, node.inner_steps, self._made)
        number = generator(node.manifest.seed, *purpose).getrandbits(64)
        node.event("info", message=f"freezing its state at step {node.step} for {caller}")
        task = asyncio.get_running_loop().create_task(self._capture(number), name=f"donor {node.me}")
        copy = _Copy(number, node.advert.step, node.advert.outer_round, node.taken_over, task)
        self._copies.append(copy)
        return copy

    async def _capture(self, number: int) -> ReplicaState:
        """Capture the state. Its labels are read afterwards: by then all device operations before it are counted."""
        node = self._node
        with node.waits.computing("copy of the state", Task.NEWCOMER):
            state = await node.stage.capture(node.advert.outer_round, node.advert.step, node.inner_steps)
        state = replace(state, round=node.advert.outer_round, fresh_round=node.advert.fresh_round)
        return replace(state, number=number, step=node.advert.step, inner_steps=node.inner_steps)

    def _forget(self, copy: _Copy) -> None:
        if copy.drop is not None:
            copy.drop.cancel()
        copy.task.cancel()
        self._copies.remove(copy)
