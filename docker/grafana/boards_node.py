"""The dashboards *Outer rounds* and *Node*: what replicas exchange, and what one process uses.

Each dashboard is a single expression, however many panels it has.
"""

from panels import (
    BAD,
    BY_STAGE,
    GOOD,
    LOOK,
    NODE,
    RESULT_COLOURS,
    RUN,
    STAGE,
    Json,
    Query,
    by_node,
    chart,
    dashboard,
    stat,
)

GIB = 1024**3
PULLED = (
    f'sum(rate(noloco_outer_rounds_total{{{STAGE}, result!="alone"}}[5m]))'
    f" / (sum(rate(noloco_outer_rounds_total{{{STAGE}}}[5m])) > 0)"
)


def outer_rounds() -> Json:
    """Do the replicas stay together, and what does it cost?"""
    return dashboard(
        "noloco-outer-rounds",
        "Outer rounds",
        "Whether the replicas find partners and stay together, and what it costs.",
        [
            [
                stat("Rounds that found a partner", PULLED, "percentunit", [(0.5, LOOK), (0.9, GOOD)]),
                stat(
                    "Rounds per minute and replica",
                    f"60 * avg(sum by (node) (rate(noloco_outer_rounds_total{{{STAGE}}}[5m])))",
                    "none",
                    decimals=1,
                ),
                stat("Duration of a round", f"avg(stage:noloco_outer_round_seconds:mean{{{STAGE}}})", "s"),
                stat(
                    "Of this, waiting for the partner", f"avg(stage:noloco_partner_wait_seconds:mean{{{STAGE}}})", "s"
                ),
                stat(
                    "Bytes per parameter and round",
                    f"avg(stage:noloco_pulled_bytes:per_parameter_and_round{{{STAGE}}})",
                    "none",
                    decimals=2,
                ),
                stat("Largest spread of the replicas", f"max(stage:noloco_replica_std:mean{{{STAGE}}})", "none"),
            ],
            [
                chart(
                    "Rounds per minute, by result",
                    "none",
                    Query(
                        f"60 * sum by (result) (stage_result:noloco_outer_rounds:rate5m{{{STAGE}}})",
                        "{{result}}",
                    ),
                    about="partner: the partner's of this round; stale: of another round; other: another replica's.",
                    colours=RESULT_COLOURS,
                    stack=True,
                ),
                chart(
                    "Rounds in a row that ended alone",
                    "none",
                    by_node(f"noloco_outer_rounds_alone{{{NODE}}}"),
                    about="With an odd number of replicas, a different one is alone each round.",
                    steps=[(3, LOOK)],
                    reach=4,
                    decimals=0,
                ),
            ],
            [
                chart(
                    "Spread of the replicas, and the learning rate",
                    "sci",
                    Query(f"stage:noloco_replica_std:mean{{{STAGE}}}", BY_STAGE),
                    Query(f"avg(stage:noloco_learning_rate:mean{{{STAGE}}})", "learning rate"),
                    about="Standard deviation of the weights. It must not grow while the learning rate falls.",
                    colours={"learning rate": "gray"},
                    right=("learning rate", "sci"),
                ),
                chart(
                    "Spread that each replica sees",
                    "sci",
                    by_node(f"noloco_replica_std{{{NODE}}} > 0"),
                    about="Estimated from its own weights and those that its last round merged.",
                ),
            ],
            [
                chart(
                    "Duration of a round",
                    "s",
                    Query(f'stage_phase:noloco_phase_seconds:p50{{{STAGE}, phase="outer"}}', f"{BY_STAGE}, median"),
                    Query(
                        f'stage_phase:noloco_phase_seconds:p95{{{STAGE}, phase="outer"}}',
                        f"{BY_STAGE}, 95th percentile",
                    ),
                ),
                chart(
                    "Wait for the partner's snapshot",
                    "s",
                    Query(f"stage:noloco_partner_wait_seconds:mean{{{STAGE}}}", BY_STAGE),
                    about="Mean over five minutes, including the transfer.",
                ),
            ],
            [
                chart(
                    "Bytes per parameter and round",
                    "none",
                    Query(f"stage:noloco_pulled_bytes:per_parameter_and_round{{{STAGE}}}", BY_STAGE),
                    about="4 for one vector in float32, ½ in int4 (the default); less if rounds end alone.",
                ),
                chart(
                    "Bytes received, by kind",
                    "Bps",
                    Query(
                        f'sum by (kind) (rate(noloco_bytes_total{{{NODE}, direction="in"}}[$__rate_interval]))',
                        "{{kind}}",
                    ),
                    about="Snapshots: from partners and guarded stages. State: copied by newcomers.",
                    stack=True,
                ),
            ],
            [
                chart(
                    "Guarded rounds",
                    "locale",
                    Query(f"max by (stage) (noloco_guarded_round{{{RUN}}})", "of stage {{stage}}"),
                    about="The newest snapshot of a stage that another stage holds for it, in case all its nodes die.",
                    decimals=0,
                ),
                chart(
                    "Checkpointed rounds",
                    "locale",
                    by_node(f"noloco_checkpoint_round{{{NODE}}}"),
                    about="The outer round of each node's last checkpoint.",
                    decimals=0,
                ),
            ],
        ],
    )


