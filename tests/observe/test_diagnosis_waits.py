"""Following waits from node to node to their cause, and the diagnosis of arbitrary statuses."""

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
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import LINE_CHARACTERS, Finding, Report


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
    nodes["S1R1"] = waiting(nodes["S1R1"], serving=[Serving(peer(0, 0), why(5), 9.0)])
    assert _found(nodes) == [], "the call has arrived"
    nodes["S1R1"] = swarm()["S1R1"]
    nodes["S0R0"] = with_status(nodes["S0R0"], step_took_s=5.0)
    assert _found(nodes) == [], "if steps take 5 s, a call may take 9 s"
    nodes["S0R0"] = with_status(nodes["S0R0"], step_took_s=None)
    assert _found(nodes) == [], "before the first step the usual duration of a call is unknown"
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 16.0))
    assert [f.name for f in _found(nodes)] == ["half-open-link"]


def test_a_healthy_peer_set_aside_by_one_node_means_a_half_open_link() -> None:
    nodes = swarm()
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 1): 7.5})
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("warning", "half-open-link", peer(1, 1))]
    nodes["S0R0"] = aside(nodes["S0R0"], {peer(1, 1): 0.5})
    assert _found(nodes) == [], "a single failure is not a finding"


def test_a_healthy_peer_set_aside_by_all_means_a_closed_port() -> None:
    nodes = swarm()
    for name in ("S0R0", "S0R1", "S0R2"):
        nodes[name] = aside(nodes[name], {peer(1, 1): 7.5})
    found = _found(nodes)
    assert [(f.severity, f.name, f.peer) for f in found] == [("error", "port", peer(1, 1))]
    assert "at 192.0.2.2:4101 cannot be reached by" in found[0].sentence
    nodes["S1R1"] = with_figures(nodes["S1R1"], loop_silent_s=30.0)
    assert _names(nodes) == ["loop"], "its event loop is blocked, which explains that it cannot be reached"


def test_a_node_without_an_advert_that_others_wait_for_is_named() -> None:
    nodes = swarm()
    nodes["S0R0"] = waiting(nodes["S0R0"], *gradient_of(1, 1, 5, 9.0))
    del nodes["S1R1"]
    found = _found(nodes)
    assert [(f.name, f.peer) for f in found] == [("unreachable", peer(1, 1))]


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
NUMBERS = st.one_of(
    st.floats(), st.integers(), st.sampled_from([10**400, -(10**400), 1e308, -1e308, float("nan"), float("inf")])
)
COUNTS = st.one_of(st.integers(-3, 5), st.sampled_from([10**400, -(10**400), 2**62]))
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
)


@given(reports=REPORTS)
@settings(max_examples=60)
def test_the_diagnosis_does_not_raise_on_arbitrary_reports(reports: list[Report]) -> None:
    found = diagnose(reports)
    advice = (finding.advice for finding in found.findings)
    for text in (found.sentence, found.progress, *(finding.sentence for finding in found.findings), *advice):
        assert text.isprintable()
        assert len(text) <= LINE_CHARACTERS
    assert found.findings == diagnose(reports[::-1]).findings or len({r.peer for r in reports}) < len(reports)
