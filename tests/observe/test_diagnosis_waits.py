"""Following waits from node to node to their cause, and the diagnosis of arbitrary statuses."""

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
from diagnosed import (
    aside,
    gradient_of,
    peer,
    silent,
    swarm,
    wait,
    waiting,
    why,
    with_advert,
    with_figures,
    with_status,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_p2p.core.members import STATES
from noloco_p2p.core.messages import Advert
from noloco_p2p.core.status import (
    AnyReplica,
    ForMicrobatch,
    ForRound,
    NodeFigures,
    Resource,
    SeenPeer,
    Serving,
    Status,
    Task,
    Trouble,
    Unknown,
    Wait,
)
from noloco_p2p.observe.diagnosis import causes
from noloco_p2p.observe.diagnosis.causes import Hop, WaitPaths
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import LINE_CHARACTERS, Finding, Report
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView


def _found(nodes: dict[str, Report]) -> list[Finding]:
    return list(diagnose(list(nodes.values())).findings)


def _names(nodes: dict[str, Report]) -> list[str]:
    return [finding.name for finding in _found(nodes)]


def test_a_chain_of_waits_leads_to_the_stuck_device() -> None:
    """S0R0 → S1R1 → S2R2, whose device is stuck. S2R0 waits for microbatches from stage 1, S0R1 continues."""
    nodes = swarm()
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 20.0))
    call = Serving(peer(0, 0), why(5), 20.0)
    nodes["S1R1"] = waiting(nodes["S1R1"], *gradient_of(2, 2, 5, 19.0), serving=[call])
    call = Serving(peer(1, 1), why(5), 19.0)
    nodes["S2R2"] = waiting(nodes["S2R2"], wait("backward", Resource.DEVICE, 19.0, 60.0, why(5)), serving=[call])
    nodes["S2R0"] = waiting(nodes["S2R0"], wait("microbatches", AnyReplica(1), 18.0))
    nodes["S0R1"] = waiting(nodes["S0R1"], *gradient_of(1, 0, 6, 0.1))
    found = _found(nodes)
    assert [(f.name, f.peer) for f in found] == [("device", peer(2, 2))]
    assert found[0].sentence.endswith("its device has been stuck in backward for 19 s; that holds back 3 nodes")


def test_thousands_of_waits_that_strangers_claim_are_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten nodes that claimed to wait for each other and for a stage of 1,000 held `noloco top` up for 37 s."""
    nodes, looked = swarm(2, 10), list[int]()

    def of_stage(swarm: SwarmView, stage: int, states: Collection[str]) -> list[Report]:
        looked.append(stage)
        return whole(swarm, stage, states)

    for number in range(8):
        whys = [why(10 * number + each) for each in range(20)]
        calls = [wait("gradient", peer(0, (number + 1 + k) % 8), 90.0, None, one) for k, one in enumerate(whys)]
        steps = [wait("microbatch", Resource.INNER_STEP, 90.0, None, one) for one in whys]
        stage = [wait("microbatches", AnyReplica(0), 90.0)] * 20
        served = [Serving(peer(0, 0), why(counter), 9.0) for counter in range(80)]
        nodes[f"S0R{number}"] = waiting(nodes[f"S0R{number}"], *calls, *steps, *stage, serving=served)
    whole = SwarmView.of_stage
    monkeypatch.setattr(SwarmView, "of_stage", of_stage)
    diagnose(list(nodes.values()))
    assert len(looked) < 4 * len(nodes)


def test_what_a_crowd_of_strangers_claims_takes_no_longer_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 nodes that claimed to wait for each other took 7 s, and each further one made all paths longer."""
    nodes, followed = swarm(1, 40), list[str]()

    def call(paths: WaitPaths, caller: str, *others: Any) -> Iterator[Hop]:
        followed.append(caller)
        return whole(paths, caller, *others)

    for number, name in enumerate(nodes):
        waits = [wait("gradient", peer(0, (number + each) % 40), 90.0, None, why(each)) for each in range(1, 20)]
        served = [Serving(peer(0, 0), why(counter), 9.0) for counter in range(20)]
        nodes[name] = waiting(nodes[name], *waits, serving=served)
    whole = WaitPaths._call
    monkeypatch.setattr(WaitPaths, "_call", call)
    diagnose(list(nodes.values()))
    assert len(followed) > 15_000
    followed.clear()
    monkeypatch.setattr(causes, "HOPS_LIMIT", 40 * 25)
    diagnose(list(nodes.values()))
    assert len(followed) < 40 * 60


