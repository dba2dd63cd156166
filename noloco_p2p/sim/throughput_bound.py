"""The throughput that a scenario's links and devices allow, from an idealised pipeline without nodes or a protocol.

Devices and lines are servers that do one job at a time: gradients first, then the oldest microbatch. Every microbatch
is a nested call and travels once, nobody waits for a grant, and as many are in flight as a step has. A replica takes
its inner step when everything that it started for that step has ended; at stage 0 it then reads the next microbatches.
Left out are jitter, retransmissions, control messages, outer rounds, guardians, evaluation, faults and churn: the
difference from a simulated swarm shows what they cost. See ARCHITECTURE.md, "The simulator". It is not a proven upper
limit: gradients first is a good order, but not always the best.
"""

import heapq
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_p2p.core import routing
from noloco_p2p.core.line_rate import CONNECTIONS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.fault_plan import slowness
from noloco_p2p.sim.job_server import Action, JobServer, Priority, Timeline
from noloco_p2p.sim.links import Geography, MessageSizes, connection_bytes_per_s
from noloco_p2p.sim.scenario import Scenario
from noloco_p2p.sim.simulation import costs_of, geography_of, sizes_of
from noloco_p2p.sim.world import peer_id

MICROBATCHES = 2_000
"""About how many microbatches are processed, in whole steps: enough for a mean, and cheap next to the simulation."""
MIN_STEPS = 3
"""Minimum number of steps, however many microbatches a step has."""
ASKED = 2
"""Number of replicas that a sender asks for a place if the routing policy leaves it the choice."""
MIN_S = 1e-9
"""Smallest cost in comparisons of speeds."""
GRADIENT, ACTIVATION = 0, 1
"""Priorities on a line; the lower goes first. On a device they stand for backward and forward passes."""


@dataclass(frozen=True, slots=True)
class ThroughputBound:
    """The throughput of an idealised pipeline."""

    tokens_per_s: float | None
    """None if nothing takes any time."""
    utilisation: tuple[float, ...]
    """Share of time in which the devices of each stage work."""


def throughput_bound(scenario: Scenario, seed: int, sizes: MessageSizes | None = None) -> ThroughputBound:
    """The bound for one seed, which draws the nodes' speeds, lines and routes. `sizes`: by default the scenario's."""
    return _Pipeline(scenario, seed, sizes or sizes_of(scenario)).run()


@dataclass(slots=True, eq=False)
class _Replica:
    """A node of the idealised pipeline."""

    peer: PeerId
    rank: int
    stage: int
    costs: Costs
    slowness: float
    rng: random.Random
    device: JobServer
    up: JobServer | None
    down: JobServer | None
    share: float = 0.0
    """Share of its stage's speed."""
    target: int = 0
    """Microbatches per inner step."""
    begun: int = 0
    """Microbatches started for the current inner step."""
    ended: int = 0
    """Microbatches finished for the current inner step."""
    steps: int = 0
    done: int = 0
    """Microbatches in total."""
    owed: int = 0
    """Microbatches sent to it whose gradients have not come back."""
    waiting: "list[tuple[Priority, int, _Microbatch]]" = field(default_factory=list)
    """Microbatches for a later inner step."""

    @property
    def microbatch_s(self) -> float:
        """Device seconds of one microbatch, forward and backward."""
        return (self.costs.forward_s + self.costs.backward_s) * self.slowness

    def work(self, priority: Priority, seconds: float, ended: Action) -> None:
        """Queue work for its device."""
        spread = self.costs.spread
        noise = math.exp(self.rng.gauss(0.0, spread)) if spread else 1.0
        self.device.submit(priority, seconds * self.slowness * noise, ended)


@dataclass(slots=True, eq=False)
class _Microbatch:
    origin: _Replica
    step: int
    index: int
    began_at: float
    path: list[_Replica] = field(default_factory=list)
    """The replicas that hold it, each after its caller."""

    def priority(self, kind: int) -> Priority:
        """Gradients first, then by the start of the step, then by index."""
        return kind, self.began_at, self.index


