"""The settings of a simulated swarm, as written in the files of `configs/sim/`.

Every field has a description and a unit. The defaults are the scenario in `configs/sim/lan.yaml`. This module contains
only the values and their validation: `lab/scenario_files.py` reads the files, and `sim/simulation.py` builds the swarm.
Rates are per node, so a scenario means the same for any number of nodes.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from noloco_p2p import config
from noloco_p2p.config import Positive, Seconds, Settings
from noloco_p2p.config.manifest import MAX_REPLICAS
from noloco_p2p.errors import ConfigError
from noloco_p2p.humanize import plural

FaultKind = Literal[
    "crash", "bounce", "wipe", "hang", "mute", "cut", "one_way", "split", "slow", "pause", "leave", "arrive", "depart"
]

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sigma = Annotated[float, Field(ge=0, le=10)]
"""Of a log-normal factor; with more, factors would be larger than any float."""
Probability = Annotated[float, Field(ge=0, le=1)]
MAX_MICROBATCHES = 10_000
"""Upper limit on the microbatches that a node reads per step: the simulator holds all of them in memory."""
PerStage = NonNegative | tuple[NonNegative, ...]
"""One value for all stages, or one per stage."""
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunSettings(Settings):
    """The run: manifest keys with the same meaning. The number of stages follows from `replicas`."""

    start_replicas: Positive | None = None
    """Replicas that every stage needs before the run begins; none: as many as the smallest stage has."""
    microbatches_per_step: Annotated[int, Field(ge=1, le=MAX_MICROBATCHES)] = 4
    """Microbatches that each stage-0 replica reads per inner step."""
    steps: Positive = 60
    """Length of the run, in steps of the clock."""
    inner: config.InnerSettings = config.InnerSettings()
    """The inner optimizer."""
    outer: config.OuterSettings = config.OuterSettings(rule="noloco", inner_steps=20)
    """The outer round."""
    routing: Literal["random", "weighted", "balanced", "fixed"] = "random"
    """How the next replica of a microbatch is chosen."""
    evaluation: config.EvaluationSettings = config.EvaluationSettings(every_steps=None, microbatches=2)
    """Validation."""


class LocalSettings(Settings):
    """Each node's own settings, with the same keys and meaning as for a real node."""

    directory: config.DirectorySettings = config.DirectorySettings()
    """The membership."""
    limits: config.LimitSettings = config.LimitSettings()
    """Limits on what a node holds and how long it waits."""
    checkpoint: config.CheckpointSettings = config.CheckpointSettings()
    """Checkpoints."""
    rebalance: bool = True
    """Let nodes move to another stage during training if that stage limits the swarm."""


class WorkloadSettings(Settings):
    """Sizes in the run being simulated. The simulator's own nodes hold two weights and a few tokens."""

    microbatch_size: Positive = 8
    """B: samples per microbatch."""
    sequence_length: Positive = 1024
    """T: tokens per sample."""
    hidden_size: Positive = 2048
    """D: values per token sent between two stages."""
    wire: config.WireSettings = config.WireSettings(forward="bfloat16", backward="bfloat16")
    """Hidden states and gradients on the wire."""
    compute_dtype: Literal["float64", "float32"] = "float32"
    """Element type of weights and snapshots."""
    parameters_per_stage: Positive | tuple[Positive, ...] = 300_000_000
    """Parameters of a stage; one number, or one per stage."""


class ComputeSettings(Settings):
    """Device seconds per operation: one number, or one per stage."""

    forward_s: PerStage = 0.2
    """Forward pass of one microbatch, seconds; in the last stage it includes the loss."""
    backward_s: PerStage = 0.4
    """Backward pass of one microbatch, seconds."""
    inner_step_s: PerStage = 0.05
    """Optimizer step, seconds."""
    outer_s: PerStage = 0.2
    """Freezing a snapshot, or merging one, seconds."""
    measured: str | None = None
    """Path of a JSON file written by `noloco bench stage --json`, relative to this file. It provides the four values
    above, except for those that are set after it."""
    spread: Sigma = 0.0
    """Sigma of the log-normal factor on each operation; 0: constant."""
    node_spread: Sigma = 0.0
    """Sigma of the log-normal factor on each node's speed, drawn once; 0: all alike."""


class LinkSettings(Settings):
    """The link between two nodes if there are no regions."""

    latency_s: NonNegative = 0.0002
    """Median one-way latency, seconds."""
    mbit_per_s: AboveZero | None = None
    """Bandwidth between two nodes in one direction, megabits per second; none: no limit."""