def _stuck(report: Report) -> Report:
    """The same node, with an event loop that is stuck."""
    return with_figures(report, loop_silent_s=70.0)


def _called(nodes: dict[str, Report], caller: str, callee: str, counter: int, since_s: float) -> dict[str, Report]:
    """Have a node call another one for a microbatch, in addition to what the two do already."""
    for name, changes in (
        (caller, {"waits": gradient_of(int(callee[1]), int(callee[3]), counter, since_s)}),
        (callee, {"serving": (Serving(peer(int(caller[1]), int(caller[3])), why(counter), since_s),)}),
    ):
        status = nodes[name].status
        assert status is not None
        nodes[name] = with_status(nodes[name], **{key: getattr(status, key) + more for key, more in changes.items()})
    return nodes


HOLDS_BACK: dict[str, tuple[Callable[[dict[str, Report]], object], int]] = {
    "a call that waits, for a silent loop": (lambda nodes: _called(nodes, "S0R0", "S2R2", 5, 9.0), 1),
    "a call that has not arrived there": (
        lambda nodes: nodes.update(S1R0=waiting(nodes["S1R0"], wait("gradient", peer(2, 2), 9.0, 60.0, why(5)))),
        1,
    ),
    "a call that has just begun": (lambda nodes: _called(nodes, "S1R0", "S2R2", 5, 0.5), 0),
    "a retried call of an old microbatch": (
        lambda nodes: nodes.update(
            S1R0=waiting(
                nodes["S1R0"],
                wait("gradient", AnyReplica(2), 20.0, None, why(5)),
                wait("gradient", peer(2, 2), 0.5, 60.0, why(5)),
            )
        ),
        1,
    ),
    "another microbatch of the called node": (
        lambda nodes: _called(_called(nodes, "S0R0", "S1R1", 5, 9.0), "S1R1", "S2R2", 6, 9.0),
        1,
    ),
    "the same microbatch of the called node": (
        lambda nodes: _called(_called(nodes, "S0R0", "S1R1", 5, 9.0), "S1R1", "S2R2", 5, 8.9),
        2,
    ),
    "another replica than the one that is called": (lambda nodes: _called(nodes, "S1R0", "S2R1", 5, 9.0), 0),
    "microbatches from any replica of its stage, some of which are not known": (
        lambda nodes: nodes.update(
            S0R0=waiting(nodes["S0R0"], wait("microbatches", AnyReplica(2), 9.0)), S2R1=silent(nodes["S2R1"])
        ),
        1,
    ),
    "a duty that holds nothing up": (
        lambda nodes: nodes.update(S0R0=waiting(nodes["S0R0"], wait("description", peer(2, 2), 60.0, idle=True))),
        0,
    ),
    "a snapshot": (
        lambda nodes: nodes.update(S0R0=waiting(nodes["S0R0"], wait("snapshot", peer(2, 2), 9.0, 60.0, ForRound(12)))),
        1,
    ),
    "more than is followed": (
        lambda nodes: nodes.update(
            S0R0=waiting(
                nodes["S0R0"],
                *(wait(f"batch {number}", Resource.DATA, 9.0, why=why(number)) for number in range(64)),
                wait("snapshot", peer(2, 2), 9.0, 60.0, ForRound(12)),
            )
        ),
        0,
    ),
    "a circle of others": (
        lambda nodes: nodes.update(
            S0R0=waiting(nodes["S0R0"], wait("snapshot", peer(0, 1), 3.0, 60.0, ForRound(12))),
            S0R1=waiting(nodes["S0R1"], wait("snapshot", peer(0, 2), 3.0, 60.0, ForRound(12))),
            S0R2=waiting(
                nodes["S0R2"],
                wait("snapshot", peer(0, 1), 3.0, 60.0, ForRound(12)),
                wait("weights", peer(2, 2), 3.0, 60.0, ForRound(12)),
            ),
        ),
        3,
    ),
    "a wait of a node whose own loop is stuck": (
        lambda nodes: nodes.update(
            S2R2=waiting(nodes["S2R2"], wait("snapshot", peer(0, 0), 9.0, 60.0, ForRound(12))),
            S0R0=with_advert(nodes["S0R0"], microbatches_per_s=1.0),
        ),
        0,
    ),
}