def node() -> Json:
    """Is this machine the problem?"""
    process = f'job="noloco", {NODE}'
    age = f"time() - (noloco_checkpoint_timestamp_seconds{{{NODE}}} > 0)"
    return dashboard(
        "noloco-node",
        "Node",
        "What one process uses, and what it has left. Choose the node above.",
        [
            [
                stat("Shortest uptime", f"min(time() - process_start_time_seconds{{{process}}})", "s"),
                stat("Largest memory (RSS)", f"max(process_resident_memory_bytes{{{process}}})", "bytes"),
                stat(
                    "Least disk space left",
                    f"min(noloco_disk_free_bytes{{{NODE}}})",
                    "bytes",
                    [(GIB, LOOK), (5 * GIB, GOOD)],
                ),
                stat("Oldest checkpoint", f"max({age})", "s"),
                stat(
                    "Largest event-loop lag",
                    f"max(noloco_event_loop_lag_seconds{{{NODE}}})",
                    "s",
                    [(0, GOOD), (0.1, LOOK), (0.5, BAD)],
                ),
                stat(
                    "Longest wait",
                    f"max(noloco_longest_wait_seconds{{{NODE}}})",
                    "s",
                    [(0, GOOD), (10, LOOK), (60, BAD)],
                ),
            ],
            [
                chart(
                    "CPU cores in use",
                    "none",
                    by_node(f"rate(process_cpu_seconds_total{{{process}}}[$__rate_interval])"),
                ),
                chart("Memory (RSS)", "bytes", by_node(f"process_resident_memory_bytes{{{process}}}")),
            ],
            [
                chart(
                    "Device at work",
                    "percentunit",
                    by_node(f"rate(noloco_device_seconds_total{{{NODE}}}[$__rate_interval])"),
                    about="Share of the time in which the GPU, or the CPU's compute thread, works for inner steps.",
                    high=1,
                ),
                chart(
                    "Device memory in use",
                    "percentunit",
                    by_node(
                        f'noloco_device_memory_bytes{{{NODE}, kind="used"}}'
                        f' / ignoring (kind) noloco_device_memory_bytes{{{NODE}, kind="total"}}'
                    ),
                    about="Share of the GPU's memory. On a CPU: what the process has of the machine's memory.",
                    high=1,
                ),
            ],
            [
                chart(
                    "Queue: microbatches in flight",
                    "none",
                    by_node(f"noloco_in_flight{{{NODE}}}"),
                    about="At most those of a step, within what memory holds and limits.max_in_flight allows.",
                    reach=1,
                    decimals=0,
                ),
                chart(
                    "Queue: microbatches waiting for admission",
                    "none",
                    by_node(f"noloco_waiting{{{NODE}}}"),
                    reach=1,
                    decimals=0,
                ),
            ],
            [
                chart(
                    "Busy replies per second",
                    "none",
                    by_node(f'rate(noloco_busy_replies_total{{{NODE}, direction="in"}}[$__rate_interval])', ", sent"),
                    by_node(
                        f'rate(noloco_busy_replies_total{{{NODE}, direction="out"}}[$__rate_interval])', ", received"
                    ),
                    about="Back-pressure: a replica that often answers Busy is slower than the stage before it.",
                ),
                chart(
                    "Event-loop lag",
                    "s",
                    by_node(f"noloco_event_loop_lag_seconds{{{NODE}}}"),
                    about="Delay of timers. Above half a second, peers may take the node for hung.",
                    steps=[(0.5, BAD)],
                ),
            ],
            [
                chart(
                    "Network traffic",
                    "Bps",
                    by_node(
                        f'rate(noloco_bytes_total{{{NODE}, direction="in"}}[$__rate_interval])',
                        ", in",
                        operation="sum",
                    ),
                    by_node(
                        f'rate(noloco_bytes_total{{{NODE}, direction="out"}}[$__rate_interval])',
                        ", out",
                        operation="sum",
                    ),
                    about="What the node receives is above zero, what it sends below.",
                    below=".*, out",
                ),
                chart(
                    "Memory (RSS) of the libp2p daemon",
                    "bytes",
                    by_node(f'process_resident_memory_bytes{{job="libp2p", {NODE}}}'),
                    about="For nodes that serve its metrics (listen.libp2p_metrics_port).",
                ),
            ],
            [
                chart(
                    "Disk: free, and what the next checkpoint needs",
                    "bytes",
                    by_node(f"noloco_disk_free_bytes{{{NODE}}}", ", free"),
                    by_node(f"noloco_checkpoint_size_bytes{{{NODE}}} > 0", ", checkpoint"),
                    log=2,
                ),
                chart("Age of the last checkpoint", "s", by_node(age)),
            ],
        ],
    )
