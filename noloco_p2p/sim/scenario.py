"""The settings of a simulated swarm, as they are in a file of `configs/sim/`.

Every field has a sentence and a unit, and the default scenario is the one of `configs/sim/lan.yaml`. Here are only the
values and their checks: files are read in `lab/scenario_files.py`, the swarm is built in `sim/simulation.py`.
Rates are per node, so that a scenario means the same with any number of nodes.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from noloco_p2p.config import (
    CheckpointSettings,
    DirectorySettings,
    EvaluationSettings,
    InnerSettings,
    LimitSettings,
    OuterSettings,
    Positive,
    Seconds,
    Settings,
    WireSettings,
)
from noloco_p2p.errors import ConfigError

FaultKind = Literal[
    "crash", "bounce", "wipe", "hang", "mute", "cut", "one_way", "split", "slow", "pause", "leave", "arrive", "depart"
]

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Chance = Annotated[float, Field(ge=0, le=1)]
PerStage = NotNegative | tuple[NotNegative, ...]
"""One value for all stages, or one for each."""
Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunSettings(Settings):
    """The run: keys of the manifest, with the same meaning. The stages follow from `replicas`."""

    start_replicas: Positive | None = None
    """Replicas that every stage must have before any takes step 1; none: as many as the smallest stage has."""
    microbatches_per_step: Positive = 4
    """Microbatches that each stage-0 replica reads per inner step."""
    steps: Positive = 60
    """Length of the run in steps of the clock."""
    inner: InnerSettings = InnerSettings()
    """The inner optimizer."""
    outer: OuterSettings = OuterSettings(rule="noloco", inner_steps=20)
    """The outer round."""
    routing: Literal["random", "weighted", "balanced", "fixed"] = "random"
    """How the next replica of a microbatch is chosen."""
    evaluation: EvaluationSettings = EvaluationSettings(every_steps=None, microbatches=2)
    """Validation."""


class LocalSettings(Settings):
    """Every node's own settings, with the same keys and meaning as a real node's."""

    directory: DirectorySettings = DirectorySettings()
    """The membership."""
    limits: LimitSettings = LimitSettings()
    """Bounds on what a node holds and how long it waits."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    rebalance: bool = True
    """Move to another stage while training when that one holds the swarm back."""


class WorkloadSettings(Settings):
    """How much the model of the run that is simulated weighs. The nodes here hold two weights and a few tokens."""

    microbatch_size: Positive = 8
    """B: samples of a microbatch."""
    sequence_length: Positive = 1024
    """T: tokens of a sample."""
    hidden_size: Positive = 2048
    """D: numbers per token that travel between two stages."""
    wire: WireSettings = WireSettings(forward="bfloat16", backward="bfloat16")
    """Hidden states and gradients on the wire."""
    compute_dtype: Literal["float64", "float32"] = "float32"
    """Element type of weights and snapshots."""
    parameters_per_stage: Positive | tuple[Positive, ...] = 300_000_000
    """Parameters of a stage; one number, or one for each stage."""


class ComputeSettings(Settings):
    """Device seconds of each operation; one number, or one for each stage."""

    forward_s: PerStage = 0.2
    """Forward of one microbatch, seconds; the last stage's loss is part of it."""
    backward_s: PerStage = 0.4
    """Backward of one microbatch, seconds."""
    inner_step_s: PerStage = 0.05
    """The optimizer's step, seconds."""
    outer_s: PerStage = 0.2
    """Freezing a snapshot, or merging one, seconds."""
    measured: str | None = None
    """JSON of `noloco bench stage --json`, by its path from this file, from which the four above are taken, but
    for those that are set after it."""
    spread: NotNegative = 0.0
    """Sigma of the log-normal factor of each operation; 0: constant."""
    node_spread: NotNegative = 0.0
    """Sigma of the log-normal factor of each node's own speed, drawn once; 0: all alike."""