@pytest.mark.parametrize("case", HOLDS_BACK)
def test_a_stuck_node_holds_back_those_whose_waits_lead_to_it(case: str) -> None:
    plant, held = HOLDS_BACK[case]
    nodes = swarm()
    plant(nodes)
    nodes["S2R2"] = _stuck(nodes["S2R2"])
    found = [finding for finding in _found(nodes) if finding.severity == "error" and finding.name != "unreachable"]
    assert [(f.name, f.peer) for f in found] == [("loop", peer(2, 2))]
    assert (
        found[0].sentence.partition("; ")[2]
        == {
            0: "",
            1: "that holds back 1 node",
            2: "that holds back 2 nodes",
            3: "that holds back 3 nodes",
        }[held]
    )


def test_a_stall_is_blamed_on_the_oldest_wait_that_leads_to_no_other_node() -> None:
    nodes = swarm()
    nodes["S0R0"] = with_status(nodes["S0R0"], waits=(), since_step_s=40.0)
    nodes["S1R0"] = waiting(
        nodes["S1R0"],
        wait("data", Resource.DATA, 39.0, None, why(5)),
        wait("place in the inner step", Resource.INNER_STEP, 38.0, None, why(6)),
        wait("checkpoint", Resource.DISK, 20.0, None, why(5)),
    )
    nodes["S0R1"] = with_status(nodes["S0R1"], waits=(), since_step_s=39.0)
    _called(_called(nodes, "S0R0", "S1R0", 5, 39.5), "S0R1", "S1R0", 6, 38.5)
    found = _found(nodes)
    assert [(f.name, f.peer) for f in found] == [("stall", peer(1, 0))]
    assert found[0].sentence.endswith("that holds back 2 nodes")
    assert found[0].advice == "check the log of that node; restarting it costs one outer round"
    assert "no inner step for 40 s: node 12D3…xS1R0 of stage 1 has waited 39 s for data from data" in found[0].sentence


def test_what_waits_for_an_overdue_node_is_counted_but_makes_it_no_error() -> None:
    nodes = swarm()
    nodes["S1R0"] = with_status(nodes["S1R0"], waits=(wait("batch", Resource.DATA, 20.0, 10.0, why(5)),))
    _called(nodes, "S0R0", "S1R0", 5, 20.5)
    (found,) = _found(nodes)
    assert (found.severity, found.name) == ("warning", "overdue")
    assert found.sentence.endswith("longer than it should take; that holds back 1 node")
    nodes["S1R0"] = with_advert(nodes["S1R0"], microbatches_per_s=1.0)
    (found,) = _found(nodes)
    assert found.name == "slow-node"
    assert found.sentence.endswith("holds back stage 1"), "whom a slow node holds back is not counted"


