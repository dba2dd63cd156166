"""The diagnosis on plain data: each finding, with a case in which it is made and a similar one in which it is not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from diagnosed import (
    peer,
    silent,
    swarm,
    troubled,
    wait,
    waiting,
    why,
    with_advert,
    with_figures,
    with_status,
)

from noloco_p2p.core.status import AnyReplica, ForRound, Resource, Trouble
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import LINE_CHARACTERS, Finding, Report, line

Nodes = dict[str, Report]
Change = Callable[[Nodes], None]


def _found(nodes: Nodes) -> list[Finding]:
    return list(diagnose(list(nodes.values())).findings)


def _names(nodes: Nodes) -> list[str]:
    return [finding.name for finding in _found(nodes)]


def test_a_step_that_is_not_done_is_not_shown() -> None:
    nodes = {name: with_advert(node, step=4999.7) for name, node in swarm().items()}
    assert diagnose(list(nodes.values())).progress.startswith("training: step 4,999 of 5,000 ")


def test_the_rate_of_a_run_cannot_be_changed_so_another_one_is_for_the_next_run() -> None:
    nodes = swarm()
    nodes["S1R0"] = with_figures(nodes["S1R0"], microbatches={"done": 1000, "nonfinite": 500})
    assert [f.advice for f in _found(nodes)] == [
        "if only this node is affected, check its device; otherwise the next run needs a lower inner.peak_learning_rate"
    ]


def test_nothing_is_wrong_with_a_healthy_swarm() -> None:
    nodes = swarm()
    assert _found(nodes) == []
    expected = "training: step 1,234 of 5,000 (25 %), 9 nodes, 6.15k tokens/s, loss 2.31"
    assert diagnose(list(nodes.values())).sentence == expected


@pytest.mark.parametrize("state", ["paused", "dead"])
def test_progress_is_that_of_the_nodes_that_train(state: str) -> None:
    """A paused node keeps its step for hours, and a dead one stays in the directory for a while."""
    nodes = swarm(stages=2, replicas=2)
    for name in ("S0R0", "S1R0"):
        behind = with_figures(with_advert(nodes[name], step=24.0), loss=5.0)
        nodes[name] = with_advert(behind, state="paused") if state == "paused" else silent(behind)
    expected = "training: step 1,234 of 5,000 (25 %), 4 nodes, 2.05k tokens/s, loss 2.31"
    assert diagnose(list(nodes.values())).progress == expected
    for name in ("S0R1", "S1R1"):
        nodes[name] = with_advert(nodes[name], state="paused")
    progress = diagnose(list(nodes.values())).progress
    assert progress.startswith("not training: step 24 of 5,000 (0 %)"), "the last step is known"


def test_progress_beyond_all_bounds_is_cut_off() -> None:
    nodes = swarm(1, 2)
    for name in nodes:
        nodes[name] = with_figures(with_advert(nodes[name], step=5003.0), loss=1e9)
    assert diagnose(list(nodes.values())).progress.startswith("training: step 5,003 of 5,000 (100 %)")
    assert diagnose(list(nodes.values())).progress.endswith("loss 9999.00")


# --- one node ---------------------------------------------------------------------------------------------------------


def _set(name: str, change: Callable[[Report], Report]) -> Change:
    def apply(nodes: Nodes) -> None:
        nodes[name] = change(nodes[name])

    return apply


def _stuck(work: str, since_s: float, deadline_s: float) -> Change:
    """The device of S1R0 has worked on a microbatch since then."""
    return _set("S1R0", lambda r: waiting(r, wait(work, Resource.DEVICE, since_s, deadline_s, why(1))))


ONE_NODE: dict[str, tuple[str, str, str, Change, Change]] = {
    "loop": (
        "loop",
        "error",
        "its event loop has been stuck for 42 s",
        _set("S1R0", lambda r: with_figures(r, loop_silent_s=42.0)),
        _set("S1R0", lambda r: with_figures(r, loop_silent_s=1.0)),
    ),
    "device, older than its deadline": (
        "device",
        "error",
        "its device has been stuck in forward for 7.0 s",
        _stuck("forward", 7.0, 6.0),
        _stuck("forward", 5.0, 6.0),
    ),
    "device, as long as twenty-four steps": (
        "device",
        "error",
        "its device has been stuck in backward for 12 s",
        _stuck("backward", 12.0, 60.0),
        _set(
            "S1R0",
            lambda r: with_status(waiting(r, wait("backward", Resource.DEVICE, 12.0, 60.0, why(1))), step_took_s=5.0),
        ),
    ),
    "device, its deadline unknown": (
        "device",
        "error",
        "its device has been stuck in backward for 12 s",
        _stuck("backward", 12.0, 1e300),
        _stuck("backward", 9.0, 1e300),
    ),
    "device, before the first step": (
        "device",
        "error",
        "its device has been stuck in backward for 70 s",
        _stuck("backward", 70.0, 60.0),
        _set(
            "S1R0",
            lambda r: with_status(waiting(r, wait("backward", Resource.DEVICE, 50.0, 60.0, why(1))), step_took_s=None),
        ),
    ),
    "device, for what holds nothing up": (
        "device",
        "error",
        "its device has been stuck in forward for 12 s",
        _set("S1R0", lambda r: waiting(r, wait("forward", Resource.DEVICE, 12.0))),
        _set("S1R0", lambda r: waiting(r, wait("place for an evaluation", Resource.DEVICE, 12.0, idle=True))),
    ),
    "trouble with the disk, which is full": (
        "disk",
        "error",
        "no checkpoint of outer round 12: No space left on device",
        _set(
            "S1R0",
            lambda r: with_figures(
                troubled(r, "disk", "no checkpoint of outer round 12: No space left on device"), disk_free_bytes=0
            ),
        ),
        _set("S1R0", lambda r: with_status(r, troubles=())),
    ),
    "libp2p": (
        "libp2p",
        "error",
        "the libp2p daemon has ended",
        _set("S1R0", lambda r: troubled(r, "libp2p", "the libp2p daemon has ended")),
        _set("S1R0", lambda r: with_status(r, troubles=())),
    ),
    "another trouble": (
        "clouds",
        "warning",
        "it rains",
        _set("S1R0", lambda r: troubled(r, "clouds", "it rains")),
        _set("S1R0", lambda r: with_status(r, troubles=())),
    ),
    "full disk": (
        "disk",
        "error",
        "50 MB left",
        _set("S1R0", lambda r: with_figures(r, disk_free_bytes=50_000_000)),
        _set("S1R0", lambda r: with_figures(r, disk_free_bytes=None)),
    ),
    "nearly full disk": (
        "disk",
        "warning",
        "900 MB left",
        _set("S1R0", lambda r: with_figures(r, disk_free_bytes=900_000_000)),
        _set("S1R0", lambda r: with_figures(r, disk_free_bytes=1_100_000_000)),
    ),
    "not finite": (
        "nonfinite",
        "warning",
        "500 of 1.5k microbatches were not finite",
        _set("S1R0", lambda r: with_figures(r, microbatches={"done": 1000, "nonfinite": 500})),
        _set("S1R0", lambda r: with_figures(r, microbatches={"done": 1000, "nonfinite": 50})),
    ),
    "few, but a tenth not finite": (
        "nonfinite",
        "warning",
        "3 of 30 microbatches were not finite",
        _set("S1R0", lambda r: with_figures(r, microbatches={"done": 27, "nonfinite": 3})),
        _set("S1R0", lambda r: with_figures(r, microbatches={"done": 0, "nonfinite": 2})),
    ),
    "many refused vectors": (
        "distrusted",
        "warning",
        "refused 3 vectors of peers in 3 outer rounds",
        _set("S1R0", lambda r: with_figures(r, distrusted={"refused": 3}, rounds={"partner": 1, "alone": 2})),
        _set("S1R0", lambda r: with_figures(r, distrusted={"refused": 2}, rounds={"partner": 1, "alone": 2})),
    ),
    "refused vectors": (
        "distrusted",
        "warning",
        "refused 3 vectors of peers in 300 outer rounds",
        _set("S1R0", lambda r: with_figures(r, distrusted={"refused": 3, "clipped": 9}, rounds={"partner": 300})),
        _set("S1R0", lambda r: with_figures(r, distrusted={"refused": 3, "clipped": 9}, rounds={"partner": 301})),
    ),
    "clock": (
        "clock",
        "error",
        "the clock of node 12D3…xS1R0 is 119.9 s ahead of the others'",
        _set("S1R0", lambda r: replace(r, clock_ahead_s=120.0)),
        _set("S1R0", lambda r: replace(r, clock_ahead_s=-4.0)),
    ),
    "clock, slightly off": (
        "clock",
        "warning",
        "the clock of node 12D3…xS1R0 is 8.0 s behind the others'",
        _set("S1R0", lambda r: replace(r, clock_ahead_s=-7.9)),
        _set("S1R0", lambda r: replace(r, clock_ahead_s=None)),
    ),
    "no status": (
        "unreachable",
        "warning",
        "node 12D3…xS1R0 of stage 1 does not return its status at http://192.0.2.1:9101: Connection refused",
        _set("S1R0", silent),
        _set("S1R0", lambda r: silent(with_advert(r, state="left"))),
    ),
    "no status, with the address in the reason": (
        "unreachable",
        "warning",
        "does not return its status: no answer from http://192.0.2.1:9101; it announced itself 7.0 s ago",
        _set("S1R0", lambda r: replace(silent(r, "no answer from http://192.0.2.1:9101"), age_s=7.0)),
        _set("S1R0", lambda r: silent(with_advert(r, state="draining"))),
    ),
    "another version": (
        "version",
        "warning",
        "12D3…xS1R0: version 0.2.0, the others have 0.1.0",
        _set("S1R0", lambda r: with_advert(r, version="0.2.0")),
        _set("S1R0", lambda r: r),
    ),
    "a version of any length": (
        "version",
        "warning",
        f"version {'2' * 40}, the others",
        _set("S1R0", lambda r: with_advert(r, version="2" * 50)),
        _set("S1R0", lambda r: r),
    ),
    "no version": (
        "version",
        "warning",
        "version unknown, the others have 0.1.0",
        _set("S1R0", lambda r: with_advert(r, version="")),
        _set("S1R0", lambda r: r),
    ),
    "slow": (
        "slow-node",
        "warning",
        "node 12D3…xS1R0 is 2.1× slower than its stage's median and holds back stage 1",
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=10 / 2.1)),
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=10 / 1.9)),
    ),
    "very slow": (
        "slow-node",
        "warning",
        "node 12D3…xS1R0 is 9999.0× slower than",
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=1e-9)),
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=0.0)),
    ),
    "slow, not in training": (
        "slow-node",
        "warning",
        "holds back stage 1",
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=1.0)),
        _set("S1R0", lambda r: with_advert(r, microbatches_per_s=1.0, state="syncing")),
    ),
    "paused": (
        "paused",
        "ok",
        "node 12D3…xS1R0 of stage 1 is paused",
        _set("S1R0", lambda r: with_advert(r, state="paused")),
        _set("S1R0", lambda r: r),
    ),
    "paused on schedule": (
        "paused",
        "ok",
        "node 12D3…xS1R0 of stage 1 is paused until 22:00 (its local time)",
        _set("S1R0", lambda r: with_status(with_advert(r, state="paused"), closed_until="22:00")),
        _set("S1R0", lambda r: with_status(r, closed_until=None)),
    ),
    "draining": (
        "draining",
        "ok",
        "is finishing its work to leave",
        _set("S1R0", lambda r: with_advert(r, state="draining")),
        _set("S1R0", lambda r: r),
    ),
    "stalled for no known reason": (
        "stall",
        "error",
        "no inner step for 40 s: node 12D3…xS1R0 of stage 1 has waited 39 s for checkpoint from disk",
        _set("S1R0", lambda r: with_status(waiting(r, wait("checkpoint", Resource.DISK, 39.0)), since_step_s=40.0)),
        _set("S1R0", lambda r: with_status(waiting(r, wait("checkpoint", Resource.DISK, 4.0)), since_step_s=4.5)),
    ),
    "stalled, waiting for nothing": (
        "stall",
        "error",
        "no inner step for 40 s: node 12D3…xS1R0 of stage 1 waits for nothing",
        _set("S1R0", lambda r: with_status(r, since_step_s=40.0)),
        _set("S1R0", lambda r: with_status(r, since_step_s=4.5)),
    ),
    "a wait for another node that has outlived its deadline": (
        "overdue",
        "warning",
        "node 12D3…xS1R0 of stage 1 has waited 20 s for snapshot from node 12D3…xS1R1, longer than it should take",
        _set(
            "S1R0",
            lambda r: waiting(
                r,
                wait("answer", peer(1, 2), 30.0, 60.0, ForRound(12)),
                wait("snapshot", peer(1, 1), 20.0, 10.0, ForRound(12)),
            ),
        ),
        _set("S1R0", lambda r: waiting(r, wait("snapshot", peer(1, 1), 10.5, 10.0, ForRound(12)))),
    ),
    "a wait that has outlived its deadline": (
        "overdue",
        "warning",
        "has waited 20 s for batch from data, longer than it should take",
        _set("S0R0", lambda r: waiting(r, wait("batch", Resource.DATA, 20.0, 10.0))),
        _set("S0R0", lambda r: waiting(r, wait("batch", Resource.DATA, 9.0, 10.0))),
    ),
}


@pytest.mark.parametrize("case", ONE_NODE)
def test_findings_about_one_node(case: str) -> None:
    name, severity, expected, ill, well = ONE_NODE[case]
    nodes = swarm()
    ill(nodes)
    found = _found(nodes)
    assert [finding.name for finding in found] == [name], found
    assert expected in found[0].sentence
    assert found[0].severity == severity
    assert found[0].peer == peer(0 if "S0R0" in found[0].sentence else 1, 0)
    assert found[0].advice
    nodes = swarm()
    well(nodes)
    assert name not in _names(nodes)


def test_a_slow_replica_of_two_is_compared_with_the_other() -> None:
    nodes = swarm(2, 2)
    nodes["S0R1"] = with_advert(nodes["S0R1"], microbatches_per_s=2.0)
    assert [(f.name, f.peer) for f in _found(nodes)] == [("slow-node", peer(0, 1))]
    assert "5.0× slower" in diagnose(list(nodes.values())).sentence


def test_a_stage_that_does_less_than_the_others_is_not_slow() -> None:
    nodes = swarm()
    for name in ("S0R0", "S0R1", "S0R2"):
        nodes[name] = with_advert(nodes[name], microbatches_per_s=100.0)
    assert _found(nodes) == []


def test_the_only_replica_of_a_stage_is_compared_with_other_stages() -> None:
    nodes = swarm(2, 1)
    nodes["S0R0"] = with_advert(nodes["S0R0"], microbatches_per_s=2.0)
    found = [f for f in _found(nodes) if f.name == "slow-node"]
    assert [f.peer for f in found] == [peer(0, 0)]
    assert "5.0× slower than the other stages' median" in found[0].sentence
    nodes["S0R0"] = with_advert(nodes["S0R0"], microbatches_per_s=4.0)
    assert "slow-node" not in _names(nodes), "half the speed can be due to the work of the stage"


def test_the_observers_own_wrong_clock_is_recognised() -> None:
    nodes = {name: replace(report, clock_ahead_s=119.0) for name, report in swarm().items()}
    found = _found(nodes)
    assert [(f.name, f.peer) for f in found] == [("clock", None)]
    assert "this machine's clock is 119.0 s behind those of 9 nodes" in found[0].sentence


def test_two_clocks_that_differ_are_both_named() -> None:
    nodes = swarm(1, 1)
    nodes["S0R0"] = replace(nodes["S0R0"], clock_ahead_s=120.0)
    shown = next(f.sentence for f in _found(nodes) if f.name == "clock")
    assert shown == "the clocks of node 12D3…xS0R0 and of this machine are 120.0 s apart"


# --- stages -----------------------------------------------------------------------------------------------------------


def test_a_stage_without_a_replica_is_named() -> None:
    nodes = {name: with_status(r, deserted={1: 42.0}) for name, r in swarm().items() if not name.startswith("S1")}
    nodes["S0R0"] = waiting(nodes["S0R0"], wait("gradient", AnyReplica(1), 41.0, None, why(1)))
    nodes["S0R0"] = with_status(nodes["S0R0"], deserted={1: 42.0})
    found = _found(nodes)
    assert [f.name for f in found] == ["stage-empty"]
    assert found[0].sentence == "stage 1 has had no replica for 42 s; that holds back 1 node"
    assert "--stage 1" in found[0].advice
    assert diagnose(list(nodes.values())).sentence == found[0].sentence


@pytest.mark.parametrize(
    ("state", "replicas", "why", "advice"),
    [
        ("starting", 1, ": 12D3…xS1R0 is starting", "wait for it"),
        ("paused", 1, ": 12D3…xS1R0 is paused", "noloco resume"),
        ("paused", 2, ": 12D3…xS1R0 and 12D3…xS1R1 are paused", "until 07:00 or 22:00, when"),
    ],
)
def test_replicas_that_are_paused_or_starting_are_named(state: str, replicas: int, why: str, advice: str) -> None:
    nodes = swarm(2, replicas)
    for name, begins in (("S1R1", "07:00"), ("S1R0", "22:00")):
        if name in nodes:
            nodes[name] = with_advert(nodes[name], state=state)
            nodes[name] = with_status(nodes[name], closed_until=begins if replicas > 1 else None)
    found = _found(nodes)[0]
    assert (found.name, found.peer) == ("stage-empty", peer(1, 0) if state == "paused" and replicas == 1 else None)
    assert found.sentence == f"stage 1 has no replica{why}"
    assert advice in found.advice


def test_a_paused_replica_that_does_not_answer_is_named_as_paused() -> None:
    nodes = swarm(2, 1)
    nodes["S1R0"] = silent(with_advert(nodes["S1R0"], state="paused"))
    assert [(f.name, f.sentence) for f in _found(nodes) if f.severity == "error"] == [
        ("stage-empty", "stage 1 has no replica: 12D3…xS1R0 is paused")
    ]


def test_a_stage_with_a_replica_that_answers_is_not_empty_whatever_one_node_says() -> None:
    nodes = swarm()
    nodes["S0R0"] = with_status(nodes["S0R0"], deserted={1: 3.0})
    assert "stage-empty" not in _names(nodes)


def test_a_stage_whose_only_replica_is_paused_is_named_with_the_command_to_resume() -> None:
    nodes = swarm(2, 1)
    nodes["S1R0"] = with_advert(nodes["S1R0"], state="paused")
    found = _found(nodes)[0]
    assert (found.name, found.peer) == ("stage-empty", peer(1, 0))
    assert "12D3…xS1R0 is paused" in found.sentence
    assert "noloco resume --dir DIR" in found.advice, "the advice is the command to type"
    assert "noloco resume --dir DIR" in next(f.advice for f in _found(nodes) if f.name == "paused")
    nodes["S1R0"] = with_status(nodes["S1R0"], closed_until="22:\x1b00")
    assert _found(nodes)[0].advice.isprintable()


def _announced(report: Report, age_s: float) -> Report:
    """The same node, with an advert of this age."""
    return replace(report, age_s=age_s)


def test_if_no_node_answers_each_is_reported_unreachable() -> None:
    nodes = {name: replace(silent(report), age_s=20.0) for name, report in swarm(2, 1).items()}
    assert [(f.severity, f.name) for f in _found(nodes)] == [("error", "unreachable")] * 2
    assert diagnose(list(nodes.values())).progress == "no status of 2 nodes"


def test_a_stage_whose_replicas_do_not_answer_is_named_once_their_adverts_are_old() -> None:
    nodes = swarm()
    for name in ("S1R0", "S1R1", "S1R2"):
        nodes[name] = silent(nodes[name])
    assert _names(nodes) == ["unreachable"] * 3, "their adverts are recent, so training may still go on"
    assert diagnose(list(nodes.values())).sentence.startswith("training: ")
    old = {name: _announced(r, 20.0) if name[1] == "1" else r for name, r in nodes.items()}
    assert _names(old) == ["stage-empty"]
    nodes["S0R0"] = with_status(nodes["S0R0"], deserted={1: 3.0})
    found = _found(nodes)
    assert [f.name for f in found] == ["stage-empty"], "the finding about the stage mentions that they do not answer"
    assert found[0].sentence.endswith("12D3…xS1R0, 12D3…xS1R1 and 12D3…xS1R2 do not answer")
    assert found[0].advice == "restart it, or start another node in its place; Connection refused"


def test_a_stage_with_one_replica_is_a_warning() -> None:
    nodes = swarm()
    del nodes["S1R0"]
    assert _found(nodes) == []
    del nodes["S1R1"]
    found = _found(nodes)
    assert [(f.severity, f.name) for f in found] == [("warning", "stage-thin")]
    assert found[0].sentence == "stage 1 has one replica: the run stops without it"
    assert diagnose(list(nodes.values())).sentence.startswith("training: "), "a warning does not replace the progress"


@pytest.mark.parametrize(("age_s", "thin"), [(12.0, False), (16.0, True)])
def test_a_replica_that_cannot_be_asked_counts_while_it_announces_itself(age_s: float, thin: bool) -> None:
    """Beside a replica whose status port is closed, the other one was said to be the only one of its stage."""
    nodes = swarm(2, 2)
    nodes["S1R0"] = _announced(silent(nodes["S1R0"]), age_s)
    assert _names(nodes) == ["unreachable", "stage-thin"][: 1 + thin]


def test_a_version_that_most_nodes_do_not_tell_is_called_unknown() -> None:
    nodes = {name: with_advert(r, version="" if name != "S0R0" else "0.1.0") for name, r in swarm().items()}
    assert _found(nodes)[0].sentence == "12D3…xS0R0: version 0.1.0, the others have an unknown one"


@pytest.mark.parametrize("stalled", ["S0R0", "S0R2"])
def test_a_stall_is_not_hidden_by_an_overdue_wait_for_the_same_node(stalled: str) -> None:
    """It was, if the peer id of the node with the overdue wait came first: a warning instead of an error."""
    nodes = swarm()
    nodes["S0R1"] = waiting(nodes["S0R1"], wait("batch", Resource.DATA, 30.0))
    for name in ("S0R0", "S0R2"):
        nodes[name] = waiting(nodes[name], wait("snapshot", peer(0, 1), 20.0, 10.0, ForRound(12)))
    nodes[stalled] = with_status(nodes[stalled], since_step_s=40.0)
    (found,) = _found(nodes)
    assert (found.name, found.severity) == ("stall", "error")
    assert found.sentence.startswith("no inner step for 40 s: node 12D3…xS0R1 of stage 0 has waited 30 s for batch")


@pytest.mark.parametrize(
    ("stages", "which"), [(2, "stages 0, 1"), (12, "stages 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"), (13, "13 stages")]
)
def test_stages_with_one_replica_are_listed_or_counted(stages: int, which: str) -> None:
    (found,) = _found(swarm(stages, 1))
    assert found.sentence == f"{which} have one replica each: the run stops without it"


def test_after_the_end_of_a_run_no_replica_is_missing() -> None:
    nodes = {name: with_advert(r, state="finished", step=5000.0) for name, r in swarm().items() if name[1] == "0"}
    assert _found(nodes) == []
    assert diagnose(list(nodes.values())).sentence == "finished: step 5,000 of 5,000 (100 %), 3 nodes, loss 2.31"
    nodes = {name: with_advert(r, state="finished", step=5000.0) for name, r in swarm().items() if name[1] != "0"}
    assert _found(nodes) == [], "stage 0 may leave first"


def test_a_run_goes_on_while_stage_0_works_although_another_node_has_finished() -> None:
    nodes = swarm(2, 2)
    nodes["S1R0"] = with_advert(nodes["S1R0"], state="finished", step=5000.0)
    assert diagnose(list(nodes.values())).sentence.startswith("training: step 1,234 of 5,000 (25 %), 4 nodes, ")


def test_a_run_has_begun_once_a_node_trains_although_none_has_ended_a_step() -> None:
    nodes = {name: with_status(r, inner_steps=0) for name, r in swarm().items()}
    assert diagnose(list(nodes.values())).sentence.startswith("training: ")


def test_of_many_stages_that_lack_replicas_three_are_named() -> None:
    nodes = {name: with_status(r, inner_steps=0, start_replicas=2) for name, r in swarm(6, 1, "starting").items()}
    named = "1 more replica of stage 0, 1 more replica of stage 1, 1 more replica of stage 2"
    assert _found(nodes)[0].sentence == f"waiting for {named} and of 3 other stages: the run has not begun"


def _not_begun(state: str) -> Nodes:
    nodes = {name: with_status(r, inner_steps=0) for name, r in swarm(2, 2, state).items()}
    return {name: waiting(r, wait("replicas of every stage", Resource.SWARM, 30.0)) for name, r in nodes.items()}


def test_a_run_that_waits_for_its_start_names_the_missing_replicas() -> None:
    nodes = _not_begun("waiting")
    assert _found(nodes) == []
    assert diagnose(list(nodes.values())).sentence == "starting: 4 nodes"
    del nodes["S1R1"]
    found = _found(nodes)
    assert [(f.severity, f.name) for f in found] == [("warning", "start")]
    assert found[0].sentence == "waiting for 1 more replica of stage 1 (for 30 s): the run has not begun"
    nodes["new"] = with_advert(replace(swarm()["S2R2"], peer=peer(2, 2)), stage=-1, state="starting")
    nodes["new"] = with_status(nodes["new"], inner_steps=0)
    assert _found(nodes) == [], "a node that has not chosen its stage yet will take that one"


# --- order, texts, limits ---------------------------------------------------------------------------------------------


def test_the_worst_finding_comes_first() -> None:
    nodes = swarm()
    nodes["S0R0"] = with_advert(nodes["S0R0"], state="paused")
    nodes["S0R1"] = with_advert(nodes["S0R1"], microbatches_per_s=1.0)
    nodes["S1R0"] = replace(nodes["S1R0"], clock_ahead_s=120.0)
    nodes["S2R0"] = with_figures(nodes["S2R0"], loop_silent_s=42.0)
    assert _names(nodes) == ["loop", "clock", "slow-node", "paused"]


def test_a_node_with_a_known_trouble_is_not_also_reported_as_stalled() -> None:
    nodes = swarm()
    waits = (wait("checkpoint", Resource.DISK, 39.0),)
    nodes["S1R0"] = with_status(troubled(nodes["S1R0"], "clouds", "it rains"), since_step_s=40.0, waits=waits)
    assert _names(nodes) == ["clouds"]
    nodes["S1R0"] = with_status(nodes["S1R0"], troubles=())
    nodes["S1R0"] = with_advert(nodes["S1R0"], state="draining")
    assert _names(nodes) == ["stall", "draining"], "that it leaves is no trouble"


def test_texts_of_strangers_become_one_bounded_printable_line() -> None:
    nodes = swarm()
    nodes["S1R0"] = troubled(nodes["S1R0"], "x\x1b[2J", "a\nb\x1b[31m" + "c" * 10_000)
    found = _found(nodes)[0]
    assert found.sentence.isprintable()
    assert found.name.isprintable()
    assert len(found.sentence) <= LINE_CHARACTERS
    assert "a b" in found.sentence


def test_a_stranger_cannot_fill_the_screen_with_troubles() -> None:
    nodes = swarm()
    troubles = tuple(Trouble(f"t{number}", "it rains", 1.0) for number in range(9))
    nodes["S1R0"] = with_status(nodes["S1R0"], troubles=troubles)
    assert _names(nodes) == [f"t{number}" for number in range(8)]


def test_white_space_in_a_line_is_collapsed() -> None:
    assert line("a\r\n\tb") == "a b"


def test_without_nodes_there_are_no_findings() -> None:
    assert diagnose([]).findings == ()
    assert diagnose([]).sentence == "no node was found"
