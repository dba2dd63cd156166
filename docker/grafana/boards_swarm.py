"""The dashboards *Swarm* and *Training*: the run as a whole.

Each dashboard is a single expression, however many panels it has.
"""

from panels import (
    ALERTS,
    BAD,
    BY_SEEN_STAGE,
    BY_STAGE,
    CAUSE_COLOURS,
    GOOD,
    LOOK,
    NODE,
    RUN,
    SEEN_STAGE,
    STAGE,
    STATE_COLOURS,
    Json,
    Query,
    by_node,
    chart,
    dashboard,
    stat,
    timeline,
)

TOKENS = f"sum(run:noloco_tokens:rate1m{{{RUN}}}) or vector(0)"
PROGRESS = f"run:noloco_step:max{{{RUN}}} / on (run) max by (run) (noloco_run_steps{{{RUN}}})"


def none(label: str) -> str:
    """A series of zeros with the value `none` of a label, to put after `or on ()`."""
    return f'label_replace(vector(0), "{label}", "none", "", "")'


def swarm() -> Json:
    """Which nodes are in the swarm, and are they well?"""
    trouble = f"{len(STATE_COLOURS)} * (noloco_healthy{{{NODE}}} == bool 0)"
    state = " or ".join(f'{value} * noloco_state{{{NODE}, state="{name}"}}' for value, name in enumerate(STATE_COLOURS))
    return dashboard(
        "noloco-swarm",
        "Swarm",
        "The nodes, their states, and what is wrong.",
        [
            [
                stat("Nodes that answer", f'count(up{{job="noloco", {RUN}}} == 1) or vector(0)', "none", [(1, GOOD)]),
                stat(
                    "Replicas of the thinnest stage",
                    f"min(stage:noloco_replicas:median{{{RUN}}})",
                    "none",
                    [(1, LOOK), (2, GOOD)],
                ),
                stat("Nodes in trouble", f"sum(1 - noloco_healthy{{{RUN}}})", "none", [(0, GOOD), (1, BAD)]),
                stat("Alerts", f"sum({ALERTS}) or vector(0)", "none", [(0, GOOD), (1, LOOK)]),
                stat("Tokens per second", TOKENS, "short"),
                stat("Progress", PROGRESS, "percentunit"),
            ],
            [
                timeline(
                    "State of each node",
                    [*STATE_COLOURS.items(), ("in trouble", BAD)],
                    by_node(f"{state} or {trouble}"),
                    about="As each node reports it. In trouble: its /health page says what is wrong.",
                    height=12,
                )
            ],
            [
                timeline(
                    "Alerts that fire",
                    [("none", GOOD), ("firing", BAD)],
                    Query(
                        f"{ALERTS} or on () {none('alertname')}", "{{alertname}} {{node_stage}}{{stage}} {{node_name}}"
                    ),
                    about="Each with its stage and its node, if it has one. In the charts, red stripes show the start.",
                )
            ],
            [
                chart(
                    "Replicas by stage",
                    "none",
                    Query(f"stage:noloco_replicas:median{{{SEEN_STAGE}}}", BY_SEEN_STAGE),
                    about="With fewer than two, one more failure stops the run.",
                    steps=[(2, GOOD)],
                    reach=3,
                    decimals=0,
                ),
                chart(
                    "Nodes by state",
                    "none",
                    Query(f"sum by (state) (stage_state:noloco_peers:median{{{SEEN_STAGE}}})", "{{state}}"),
                    colours=STATE_COLOURS,
                    stack=True,
                    decimals=0,
                ),
            ],
            [
                chart(
                    "Joins and departures",
                    "none",
                    *(
                        Query(
                            f"round(quantile(0.5, increase(noloco_peers_{what}_total{{{NODE}}}[$__rate_interval])))",
                            what,
                        )
                        for what in ("joined", "departed")
                    ),
                    about="In a minute, or what a bar covers; median over the nodes' views.",
                    colours={"joined": GOOD, "departed": LOOK},
                    reach=1,
                    decimals=0,
                    bars=True,
                    below="departed",
                ),
                chart(
                    "Stages without a replica",
                    "s",
                    Query(f"stage:noloco_deserted_seconds:median{{{SEEN_STAGE}}}", BY_SEEN_STAGE),
                    about="How long a stage has had no replica. The run waits for one.",
                    steps=[(10, BAD)],
                    reach=15,
                ),
            ],
            [
                chart(
                    "Re-routed microbatches per second, by reason",
                    "none",
                    Query(f"sum by (reason) (rate(noloco_rerouted_total{{{NODE}}}[$__rate_interval]))", "{{reason}}"),
                    about="The replica chosen first failed, or answered too late.",
                    stack=True,
                ),
                chart(
                    "Dropped microbatches per second, by reason",
                    "none",
                    Query(f"sum by (reason) (rate(noloco_dropped_total{{{NODE}}}[$__rate_interval]))", "{{reason}}"),
                    about="Given up by the stage-0 replica that read them.",
                    stack=True,
                ),
            ],
            [
                chart(
                    "Troubles",
                    "none",
                    Query(f"sum by (name) (noloco_trouble{{{NODE}}}) or on () {none('name')}", "{{name}}"),
                    about="Number of nodes with each problem that does not stop them.",
                    stack=True,
                    reach=1,
                    decimals=0,
                ),
                chart(
                    "Longest wait that holds something up",
                    "s",
                    by_node(f"noloco_longest_wait_seconds{{{NODE}}}"),
                    about="`noloco doctor` shows what the node waits for, and which peer.",
                ),
            ],
        ],
    )


