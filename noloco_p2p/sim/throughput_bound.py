"""The throughput that a scenario's links and devices allow, from an idealised pipeline without nodes or a protocol.

Devices and lines are servers that do one job at a time: gradients first or activations first, whichever is better, then
the oldest microbatch. Every microbatch is a nested call and travels once, nobody waits for a grant, and as many are in
flight as a step has. A replica takes its inner step when everything that it started for that step has ended; at stage 0
it then reads the next microbatches. Left out are jitter, retransmissions, control messages, outer rounds, guardians,
evaluation, faults and churn: the difference from a simulated swarm shows what they cost. See ARCHITECTURE.md, "The
simulator".

It is not a proven upper limit, because neither order is always the best. None of 270 random swarms of 20 to 25 steps
with constant times exceeded it. It does not cover shorter runs, in which the first and the last step count for much,
nor luck: under `compute.spread` it draws times of its own, and so it does routes. Under `balanced` it does not cover
fallbacks: of 40 swarms of homes (`consumer.yaml`, 20 steps) one reached 1.24 of it, because the others served what a
replica with a quarter of the usual line did not serve in time.
"""

import itertools
import math
import random
from dataclasses import dataclass, field
from functools import cache

from noloco_p2p.core import routing
from noloco_p2p.core.line_rate import CONNECTIONS
from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.fault_plan import slowness
from noloco_p2p.sim.job_server import Action, JobServer, Priority, Timeline, carry
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
"""What moves on a line. On a device they stand for backward and forward passes."""


@dataclass(frozen=True, slots=True)
class ThroughputBound:
    """The throughput of an idealised pipeline."""

    tokens_per_s: float | None
    """None if nothing takes any time."""
    utilisation: tuple[float, ...]
    """Share of time in which the devices of each stage work."""


def throughput_bound(scenario: Scenario, seed: int, sizes: MessageSizes | None = None) -> ThroughputBound:
    """The bound for one seed, which draws the nodes' speeds, lines and routes. `sizes`: by default the scenario's."""
    ways = itertools.product((GRADIENT, ACTIVATION), {False, scenario.run.routing in routing.FREE})
    runs = [_Pipeline(scenario, seed, sizes or sizes_of(scenario), *way).run() for way in ways]
    none = ThroughputBound(None, (0.0,) * len(scenario.replicas))
    return max(itertools.chain(*runs), key=lambda one: one.tokens_per_s or 0.0, default=none)


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
    up: JobServer
    down: JobServer
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
    waiting: "list[_Microbatch]" = field(default_factory=list)
    """Microbatches for a later inner step."""

    @property
    def microbatch_s(self) -> float:
        """Device seconds of one microbatch, forward and backward."""
        return (self.costs.forward_s + self.costs.backward_s) * self.slowness

    def work(self, priority: Priority, seconds: float, ended: Action) -> None:
        """Queue work for its device."""
        noise = math.exp(self.rng.gauss(0.0, self.costs.spread)) if self.costs.spread else 1.0
        self.device.submit(priority, seconds * self.slowness * noise, ended)


@dataclass(slots=True, eq=False)
class _Microbatch:
    origin: _Replica
    step: int
    index: int
    began_at: float
    path: list[_Replica] = field(default_factory=list)
    """The replicas that hold it, each after its caller."""