class LinkSettings(Settings):
    """The link between two nodes, where there are no regions."""

    latency_s: NotNegative = 0.0002
    """Median time one way, seconds."""
    mbit_per_s: Above | None = None
    """Bandwidth of one pair of nodes, one way, megabits per second; none: no limit."""


class RegionSettings(Settings):
    """Places in the world; nodes are in them in turn, so that every stage has nodes in each."""

    names: tuple[str, ...] = ()
    """Names of the regions; none: there are no regions."""
    round_trip_ms: tuple[tuple[Above, ...], ...] = ()
    """A row for each region: median round trip to each region, milliseconds."""
    mbit_per_s: tuple[tuple[Above, ...], ...] = ()
    """A row for each region: bandwidth of one pair of nodes to each region, megabits per second; none: no limit."""


class AccessSettings(Settings):
    """How a node is connected to all others: all its concurrent transfers share it."""

    up_mbit_per_s: Above | None = 10_000.0
    """Away from the node, megabits per second (median over the nodes); none: no limit."""
    down_mbit_per_s: Above | None = 10_000.0
    """Towards the node, megabits per second (median over the nodes); none: no limit."""
    spread: NotNegative = 0.0
    """Sigma of the log-normal factor on both, drawn once for each node; 0: all alike."""


class NetworkSettings(Settings):
    """The network between the nodes."""

    link: LinkSettings = LinkSettings()
    """Between two nodes, where there are no regions."""
    regions: RegionSettings = RegionSettings()
    """Places in the world."""
    access: AccessSettings = AccessSettings()
    """A node's own connection."""
    spread: NotNegative = 0.0
    """Sigma of the log-normal factor on each latency (jitter); 0: constant."""
    loss: Chance = 0.0
    """Chance that a packet is lost and sent again, which costs time and bandwidth."""
    slow_start_after_idle: bool = True
    """Connections that have rested start slowly, as on Linux unless `net.ipv4.tcp_slow_start_after_idle` is 0."""
    window_mbit: Above | None = None
    """What one connection has under way at most, megabits: its rate is this in each round trip; none: no limit."""
    call_loss: Chance = 0.0
    """Chance that a call or its answer never arrives."""
    view_age_s: NotNegative = 0.0
    """How old every view of the membership is, seconds."""