def training() -> Json:
    """Does it learn, and where does the time go?"""
    return dashboard(
        "noloco-training",
        "Training",
        "Whether it learns, how fast, and where the time goes.",
        [
            [
                stat("Loss, nats per token", f"run:noloco_loss:mean{{{RUN}}}", "none", decimals=3),
                stat("Validation loss", f"run:noloco_validation_loss:mean{{{RUN}}}", "none", decimals=3),
                stat("Validation perplexity", f"exp(run:noloco_validation_loss:mean{{{RUN}}})", "none", decimals=2),
                stat("Tokens per second", TOKENS, "short"),
                stat("Step", f"floor(run:noloco_step:max{{{RUN}}})", "locale"),
                stat("Progress", PROGRESS, "percentunit"),
            ],
            [
                chart(
                    "Loss of each replica of stage 0",
                    "none",
                    by_node(f'noloco_loss{{{RUN}, node_stage="0"}} > 0'),
                    Query(f"run:noloco_loss:mean{{{RUN}}}", "mean"),
                    about="Nats per token of the last inner step.",
                    colours={"mean": "text"},
                    low=None,
                    extreme="min",
                ),
                chart(
                    "Validation loss",
                    "none",
                    by_node(f'noloco_validation_loss{{{RUN}, node_stage="0"}} > 0'),
                    Query(f"run:noloco_validation_loss:mean{{{RUN}}}", "mean"),
                    about="Nats per token on held-out data, every evaluation.every_steps.",
                    colours={"mean": "text"},
                    low=None,
                    extreme="min",
                ),
            ],
            [
                chart(
                    "Tokens per second",
                    "short",
                    by_node(f'rate(noloco_tokens_total{{{RUN}, node_stage="0"}}[$__rate_interval])'),
                    about="Trained tokens, by the stage-0 replica that read them.",
                    stack=True,
                ),
                chart(
                    "Clock of each replica of stage 0",
                    "locale",
                    by_node(f'noloco_step{{{RUN}, node_stage="0"}}'),
                    about="In steps. A replica that lags behind is pulled forward.",
                    decimals=0,
                ),
            ],
            [
                chart(
                    "Devices at work, by stage",
                    "percentunit",
                    Query(f"stage:noloco_utilisation:ratio{{{STAGE}}}", BY_STAGE),
                    about="Share of the time. A stage near 100 % holds the others back: give it another replica.",
                    high=1,
                ),
                chart(
                    "Bubbles: idle devices, by cause",
                    "percentunit",
                    Query(f"avg by (cause) (stage_cause:noloco_idle:ratio{{{STAGE}}})", "{{cause}}"),
                    about="Share of the time that the chosen stages wait for microbatches, gradients or the partner.",
                    colours=CAUSE_COLOURS,
                    stack=True,
                    high=1,
                ),
            ],
            [
                chart(
                    "Duration of each phase, median",
                    "s",
                    Query(f"avg by (phase) (stage_phase:noloco_phase_seconds:p50{{{STAGE}}})", "{{phase}}"),
                    about="Mean of the chosen stages. send: until the next stage replies, so with the work of all later"
                    " ones; wait: for a place in the inner step; step: the optimizer; outer: an outer round.",
                    log=10,
                ),
                chart(
                    "Duration of each phase, 95th percentile",
                    "s",
                    Query(f"max by (phase) (stage_phase:noloco_phase_seconds:p95{{{STAGE}}})", "{{phase}}"),
                    about="Largest of the chosen stages.",
                    log=10,
                ),
            ],
            [
                chart(
                    "Gradient norm, before clipping",
                    "none",
                    by_node(f"noloco_grad_norm{{{NODE}}} > 0"),
                    log=10,
                ),
                chart(
                    "Learning rate",
                    "sci",
                    Query(f"stage:noloco_learning_rate:mean{{{STAGE}}}", BY_STAGE),
                ),
            ],
            [
                chart(
                    "Microbatches per second, by result",
                    "none",
                    Query(
                        f"sum by (result) (rate(noloco_microbatches_total{{{NODE}}}[$__rate_interval]))", "{{result}}"
                    ),
                    colours={"done": GOOD, "nonfinite": BAD, "violation": "purple", "dropped": LOOK},
                    stack=True,
                ),
                chart(
                    "Inner steps per second",
                    "none",
                    by_node(f"rate(noloco_inner_steps_total{{{NODE}}}[$__rate_interval])"),
                ),
            ],
        ],
    )
