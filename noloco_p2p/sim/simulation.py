"""From a scenario and a seed to a swarm that runs.

simulation = build(Scenario(), seed=3)
outcome = simulation.run()
"""

from dataclasses import dataclass, replace

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.messages import REPLICA_KINDS, PeerId
from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.faults import Fault, FaultySwarm
from noloco_p2p.sim.geography import Drawn, Regions
from noloco_p2p.sim.links import Access, Geography, Link, Sizes, Uniform
from noloco_p2p.sim.outcome import Outcome
from noloco_p2p.sim.population import faults, slowness
from noloco_p2p.sim.scenario import Scenario, of_stage
from noloco_p2p.sim.stage import Costs
from noloco_p2p.sim.world import SwarmPlan, peer_id

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
TOKEN_BYTES = 4
"""A target on the wire."""
BYTES_PER_MEGABIT = 1e6 / 8


class Simulation(FaultySwarm):
    """The swarm of one scenario and seed. Used once."""

    def __init__(self, scenario: Scenario, plan: SwarmPlan, hurts: tuple[Fault, ...]) -> None:
        self.scenario = scenario
        self.tokens_per_microbatch = scenario.tokens_per_microbatch
        super().__init__(plan, hurts, limit_s=scenario.limit_s)

    def run(self, limit_s: float | None = None, *, tolerate: bool = False) -> Outcome:
        """Run it to its end, by default within the scenario's own limit. Raises as `Swarm.run`."""
        return super().run(self.bounds.limit_s if limit_s is None else limit_s, tolerate=tolerate)


def build(scenario: Scenario, seed: int, nodes: int | None = None) -> Simulation:
    """The swarm, with so many nodes in all where that is said. Raises ConfigError for what does not go together."""
    if nodes is not None:
        try:
            scenario = scenario.of_nodes(nodes)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    hurts = faults(scenario, seed)
    newcomers = [peer for fault in hurts if fault.kind == "arrive" for peer in fault.peers]
    there = [peer_id(stage, i) for stage, count in enumerate(scenario.replicas) for i in range(count)]
    plan = SwarmPlan(
        manifest_of(scenario, seed),
        scenario.replicas,
        seed=seed,
        config=NodeConfig.model_validate(scenario.node.model_dump()),
        geography=geography_of(scenario, seed),
        sizes=sizes_of(scenario),
        costs=costs_of(scenario),
        slowness=slowness(scenario, seed, [*there, *newcomers]),
        view_age_s=scenario.network.view_age_s,
        unequal_batches=True,
    )
    return Simulation(scenario, plan, hurts)


def manifest_of(scenario: Scenario, seed: int) -> RunManifest:
    """What the nodes see: the run, with microbatches of two tokens."""
    run = scenario.run
    return RunManifest(
        name=scenario.name,
        seed=seed,
        stages=len(scenario.replicas),
        start_replicas=run.start_replicas or min(scenario.replicas),
        sequence_length=2,
        microbatch_size=1,
        microbatches_per_step=run.microbatches_per_step,
        steps=run.steps,
        inner=run.inner,
        outer=run.outer,
        routing=run.routing,
        evaluation=run.evaluation,
    )


def sizes_of(scenario: Scenario) -> Sizes:
    """What the messages of the run that is simulated weigh."""
    work = scenario.workload
    tokens = work.microbatch_size * work.sequence_length
    hidden_bytes = tokens * work.hidden_size * NUMBER_BYTES[work.wire_dtype]
    number_bytes = NUMBER_BYTES[work.compute_dtype]
    counts = [int(of_stage(work.parameters_per_stage, stage)) for stage in range(len(scenario.replicas))]
    return Sizes(
        activation_bytes=hidden_bytes + tokens * TOKEN_BYTES,
        gradient_bytes=hidden_bytes,
        snapshot_bytes=tuple(2 * number_bytes * count for count in counts),
        state_bytes=tuple(len(REPLICA_KINDS) * number_bytes * count for count in counts),
    )


def costs_of(scenario: Scenario) -> tuple[Costs, ...]:
    """Device seconds of every stage."""
    c = scenario.compute
    return tuple(
        Costs(
            of_stage(c.forward_s, stage),
            of_stage(c.backward_s, stage),
            of_stage(c.inner_step_s, stage),
            of_stage(c.outer_s, stage),
            c.spread,
        )
        for stage in range(len(scenario.replicas))
    )


def geography_of(scenario: Scenario, seed: int) -> Geography:
    """Who is connected how."""
    net = scenario.network
    regions, access = net.regions, _access(net.access.up_mbit_per_s, net.access.down_mbit_per_s)
    if regions.names:
        speeds = tuple(tuple(speed * BYTES_PER_MEGABIT for speed in row) for row in regions.mbit_per_s) or None
        found: Geography = Regions(regions.names, regions.round_trip_ms, speeds, net.spread, net.loss, each=access)
    else:
        found = Uniform(Link(net.link.latency_s, net.spread, _bytes(net.link.mbit_per_s), loss=net.loss), access)
    if net.access.spread:
        found = Drawn(found, access, net.access.spread, seed)
    return LosesCalls(found, net.call_loss) if net.call_loss else found


@dataclass(frozen=True, slots=True)
class LosesCalls:
    """The Geography in which whole calls and answers vanish, each with this chance."""

    within: Geography
    chance: float

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """See `Geography`."""
        return replace(self.within.link(sender, receiver), request_loss=self.chance, reply_loss=self.chance)

    def access(self, peer: PeerId) -> Access:
        """See `Geography`."""
        return self.within.access(peer)


def _access(up_mbit_per_s: float | None, down_mbit_per_s: float | None) -> Access:
    return Access(_bytes(up_mbit_per_s), _bytes(down_mbit_per_s))


def _bytes(mbit_per_s: float | None) -> float | None:
    return None if mbit_per_s is None else mbit_per_s * BYTES_PER_MEGABIT