def test_a_call_waiting_for_admission_waits_for_whatever_its_callee_waits_for() -> None:
    """A microbatch of S0R0 waits for admission at S1R0, whose inner step waits for a gradient of S2R0, now dead."""
    nodes = swarm()
    call = Serving(peer(0, 0), why(5), 20.0)
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 0, 5, 20.0))
    at_the_door = wait("place in the inner step", Resource.INNER_STEP, 20.0, 40.0, why(5))
    nodes["S1R0"] = waiting(nodes["S1R0"], at_the_door, *gradient_of(2, 0, 4, 21.0), serving=[call])
    nodes["S2R0"] = silent(nodes["S2R0"])
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("error", "unreachable", peer(2, 0))]
    assert found[0].sentence.endswith("that holds back 2 nodes")


def test_a_call_that_has_not_arrived_means_a_half_open_link() -> None:
    nodes = swarm()
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 9.0))
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("error", "half-open-link", peer(1, 1))]
    assert "node 12D3…xS0R0 of stage 0 cannot reach node 12D3…xS1R1 of stage 1 at 192.0.2.2:4101" in found[0].sentence
    assert found[0].sentence.endswith(
        "(a call has been under way for 9.0 s and has not arrived); that holds back 1 node"
    )
    nodes["S1R1"] = with_advert(nodes["S1R1"], addresses=())
    assert "cannot reach node 12D3…xS1R1 of stage 1, although" in _found(nodes)[0].sentence
    nodes["S1R1"] = with_advert(swarm()["S1R1"], state="paused")
    assert _names(nodes) == ["paused"], "it need not answer"
    nodes["S1R1"] = waiting(swarm()["S1R1"], serving=[Serving(peer(0, 0), why(5), 9.0)])
    assert _found(nodes) == [], "the call has arrived"
    nodes["S1R1"] = swarm()["S1R1"]
    nodes["S0R0"] = with_status(nodes["S0R0"], step_took_s=5.0)
    assert _found(nodes) == [], "if steps take 5 s, a call may take 9 s"
    nodes["S0R0"] = with_status(nodes["S0R0"], step_took_s=None)
    assert _found(nodes) == [], "before the first step the usual duration of a call is unknown"
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 16.0))
    assert [f.name for f in _found(nodes)] == ["half-open-link"]


def test_a_call_whose_activation_does_not_arrive_means_a_half_open_link() -> None:
    nodes = swarm()
    _called(nodes, "S0R0", "S1R1", 5, 9.5)
    _called(nodes, "S1R1", "S2R0", 5, 9.2)
    nodes["S2R0"] = with_status(nodes["S2R0"], waits=(wait("activation", peer(1, 1), 9.0, 60.0, why(5)),))
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("error", "half-open-link", peer(2, 0))]
    assert found[0].sentence.startswith("node 12D3…xS1R1 of stage 1 cannot reach node 12D3…xS2R0 of stage 2")
    assert found[0].sentence.endswith("that holds back 3 nodes")


def test_a_node_that_waits_for_the_activation_of_a_stuck_caller_is_not_to_blame() -> None:
    nodes = swarm()
    nodes["S0R0"] = _stuck(nodes["S0R0"])
    late = waiting(nodes["S1R1"], wait("activation", peer(0, 0), 40.0, 60.0, why(5)))
    nodes["S1R1"] = with_status(late, since_step_s=40.0)
    found = _found(nodes)
    assert [f.name for f in found] == ["loop"]
    assert found[0].sentence.endswith("that holds back 1 node")


def test_a_healthy_peer_set_aside_by_one_node_means_a_half_open_link() -> None:
    nodes = swarm()
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 1): 7.5})
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("warning", "half-open-link", peer(1, 1))]
    nodes["S1R1"] = with_advert(nodes["S1R1"], microbatches_per_s=1.0)
    assert _names(nodes) == ["half-open-link", "slow-node"], "a slow node can be reached"
    nodes["S1R1"] = swarm()["S1R1"]
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 1): 0.5})
    assert _found(nodes) == [], "a single failure is not a finding"
    nodes["S0R0"] = _stuck(aside(nodes["S0R0"], {peer(1, 1): 7.5}))
    assert _names(nodes) == ["loop"], "its own loop is blocked, which explains that it reaches nobody"