class _Pipeline:
    """All replicas and the lines between them."""

    def __init__(self, scenario: Scenario, seed: int, sizes: MessageSizes) -> None:
        self._scenario, self._seed, self._sizes = scenario, seed, sizes
        self._policy: str = scenario.run.routing
        self._geography: Geography = geography_of(scenario, seed)
        self._timeline = Timeline()
        self._numbers = itertools.count()
        self._links: dict[tuple[PeerId, PeerId], tuple[float, JobServer | None]] = {}
        slow = slowness(scenario, seed, ())
        self._stages = [
            [self._replica(stage, rank, costs, slow) for rank in range(scenario.replicas[stage])]
            for stage, costs in enumerate(costs_of(scenario))
        ]
        self._peers = [[replica.peer for replica in stage] for stage in self._stages]
        per_step = scenario.run.microbatches_per_step * scenario.replicas[0]
        self._set_targets(per_step)
        self._steps = min(scenario.run.steps, max(MIN_STEPS, MICROBATCHES // per_step))
        self._done = 0
        """Number of stage-0 replicas that have done these steps."""

    def run(self) -> ThroughputBound:
        """Run until half of stage 0 has done its steps; faster nodes do more of them meanwhile."""
        first = self._stages[0]
        for one in first:
            self._read(one)
        while 2 * self._done < len(first):
            self._timeline.next()
        seconds = self._timeline.now
        if not seconds:
            return ThroughputBound(None, (0.0,) * len(self._stages))
        tokens = sum(one.done for one in first) * self._scenario.tokens_per_microbatch
        shares = [sum(one.device.worked_s for one in stage) / (len(stage) * seconds) for stage in self._stages]
        return ThroughputBound(tokens / seconds, tuple(shares))

    def _set_targets(self, per_step: int) -> None:
        """Share the microbatches of a step within each later stage, evenly or by speed. Stage 0 reads its own."""
        for stage in self._stages:
            total = sum(self._speed(one) for one in stage)
            for one in stage:
                one.share = self._speed(one) / total
                one.target = routing.target(per_step, 1, len(stage))
                if self._policy == "weighted":
                    one.target = max(1, round(per_step * one.share))
        for one in self._stages[0]:
            one.target = self._scenario.run.microbatches_per_step

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def _read(self, origin: _Replica) -> None:
        """Start an inner step of stage 0."""
        for index in range(origin.target):
            self._arrive(origin, _Microbatch(origin, origin.steps, index, self._timeline.now))

    def _arrive(self, replica: _Replica, microbatch: _Microbatch) -> None:
        if replica.begun < replica.target:
            self._forward(replica, microbatch)
        else:
            heapq.heappush(replica.waiting, (microbatch.priority(ACTIVATION), next(self._numbers), microbatch))

    def _forward(self, replica: _Replica, microbatch: _Microbatch) -> None:
        replica.begun += 1
        microbatch.path.append(replica)
        if replica.stage == len(self._stages) - 1:
            seconds = replica.costs.forward_s + replica.costs.backward_s
            replica.work(microbatch.priority(GRADIENT), seconds, lambda: self._end(microbatch))
        else:
            priority = microbatch.priority(ACTIVATION)
            replica.work(priority, replica.costs.forward_s, lambda: self._pass_on(microbatch))

    def _pass_on(self, microbatch: _Microbatch) -> None:
        caller = microbatch.path[-1]
        callee = self._next_hop(caller, microbatch)
        callee.owed += 1
        way = self._way(caller, callee)
        self._send(way, microbatch.priority(ACTIVATION), lambda: self._arrive(callee, microbatch))

    def _end(self, microbatch: _Microbatch) -> None:
        """The gradient is available: send it on, and take the inner step if it was the last one."""
        replica = microbatch.path.pop()
        replica.ended += 1
        replica.done += 1
        if replica.ended == replica.target:
            replica.work((GRADIENT, 0.0, 0), replica.costs.inner_step_s, lambda: self._step(replica))
        if microbatch.path:
            way = self._way(replica, microbatch.path[-1])
            self._send(way, microbatch.priority(GRADIENT), lambda: self._backward(replica, microbatch))

    def _backward(self, callee: _Replica, microbatch: _Microbatch) -> None:
        callee.owed -= 1
        caller = microbatch.path[-1]
        caller.work(microbatch.priority(GRADIENT), caller.costs.backward_s, lambda: self._end(microbatch))

    def _step(self, replica: _Replica) -> None:
        replica.steps += 1
        replica.begun = replica.ended = 0
        if replica.stage == 0:
            self._done += replica.steps == self._steps
            self._read(replica)
        while replica.waiting and replica.begun < replica.target:
            self._forward(replica, heapq.heappop(replica.waiting)[2])

    # --- lines --------------------------------------------------------------------------------------------------------

    def _send(self, way: tuple[float, Sequence[JobServer]], priority: Priority, arrived: Action) -> None:
        """Send over all parts of a path at once: each part starts when the previous one does, or once it is free."""
        latency_s, parts = way
        kind = "activation" if priority[0] == ACTIVATION else "gradient"
        nbytes, left = self._sizes.of(kind, 0), len(parts)

        def part_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                self._timeline.after(latency_s, arrived)

        def enter(part: int) -> None:
            further = (lambda: enter(part + 1)) if part + 1 < len(parts) else None
            parts[part].submit(priority, nbytes, part_ended, further)

        if parts:
            enter(0)
        else:
            self._timeline.after(latency_s, arrived)

    def _way(self, sender: _Replica, receiver: _Replica) -> tuple[float, list[JobServer]]:
        """The latency between two replicas, and the parts that limit the bandwidth."""
        pair = sender.peer, receiver.peer
        if pair not in self._links:
            link, back = self._geography.link(*pair), self._geography.link(*reversed(pair))
            each = connection_bytes_per_s(link, link.latency_s + back.latency_s)
            speed = min(link.bytes_per_s or math.inf, CONNECTIONS * each)
            self._links[pair] = link.latency_s, self._line(None if speed == math.inf else speed)
        latency_s, link_server = self._links[pair]
        return latency_s, [part for part in (sender.up, link_server, receiver.down) if part is not None]

    def _line(self, bytes_per_s: float | None) -> JobServer | None:
        return None if bytes_per_s is None else JobServer(self._timeline, bytes_per_s)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _next_hop(self, caller: _Replica, microbatch: _Microbatch) -> _Replica:
        """The next replica. If the policy leaves the choice, the one of two drawn replicas that would answer first."""
        stage = caller.stage + 1
        replicas, policy = self._stages[stage], self._policy
        if policy == "fixed":
            return replicas[caller.rank % len(replicas)]
        if policy == "balanced":
            origins = len(self._stages[0])
            slot = microbatch.index * origins + microbatch.origin.rank
            owner = routing.balanced_owner(self._seed, stage, microbatch.step, slot, origins, self._peers[stage])
            return replicas[self._peers[stage].index(owner)]
        if policy == "weighted":
            asked = caller.rng.choices(replicas, [one.share for one in replicas], k=ASKED)
        else:
            asked = caller.rng.sample(replicas, min(ASKED, len(replicas)))
        return min(asked, key=lambda callee: self._answer_s(caller, callee))

    def _answer_s(self, caller: _Replica, callee: _Replica) -> float:
        """Estimate how long one more microbatch of the caller takes to the callee and back."""
        there_s, there = self._way(caller, callee)
        back_s, back = self._way(callee, caller)
        activation, gradient = self._sizes.activation_bytes, self._sizes.gradient_bytes
        sent_s = max((part.backlog_s + activation / part.speed for part in there), default=0.0)
        queue_s = max([callee.microbatch_s, *(gradient / part.speed for part in back)]) * callee.owed
        own_s = callee.microbatch_s + max((gradient / part.speed for part in back), default=0.0)
        return there_s + sent_s + queue_s + own_s + back_s

    def _speed(self, replica: _Replica) -> float:
        """Microbatches per second that a replica's device and line allow."""
        sizes, first, last = self._sizes, replica.stage == 0, replica.stage == len(self._stages) - 1
        sent = (0 if last else sizes.activation_bytes) + (0 if first else sizes.gradient_bytes)
        received = (0 if first else sizes.activation_bytes) + (0 if last else sizes.gradient_bytes)
        lines = ((replica.up, sent), (replica.down, received))
        times_s = [replica.microbatch_s, *(nbytes / line.speed for line, nbytes in lines if line is not None)]
        return 1.0 / max(MIN_S, *times_s)

    def _replica(self, stage: int, rank: int, costs: Costs, slow: dict[PeerId, float]) -> _Replica:
        peer = peer_id(stage, rank)
        access, rng = self._geography.access(peer), generator(self._seed, "bound", peer)
        up, down = self._line(access.up_bytes_per_s), self._line(access.down_bytes_per_s)
        return _Replica(peer, rank, stage, costs, slow.get(peer, 1.0), rng, JobServer(self._timeline), up, down)
