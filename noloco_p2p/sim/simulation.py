"""Builds a runnable swarm from a scenario and a seed.

swarm = build(Scenario(), seed=3)
outcome = swarm.run()
"""

from functools import partial

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.block_format import wire_spec
from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.core.messages import ITEM_BYTES
from noloco_p2p.core.outer_rules import state_kinds
from noloco_p2p.core.snapshots import GUARDED_DTYPE
from noloco_p2p.errors import ConfigError
from noloco_p2p.sim.batches import SimBatches
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.fault_plan import planned_faults, slowness
from noloco_p2p.sim.faults import FaultySwarm
from noloco_p2p.sim.links import MEASURED, Access, Geography, Link, MessageSizes, Regions
from noloco_p2p.sim.scenario import Scenario, of_stage
from noloco_p2p.sim.world import SimPlan, peer_id


def build(scenario: Scenario, seed: int) -> FaultySwarm:
    """The swarm of a scenario. Raises ConfigError if the settings contradict each other."""
    faults = planned_faults(scenario, seed)
    newcomers = [peer for fault in faults if fault.kind == "arrive" for peer in fault.peers]
    manifest = manifest_of(scenario, seed)
    for stage, count in enumerate(scenario.replicas):
        ever = count + sum(peer.startswith(peer_id(stage, 0)[:-1]) for peer in newcomers)
        if ever < manifest.start_replicas:
            wanted = f"run.start_replicas: the run begins with {manifest.start_replicas:,} nodes of each stage"
            raise ConfigError(f"{wanted}, but stage {stage} never has more than {ever:,}")
    plan = SimPlan(
        manifest,
        scenario.replicas,
        seed=seed,
        config=NodeConfig.model_validate(scenario.node.model_dump()),
        geography=geography_of(scenario, seed),
        sizes=sizes_of(scenario),
        costs=costs_of(scenario),
        slowness=slowness(scenario, seed, newcomers),
        view_age_s=scenario.network.view_age_s,
        batches_factory=partial(SimBatches, unequal=True),
    )
    return FaultySwarm(plan, faults, limit_s=scenario.limit_s)


def manifest_of(scenario: Scenario, seed: int) -> RunManifest:
    """The manifest of the simulated nodes: that of the scenario's run, but with microbatches of two tokens."""
    run = dict(scenario.run) | {"start_replicas": scenario.run.start_replicas or min(scenario.replicas)}
    stages = len(scenario.replicas)
    return RunManifest(name=scenario.name, seed=seed, stages=stages, sequence_length=2, microbatch_size=1, **run)


def sizes_of(scenario: Scenario) -> MessageSizes:
    """Sizes of the messages in the run being simulated."""
    work, tokens = scenario.workload, scenario.tokens_per_microbatch
    shape_BTD = (work.microbatch_size, work.sequence_length, work.hidden_size)
    number_bytes = ITEM_BYTES[work.compute_dtype]
    rule = scenario.run.outer.update
    counts = [int(of_stage(work.parameters_per_stage, stage)) for stage in range(len(scenario.replicas))]
    return MessageSizes(
        activation_bytes=wire_spec("hidden", work.wire.forward, shape_BTD).nbytes + tokens * ITEM_BYTES["int32"],
        gradient_bytes=wire_spec("grad", work.wire.backward, shape_BTD).nbytes,
        snapshot_bytes=tuple(scenario.run.outer.vector_bytes(count, work.compute_dtype) for count in counts),
        weights_bytes=tuple(ITEM_BYTES[GUARDED_DTYPE] * count for count in counts),
        state_bytes=tuple(len(state_kinds(rule)) * number_bytes * count for count in counts),
        control=MEASURED,
    )


def costs_of(scenario: Scenario) -> tuple[Costs, ...]:
    """Device seconds of each stage."""
    compute = scenario.compute
    each = (compute.forward_s, compute.backward_s, compute.inner_step_s, compute.outer_s, compute.spread)
    return tuple(Costs(*(of_stage(value, stage) for value in each)) for stage in range(len(scenario.replicas)))


def geography_of(scenario: Scenario, seed: int) -> Geography:
    """How the nodes are connected."""
    net, limits = scenario.network, scenario.node.limits
    regions = None
    if net.regions.names:
        speeds = tuple(tuple(speed * BYTES_PER_MBIT for speed in row) for row in net.regions.mbit_per_s) or None
        regions = Regions(net.regions.round_trip_ms, speeds)
    link = Link(
        net.link.latency_s,
        net.spread,
        _bytes(net.link.mbit_per_s),
        request_loss=net.call_loss,
        reply_loss=net.call_loss,
        loss=net.loss,
        slow_start_after_idle=net.slow_start_after_idle,
        window_bytes=_bytes(net.window_mbit),
    )
    access = Access(_bytes(net.access.up_mbit_per_s), _bytes(net.access.down_mbit_per_s))
    cap = Access(_bytes(limits.upload_mbit_per_s), _bytes(limits.download_mbit_per_s))
    return Geography(link, access, regions, net.access.spread, seed, cap)


def _bytes(mbit: float | None) -> float | None:
    return None if mbit is None else mbit * BYTES_PER_MBIT