@pytest.mark.parametrize("name", ["S0R0", "S1R1"])
def test_a_node_that_does_not_train_need_not_be_reached(name: str) -> None:
    nodes = swarm()
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 1): 7.5})
    nodes[name] = with_advert(nodes[name], state="paused")
    assert _names(nodes) == ["paused"]


def test_a_node_that_reaches_no_replica_of_the_next_stage_has_half_open_links_to_all() -> None:
    nodes = swarm()
    nodes["S0R0"] = with_status(nodes["S0R0"], deserted={1: 3.0})
    expected = [("error", "half-open-link", peer(1, replica)) for replica in range(3)]
    assert [(f.severity, f.name, f.peer) for f in _found(nodes)] == expected
    nodes = swarm(2, 1)
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 0): 7.5})
    assert "half-open-link" in _names(nodes), "one caller does not show that a port is closed"


def test_a_healthy_peer_set_aside_by_all_means_a_closed_port() -> None:
    nodes = swarm()
    for name in ("S0R0", "S0R1", "S0R2"):
        nodes[name] = aside(nodes[name], {peer(1, 1): 7.5})
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("error", "port", peer(1, 1))]
    assert "at 192.0.2.2:4101 cannot be reached by 12D3…xS0R0, 12D3…xS0R1 and 12D3…xS0R2, alth" in found[0].sentence
    some = {**nodes, "S0R2": swarm()["S0R2"]}
    assert _names(some) == ["half-open-link"] * 2, "the third node reaches it"
    nodes["S1R1"] = with_figures(nodes["S1R1"], loop_silent_s=30.0)
    assert _names(nodes) == ["loop"], "its event loop is blocked, which explains that it cannot be reached"


def test_a_node_without_an_advert_that_others_wait_for_is_named() -> None:
    nodes = swarm()
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 9.0))
    del nodes["S1R1"]
    found = _found(nodes)
    assert [(f.name, f.peer) for f in found] == [("unreachable", peer(1, 1))]
    sentence = "node 12D3…xS1R1 is no longer in the directory, but node 12D3…xS0R0 waits for it"
    assert found[0].sentence == f"{sentence}; that holds back 1 node"
    waits = wait("gradient", AnyReplica(1), 9.0, None, why(5)), wait("gradient", peer(1, 1), 0.5, 60.0, why(5))
    nodes["S0R0"] = waiting(nodes["S0R0"], *waits)
    assert _found(nodes) == [], "the directory may not have it yet"


def test_consequences_of_a_blocked_loop_are_not_reported_separately() -> None:
    nodes = swarm()
    call = Serving(peer(0, 0), why(5), 20.0)
    stuck = waiting(nodes["S1R0"], wait("forward", Resource.DEVICE, 70.0, 60.0, why(5)), serving=[call])
    nodes["S1R0"] = with_advert(with_figures(stuck, loop_silent_s=70.0), microbatches_per_s=1.0)
    nodes["S0R0"] = with_status(waiting(nodes["S0R0"], *gradient_of(1, 0, 5, 65.0)), since_step_s=66.0)
    found = _found(nodes)
    assert [f.name for f in found] == ["loop"]
    assert found[0].sentence.endswith("that holds back 1 node")


def test_circular_waits_terminate() -> None:
    nodes = swarm(1, 3)
    for at, to in ((0, 1), (1, 2), (2, 0)):
        held = waiting(nodes[f"S0R{at}"], wait("snapshot", peer(0, to), 30.0, 90.0, ForRound(12)))
        nodes[f"S0R{at}"] = with_status(held, since_step_s=30.0)
    found = _found(nodes)
    assert [f.name for f in found] == ["stall"] * len(found)
    assert found