class RegionSettings(Settings):
    """Regions of the world. The nodes of each stage are assigned to them in turn."""

    names: tuple[str, ...] = ()
    """Names of the regions; none: there are no regions."""
    round_trip_ms: tuple[tuple[AboveZero, ...], ...] = ()
    """One row per region: median round trip to a node in each region, milliseconds."""
    mbit_per_s: tuple[tuple[AboveZero, ...], ...] = ()
    """One row per region: bandwidth from a node there to one in each region, megabits per second; empty: no limit."""


class AccessSettings(Settings):
    """A node's access line. All its concurrent transfers share it."""

    up_mbit_per_s: AboveZero | None = 10_000.0
    """Upload, megabits per second (median over the nodes); none: no limit."""
    down_mbit_per_s: AboveZero | None = 10_000.0
    """Download, megabits per second (median over the nodes); none: no limit."""
    spread: Sigma = 0.0
    """Sigma of the log-normal factor on both directions, drawn once per node; 0: all alike."""


class NetworkSettings(Settings):
    """The network between the nodes."""

    link: LinkSettings = LinkSettings()
    """The link between two nodes if there are no regions."""
    regions: RegionSettings = RegionSettings()
    """The regions."""
    access: AccessSettings = AccessSettings()
    """A node's access line."""
    spread: Sigma = 0.0
    """Sigma of the log-normal factor on each latency (jitter); 0: constant."""
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a packet is lost and sent again, which costs time and bandwidth."""
    slow_start_after_idle: bool = True
    """Connections start slowly after an idle period, as on Linux unless `net.ipv4.tcp_slow_start_after_idle` is 0."""
    window_mbit: AboveZero | None = None
    """Upper limit on the data that one connection has in flight, megabits, and so on its rate: at most this much per
    round trip; none: no limit."""
    call_loss: Probability = 0.0
    """Probability that a call or its answer never arrives."""
    view_age_s: NonNegative = 0.0
    """Age of every view of the membership, seconds."""


class FaultSettings(Settings):
    """A fault that happens to some nodes at a given time."""

    at_s: NonNegative
    """When it happens, virtual seconds."""
    kind: FaultKind
    """`crash`: permanent; `bounce`: crash and come back; `wipe`: come back without its disk; `hang`: alive, but all its
    messages are swallowed, including the directory's; `mute`: only its calls are swallowed; `cut`: nothing gets through
    between any two of the nodes; `one_way`: nothing gets through from the first node to the others; `split`: nothing
    gets through between these nodes and the rest; `slow`: the device seconds are multiplied by `factor`; `pause`;
    `leave`: told to leave, and started again afterwards; `depart`: told to leave; `arrive`: a new node with an id of
    its own."""
    peers: tuple[str, ...] = ()
    """Nodes by id: `s1r0` is replica 0 of stage 1."""
    region: str | None = None
    """Alternatively: all nodes of a region."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Alternatively: this share of every stage's nodes, drawn from the seed; at least one node in total."""
    for_s: NonNegative = 0.0
    """Duration, seconds."""
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3.0
    """For `slow`: factor on the device seconds."""


class ChurnSettings(Settings):
    """Random arrivals, departures and faults, drawn from the seed. Rates are events per node and hour."""

    from_s: NonNegative = 10.0
    """Nothing happens before this time, seconds. Allow the swarm enough time to begin training."""
    arrivals_per_hour: NonNegative = 0.0
    """New nodes per initial node. Each joins a stage drawn from the seed."""
    departures_per_hour: NonNegative = 0.0
    """Nodes told to leave for good. Every stage keeps at least one replica."""
    crashes_per_hour: NonNegative = 0.0
    """Nodes that crash. If they never come back, the last replica of a stage does not crash."""
    down_s: NonNegative | None = 60.0
    """Mean time until a crashed node comes back with its disk, seconds (exponential); none: never."""
    faults_per_hour: NonNegative = 0.0
    """Other faults, of the kinds in `kinds`."""
    kinds: tuple[FaultKind, ...] = ("bounce", "wipe", "hang", "mute", "cut", "pause", "leave", "slow")
    """Kinds of the other faults, all equally likely."""
    fault_s: Seconds = 20.0
    """Mean duration of the other faults, seconds (exponential)."""