class FaultSettings(Settings):
    """Something that is done to some nodes at a given time."""

    at_s: NotNegative
    """When, virtual seconds."""
    kind: FaultKind
    """`crash` for good; `bounce`: crash and come back; `wipe`: come back without its disk; `hang`: alive, all its
    messages are swallowed, the directory's too; `mute`: only its calls are; `cut`: nothing between each two of the
    nodes; `one_way`: nothing from the first to the others; `split`: nothing between these nodes and the rest; `slow`:
    `factor` times the device seconds; `pause`; `leave`: told to leave, starts again afterwards; `depart`: told to
    leave; `arrive`: a new node, by an id of its own."""
    peers: tuple[str, ...] = ()
    """Nodes by their ids: `s1r0` is replica 0 of stage 1."""
    region: str | None = None
    """All nodes of a region instead."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Or this part of every stage's nodes, drawn from the seed; at least one node in all."""
    for_s: NotNegative = 0.0
    """How long it lasts, seconds."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    """Of `slow`: how many times the plain device seconds."""


class ChurnSettings(Settings):
    """Nodes that come and go, and faults that are drawn from the seed: events per node and hour."""

    from_s: NotNegative = 10.0
    """Nothing is drawn before this time, seconds; the swarm must have begun to train."""
    arrivals_per_hour: NotNegative = 0.0
    """New nodes, for each node that there was at the beginning; each holds a stage drawn from the seed."""
    departures_per_hour: NotNegative = 0.0
    """Nodes told to leave for good; a stage keeps one replica."""
    crashes_per_hour: NotNegative = 0.0
    """Nodes that crash; a stage keeps one replica that does not."""
    down_s: NotNegative | None = 60.0
    """Seconds until a crashed node comes back with its disk, on average (exponential); none: it never does."""
    faults_per_hour: NotNegative = 0.0
    """Other faults, of `kinds`."""
    kinds: tuple[FaultKind, ...] = ("bounce", "wipe", "hang", "mute", "cut", "pause", "leave", "slow")
    """What those are, each as likely."""
    fault_s: Seconds = 20.0
    """How long those last on average, seconds (exponential)."""


class Scenario(Settings):
    """A swarm, its network, and what happens to it. With a seed, everything follows from it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "lan"
    """Its name, for people."""
    description: str = "One room: a switch of 10 Gbit/s, equal machines, nothing goes wrong."
    """What it is like, in a sentence."""
    replicas: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4, 4)
    """Nodes of each stage at the beginning."""
    run: RunSettings = RunSettings()
    """The run."""
    node: LocalSettings = LocalSettings()
    """Every node's own settings."""
    workload: WorkloadSettings = WorkloadSettings()
    """What the messages weigh."""
    compute: ComputeSettings = ComputeSettings()
    """What the operations cost."""
    network: NetworkSettings = NetworkSettings()
    """The links."""
    churn: ChurnSettings = ChurnSettings()
    """The nodes that come and go."""
    faults: tuple[FaultSettings, ...] = ()
    """What is done to which nodes, and when."""
    limit_s: Seconds = 36_000.0
    """Virtual seconds in which the run must have ended."""

    @model_validator(mode="after")
    def _check(self) -> "Scenario":
        stages, regions = len(self.replicas), self.network.regions
        self.run.outer.check_known()
        for name in ("forward_s", "backward_s", "inner_step_s", "outer_s"):
            _check_length(f"compute.{name}", getattr(self.compute, name), stages)
        _check_length("workload.parameters_per_stage", self.workload.parameters_per_stage, stages)
        count = len(regions.names)
        if len({*regions.names}) < count:
            raise ValueError(f"network.regions.names must be different names, not {list(regions.names)}")
        for name, matrix in (("round_trip_ms", regions.round_trip_ms), ("mbit_per_s", regions.mbit_per_s)):
            wanted = name == "round_trip_ms" or bool(matrix)
            if wanted and (len(matrix) != count or any(len(row) != count for row in matrix)):
                raise ValueError(
                    f"network.regions.{name} must have {count} rows of {count} numbers, one for each region"
                )
        for fault in self.faults:
            if sum((bool(fault.peers), fault.region is not None, fault.share is not None)) != 1:
                raise ValueError(f"a fault ({fault.kind} at {fault.at_s:g} s) needs one of peers, region and share")
            if fault.region is not None and fault.region not in regions.names:
                raise ValueError(f"a fault is in the region {fault.region!r}, which is none of {list(regions.names)}")
        return self

    @property
    def tokens_per_microbatch(self) -> int:
        """Of the run that is simulated."""
        return self.workload.microbatch_size * self.workload.sequence_length

    def of_nodes(self, nodes: int) -> "Scenario":
        """The same with `nodes` nodes in all, shared out in proportion. Raises ConfigError when a stage gets none."""
        return self.model_copy(update={"replicas": shared_out(nodes, self.replicas)})


def shared_out(nodes: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Shares `nodes` nodes out over stages in proportion to `replicas`, at least one each; the rest to the first ones.

    Raises ConfigError when there are fewer nodes than stages.
    """
    if nodes < len(replicas):
        raise ConfigError(f"{nodes} nodes are too few for {len(replicas)} stages")
    total = sum(replicas)
    shares = [max(1, nodes * count // total) for count in replicas]
    for stage in sorted(range(len(shares)), key=lambda s: shares[s] - nodes * replicas[s] / total):
        if sum(shares) < nodes:
            shares[stage] += 1
    while sum(shares) > nodes:
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


def of_stage(value: float | tuple[float, ...], stage: int) -> float:
    """A stage's value of one for all, or one for each."""
    return value[stage] if isinstance(value, tuple) else value


def _check_length(name: str, value: object, stages: int) -> None:
    if isinstance(value, tuple) and len(value) != stages:
        raise ValueError(f"{name} must be one number or {stages} of them, one for each stage")