class _Pipeline:
    """All replicas and the lines between them."""

    def __init__(self, scenario: Scenario, seed: int, sizes: MessageSizes, first: int, places: bool) -> None:
        """`first`: the kind that goes first; `places`: whether replicas with a free place are preferred."""
        self._first, self._places = first, places
        self._scenario, self._seed, self._sizes = scenario, seed, sizes
        self._policy: str = scenario.run.routing
        self._geography: Geography = geography_of(scenario, seed)
        self._timeline = Timeline()
        self._way = cache(self._new_way)
        slow = slowness(scenario, seed, ())
        self._stages = [
            [self._replica(stage, rank, costs, slow) for rank in range(scenario.replicas[stage])]
            for stage, costs in enumerate(costs_of(scenario))
        ]
        self._owners = cache(self._slot_owners)
        for stage in self._stages:
            total = sum(map(self._speed, stage))
            for one in stage:
                one.share = self._speed(one) / total
                self._set_target(one)
        self._moments: list[ThroughputBound] = []
        per_step = scenario.run.microbatches_per_step * scenario.replicas[0]
        self._steps = min(scenario.run.steps, max(MIN_STEPS, MICROBATCHES // per_step))
        self._done = 0
        """Number of stage-0 replicas that have done these steps."""

    def run(self) -> list[ThroughputBound]:
        """Run until half of stage 0 has done its steps, while faster nodes do more of them; then end those under way.

        Returns the figures at each moment from then on at which a node of stage 0 ends a step. The best counts: at
        first, much of what the pipeline holds is nearly done but counts for nothing, and later less and less is in it.
        """
        for one in self._stages[0]:
            self._read(one)
        self._timeline.run()
        return self._moments

    def _note(self) -> None:
        """Keep the figures of this moment."""
        if seconds := self._timeline.now:
            tokens = sum(one.done for one in self._stages[0]) * self._scenario.tokens_per_microbatch
            shares = [sum(one.device.worked_s for one in stage) / (len(stage) * seconds) for stage in self._stages]
            self._moments.append(ThroughputBound(tokens / seconds, tuple(shares)))

    def _set_target(self, replica: _Replica) -> None:
        """Set how many microbatches its next step takes. Under `balanced`, steps without a slot of it are left out."""
        count, origins = self._scenario.run.microbatches_per_step, len(self._stages[0])
        share = replica.share if self._policy == "weighted" and replica.stage else None
        replica.target = routing.target(count, origins, len(self._stages[replica.stage]), share)
        if self._policy == "balanced" and replica.stage:
            while not (due := self._owners(replica.stage, replica.steps).count(replica)):
                replica.steps += 1
            replica.target = due

    def _slot_owners(self, stage: int, step: int) -> list[_Replica]:
        """Under `balanced`: the replica of each slot of a step."""
        replicas, origins = {one.peer: one for one in self._stages[stage]}, len(self._stages[0])
        slots = range(self._scenario.run.microbatches_per_step * origins)
        return [replicas[routing.balanced_owner(self._seed, stage, step, slot, origins, [*replicas])] for slot in slots]

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def _read(self, origin: _Replica) -> None:
        """Start an inner step of stage 0."""
        for index in range(origin.target):
            self._arrive(origin, _Microbatch(origin, origin.steps, index, self._timeline.now))

    def _arrive(self, replica: _Replica, microbatch: _Microbatch) -> None:
        if replica.begun < replica.target and (self._policy != "balanced" or microbatch.step <= replica.steps):
            self._forward(replica, microbatch)
        else:
            replica.waiting.append(microbatch)

    def _forward(self, replica: _Replica, microbatch: _Microbatch) -> None:
        replica.begun += 1
        microbatch.path.append(replica)
        if replica.stage == len(self._stages) - 1:
            seconds = replica.costs.forward_s + replica.costs.backward_s
            replica.work(self._priority(microbatch, GRADIENT), seconds, lambda: self._end(microbatch))
        else:
            seconds = replica.costs.forward_s
            replica.work(self._priority(microbatch, ACTIVATION), seconds, lambda: self._pass_on(microbatch))

    def _pass_on(self, microbatch: _Microbatch) -> None:
        caller = microbatch.path[-1]
        callee = self._next_hop(caller, microbatch)
        callee.owed += 1
        self._send((caller, callee), microbatch, ACTIVATION, lambda: self._arrive(callee, microbatch))

    def _end(self, microbatch: _Microbatch) -> None:
        """The gradient is available: send it on, and take the inner step if it was the last one."""
        replica = microbatch.path.pop()
        replica.ended += 1
        replica.done += 1
        if replica.ended == replica.target:
            replica.work((GRADIENT, 0.0, 0), replica.costs.inner_step_s, lambda: self._step(replica))
        if microbatch.path:
            self._send((replica, microbatch.path[-1]), microbatch, GRADIENT, lambda: self._return(replica, microbatch))

    def _return(self, callee: _Replica, microbatch: _Microbatch) -> None:
        callee.owed -= 1
        caller = microbatch.path[-1]
        caller.work(self._priority(microbatch, GRADIENT), caller.costs.backward_s, lambda: self._end(microbatch))

    def _step(self, replica: _Replica) -> None:
        replica.steps += 1
        replica.begun = replica.ended = 0
        self._set_target(replica)
        if replica.stage == 0:
            self._done += replica.steps == self._steps
            if 2 * self._done < len(self._stages[0]):
                self._read(replica)
            else:
                self._note()
        waiting, replica.waiting = replica.waiting, []
        for microbatch in sorted(waiting, key=lambda one: (one.began_at, one.index)):
            self._arrive(replica, microbatch)

    # --- lines --------------------------------------------------------------------------------------------------------

    def _priority(self, microbatch: _Microbatch, kind: int) -> Priority:
        """By kind, then by the start of the step, then by index."""
        return kind != self._first, microbatch.began_at, microbatch.index

    def _send(self, ends: tuple[_Replica, _Replica], microbatch: _Microbatch, kind: int, arrived: Action) -> None:
        latency_s, parts = self._way(*ends)
        nbytes = self._sizes.of(("gradient", "activation")[kind], 0)
        carry(parts, self._priority(microbatch, kind), nbytes, lambda: self._timeline.after(latency_s, arrived))

    def _new_way(self, sender: _Replica, receiver: _Replica) -> tuple[float, tuple[JobServer, ...]]:
        """The latency between two replicas, and the parts of the path."""
        link, back = (self._geography.link(a.peer, b.peer) for a, b in ((sender, receiver), (receiver, sender)))
        each = connection_bytes_per_s(link, link.latency_s + back.latency_s)
        line = JobServer(self._timeline, min(link.bytes_per_s or math.inf, CONNECTIONS * each))
        return link.latency_s, (sender.up, line, receiver.down)

    # --- routes -------------------------------------------------------------------------------------------------------

    def _next_hop(self, caller: _Replica, microbatch: _Microbatch) -> _Replica:
        """The next replica. If the policy leaves the choice, the one of two drawn replicas that would answer first."""
        stage = caller.stage + 1
        replicas, policy = self._stages[stage], self._policy
        if policy == "fixed":
            return replicas[caller.rank % len(replicas)]
        if policy == "balanced":
            slot = microbatch.index * len(self._stages[0]) + microbatch.origin.rank
            return self._owners(stage, microbatch.step)[slot]
        if policy == "weighted" and not self._places:
            asked = caller.rng.choices(replicas, [one.share for one in replicas], k=ASKED)
        else:
            asked = caller.rng.sample(replicas, min(ASKED, len(replicas)))
        return min(asked, key=lambda callee: self._answer(caller, callee))

    def _answer(self, caller: _Replica, callee: _Replica) -> tuple[bool, float]:
        """Whether the callee's step is full, if that counts, and about how long one more microbatch takes there and
        back."""
        there_s, there = self._way(caller, callee)
        back_s, back = self._way(callee, caller)
        sent_s = max(part.backlog_s + self._sizes.activation_bytes / part.speed for part in there)
        reply_s = max(self._sizes.gradient_bytes / part.speed for part in back)
        queue_s = max(callee.microbatch_s, reply_s) * callee.owed
        full = self._places and callee.owed + callee.ended >= callee.target
        return full, there_s + sent_s + queue_s + callee.microbatch_s + reply_s + back_s

    def _speed(self, replica: _Replica) -> float:
        """Microbatches per second that a replica's device and line allow."""
        sizes, first, last = self._sizes, replica.stage == 0, replica.stage == len(self._stages) - 1
        sent = (0 if last else sizes.activation_bytes) + (0 if first else sizes.gradient_bytes)
        received = (0 if first else sizes.activation_bytes) + (0 if last else sizes.gradient_bytes)
        return 1.0 / max(MIN_S, replica.microbatch_s, sent / replica.up.speed, received / replica.down.speed)

    def _replica(self, stage: int, rank: int, costs: Costs, slow: dict[PeerId, float]) -> _Replica:
        peer = peer_id(stage, rank)
        access, rng = self._geography.access(peer), generator(self._seed, "bound", peer)
        lines = access.up_bytes_per_s, access.down_bytes_per_s
        up, down = (JobServer(self._timeline, bytes_per_s or math.inf) for bytes_per_s in lines)
        return _Replica(peer, rank, stage, costs, slow.get(peer, 1.0), rng, JobServer(self._timeline), up, down)