class Scenario(Settings):
    """A swarm, its network, and what happens to it. Together with a seed it determines everything."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "lan"
    """Name shown to people."""
    description: str = "One room: a switch of 10 Gbit/s, equal machines, nothing goes wrong."
    """One-sentence description."""
    replicas: Annotated[tuple[Annotated[int, Field(ge=1, le=MAX_REPLICAS)], ...], Field(min_length=1)] = (4, 4)
    """Initial number of nodes of each stage."""
    run: RunSettings = RunSettings()
    """The run."""
    node: LocalSettings = LocalSettings()
    """Every node's own settings."""
    workload: WorkloadSettings = WorkloadSettings()
    """Message sizes."""
    compute: ComputeSettings = ComputeSettings()
    """Costs of operations."""
    network: NetworkSettings = NetworkSettings()
    """The links."""
    churn: ChurnSettings = ChurnSettings()
    """Arrivals, departures and random faults."""
    faults: tuple[FaultSettings, ...] = ()
    """Faults at given times."""
    limit_s: Annotated[float, Field(gt=0, le=30 * 86_400)] = 36_000.0
    """Virtual time by which the run must have ended, seconds; at most 30 days."""

    @model_validator(mode="after")
    def _check(self) -> "Scenario":
        stages, regions = len(self.replicas), self.network.regions
        self.run.outer.check_known()
        for name in ("forward_s", "backward_s", "inner_step_s", "outer_s"):
            _check_length(f"compute.{name}", getattr(self.compute, name), stages)
        _check_length("workload.parameters_per_stage", self.workload.parameters_per_stage, stages)
        count = len(regions.names)
        if len({*regions.names}) < count:
            raise ValueError(f"network.regions.names must be unique, not {list(regions.names)}")
        for name, matrix in (("round_trip_ms", regions.round_trip_ms), ("mbit_per_s", regions.mbit_per_s)):
            wanted = name == "round_trip_ms" or bool(matrix)
            if wanted and (len(matrix) != count or any(len(row) != count for row in matrix)):
                raise ValueError(f"network.regions.{name} must have {count} rows of {count} numbers, one per region")
        for fault in self.faults:
            if sum((bool(fault.peers), fault.region is not None, fault.share is not None)) != 1:
                selectors = "exactly one of peers, region and share"
                raise ValueError(f"a fault ({fault.kind} at {fault.at_s:g} s) needs {selectors}")
            if fault.region is not None and fault.region not in regions.names:
                known = f"the regions are {', '.join(regions.names)}" if regions.names else "there are no regions"
                raise ValueError(f"a fault names region {fault.region!r}, but {known}")
        return self

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens per microbatch in the run being simulated."""
        return self.workload.microbatch_size * self.workload.sequence_length

    def of_nodes(self, nodes: int) -> "Scenario":
        """This scenario scaled to `nodes` nodes in total. Raises ConfigError if there are fewer nodes than stages, or
        more than a swarm can have."""
        replicas = shared_out(nodes, self.replicas)
        if max(replicas) > MAX_REPLICAS:
            raise ConfigError(f"{nodes:,} nodes are too many: a stage has at most {MAX_REPLICAS:,}")
        return self.model_copy(update={"replicas": replicas})


def shared_out(nodes: int, replicas: tuple[int, ...]) -> tuple[int, ...]:
    """Distribute `nodes` nodes over the stages in proportion to `replicas`, at least one each. Remainders go to the
    stages that are furthest below their exact share.

    Raises ConfigError if there are fewer nodes than stages.
    """
    if nodes < len(replicas):
        raise ConfigError(f"{plural(nodes, 'node')} {'is' if nodes == 1 else 'are'} too few for {len(replicas)} stages")
    total = sum(replicas)
    shares = [max(1, nodes * count // total) for count in replicas]
    for stage in sorted(range(len(shares)), key=lambda s: shares[s] - nodes * replicas[s] / total):
        shares[stage] += sum(shares) < nodes
    while sum(shares) > nodes:
        shares[shares.index(max(shares))] -= 1
    return tuple(shares)


def of_stage(value: float | tuple[float, ...], stage: int) -> float:
    """The value for a stage, given one value for all stages or one per stage."""
    return value[stage] if isinstance(value, tuple) else value


def _check_length(name: str, value: object, stages: int) -> None:
    if isinstance(value, tuple) and len(value) != stages:
        raise ValueError(f"{name} must be one number, or {stages} numbers, one per stage")
