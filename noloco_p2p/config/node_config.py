"""The local settings of one node."""

from typing import Annotated

from pydantic import Field

from noloco_p2p.config.base import OneOrMore, Positive, Seconds, Settings, matching
from noloco_p2p.core.hours import SPAN

DialledHost = Annotated[str, matching("(?![0.:]+$).{1,200}", "a host of at most 200 characters that others can dial")]
"""An address or name; with a longer one, an advert that lists checkpoints would be too large."""


class ListenSettings(Settings):
    """Where this node listens, and what it announces."""

    host: str = "127.0.0.1"
    """Address to which the sockets are bound; `0.0.0.0` for all interfaces."""
    announce_host: DialledHost | None = None
    """Address or name at which others reach this node; none: that of the interface that leads to the peer it joins."""
    dht_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the libp2p daemon; 0 picks one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of the gRPC server; 0 picks one."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port of /metrics, /sd, /health and /status; 0 picks one."""
    libp2p_metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """TCP port on which the libp2p daemon serves its own /metrics, and Go's profiler to anybody who asks; 0 picks one;
    none: serves neither."""
    upnp: bool = True
    """Whether a node with a private IPv4 address asks its home router, over UPnP, to map `dht_port` and `grpc_port`. It
    does so in a members-only run, and in an open run that it joins at a public address."""


class DirectorySettings(Settings):
    """How often the node writes to the DHT and reads from it."""

    ttl_s: Annotated[float, Field(ge=1, le=200)] = 30.0
    """Lifetime of an advert in the DHT, seconds; it is renewed every third of this."""
    refresh_s: Seconds = 5.0
    """Longest time between two readings of the membership, seconds; at stage 0 an outer interval if that is shorter."""


class LimitSettings(Settings):
    """Limits on what this node holds and how long it waits."""

    max_in_flight: Positive | None = None
    """Maximum number of microbatches in flight; none: as many as a step has, if they fit into memory."""
    evaluations: Positive = 2
    """Maximum number of held-out microbatches served at once."""
    microbatch_deadline_s: Seconds = 600.0
    """Longest time without progress for one microbatch on its way through all stages and back, seconds."""
    patience_floor_s: Seconds = 2.0
    """Shortest silence after which a peer that serves a call counts as gone, seconds."""
    drain_s: Seconds = 20.0
    """Longest time that leaving takes, seconds: half for the microbatches in hand, the rest to hand over weights."""
    upload_mbit_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Cap on what this node sends over gRPC, Mbit/s over any 10 s (DHT traffic does not count); none: no cap."""
    download_mbit_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Cap on what it receives, measured in the same way."""
    relay_mbit_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Cap on what this node relays between nodes behind NAT, Mbit/s, on top of the caps above; 0: nothing; none: a
    twentieth of its line in a members-only run, nothing in an open one."""
    hours: Annotated[tuple[Annotated[str, matching(SPAN, "HH:MM-HH:MM")], ...], OneOrMore] = ()
    """When the node may use the machine, in local time: `22:00-07:00`, or a list of such spans; none: always. Outside
    these hours the node pauses, and a node started outside them joins when they begin."""
    linger_s: Seconds = 30.0
    """Longest wait for the other nodes at the end of the run, seconds."""


class NodeComputeSettings(Settings):
    """How this node computes."""

    recompute: bool = False
    """Recompute activations in the backward pass: a third more compute, far less memory per microbatch in flight."""


class CheckpointSettings(Settings):
    """The checkpoints that the node writes into its directory."""

    every_steps: Positive | None = 50
    """Steps between checkpoints, each at the next outer round; none: no checkpoints."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 3
    """How many of the newest checkpoints are kept; one more may stay (ARCHITECTURE.md, "Checkpoints")."""


class AuditSettings(Settings):
    """Files from which the run can be recomputed (ARCHITECTURE.md, "Files")."""

    dir: str | None = None
    """Directory for the audit files; none: no audit."""
    weights: bool = True
    """Also write weights, momenta and data; otherwise only the inner steps with their microbatches."""


class NodeConfig(Settings):
    """The local settings of one node."""

    listen: ListenSettings = ListenSettings()
    """Addresses and ports."""
    device: Annotated[str, matching("auto|cpu|cuda(:[0-9]+)?", "auto, cpu, cuda or cuda:N")] = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: CUDA if available."""
    threads: Positive | None = None
    """CPU threads for compute; none: OMP_NUM_THREADS, otherwise torch's choice, at most one per usable core."""
    compute: NodeComputeSettings = NodeComputeSettings()
    """Compute versus memory."""
    stage: Annotated[int, Field(ge=0)] | None = None
    """Stage to hold; none: that of the newest checkpoint, otherwise the stage with the least capacity."""
    data_files: Annotated[tuple[str, ...], OneOrMore] = ()
    """A file or glob, or a list of them, to read instead of a hub data set."""
    tokenizer_dir: str | None = None
    """Directory with the tokenizer's files, to use instead of the hub."""
    directory: DirectorySettings = DirectorySettings()
    """The DHT."""
    limits: LimitSettings = LimitSettings()
    """Limits."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """Checkpoints."""
    rebalance: bool = True
    """Move to another stage while training, if that stage limits the swarm and this one has replicas to spare."""
    audit: AuditSettings = AuditSettings()
    """Audit files."""