# --- never raises -----------------------------------------------------------------------------------------------------

PEERS = [peer(s, r) for s in range(2) for r in range(2)]
LARGEST = math.nextafter(2.0**63, 0.0)
"""The largest number that the decoders of statuses and adverts accept."""
NUMBERS = st.floats(-LARGEST, LARGEST) | st.integers(-(2**63) + 1, 2**63 - 1) | st.sampled_from([LARGEST, 5e-324])
COUNTS = st.integers(-3, 5) | st.sampled_from([2**63 - 1, 1 - 2**63, 2**62])
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from([*PEERS, "microbatch 5 of x", "\ud800\x1b"]))
PURPOSES = st.one_of(
    st.builds(ForMicrobatch, TEXTS, COUNTS, st.booleans()),
    st.builds(ForRound, COUNTS, st.booleans()),
    st.sampled_from(Task),
    st.builds(Unknown, TEXTS),
)
WHOM = st.one_of(TEXTS, st.builds(AnyReplica, COUNTS), st.sampled_from(Resource), st.builds(Unknown, TEXTS))
WAITS = st.builds(Wait, TEXTS, WHOM, NUMBERS, st.none() | NUMBERS, st.none() | PURPOSES, st.booleans())
ADVERTS = st.builds(
    Advert,
    peer_id=st.sampled_from(PEERS),
    run_id=st.sampled_from(["r", "s"]),
    stage=COUNTS,
    addresses=st.lists(TEXTS, max_size=1).map(tuple),
    metrics=TEXTS,
    state=st.one_of(st.sampled_from(STATES), TEXTS),
    step=NUMBERS,
    microbatches_per_s=NUMBERS,
    version=TEXTS,
    announced_at=NUMBERS,
)
STATUSES = st.builds(
    Status,
    advert=ADVERTS,
    run_name=TEXTS,
    stages=COUNTS,
    steps=COUNTS,
    inner_steps=COUNTS,
    start_replicas=COUNTS,
    waits=st.lists(WAITS, max_size=4).map(tuple),
    serving=st.lists(st.builds(Serving, TEXTS, PURPOSES, NUMBERS), max_size=2).map(tuple),
    seen=st.lists(st.builds(SeenPeer, ADVERTS, NUMBERS, NUMBERS), max_size=2).map(tuple),
    deserted=st.dictionaries(COUNTS, NUMBERS, max_size=2),
    step_took_s=st.none() | NUMBERS,
    since_step_s=st.none() | NUMBERS,
    troubles=st.lists(st.builds(Trouble, TEXTS, TEXTS, NUMBERS), max_size=2).map(tuple),
    figures=st.builds(
        NodeFigures,
        tokens_per_s=NUMBERS,
        loss=st.none() | NUMBERS,
        microbatches=st.dictionaries(st.sampled_from(["done", "nonfinite"]), COUNTS, max_size=2),
        loop_silent_s=NUMBERS,
        disk_free_bytes=st.none() | COUNTS,
    ),
)
REPORTS = st.lists(
    st.builds(
        Report,
        st.sampled_from(PEERS),
        ADVERTS,
        st.none() | STATUSES,
        TEXTS,
        clock_ahead_s=st.none() | NUMBERS,
        age_s=NUMBERS,
    ),
    max_size=4,
    unique_by=lambda report: report.peer,
)


@given(reports=REPORTS)
@settings(max_examples=60)
def test_the_diagnosis_does_not_raise_on_arbitrary_reports(reports: list[Report]) -> None:
    found = diagnose(reports)
    advice = (finding.advice for finding in found.findings)
    for text in (found.sentence, found.progress, *(finding.sentence for finding in found.findings), *advice):
        assert text.isprintable()
        assert len(text) <= LINE_CHARACTERS
    assert found.findings == diagnose(reports[::-1]).findings
