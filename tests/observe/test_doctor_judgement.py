"""Judgements of `noloco doctor`: whose clock is wrong, and which speed the links and the device allow."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from diagnosed import advert

from noloco_p2p.config import NodeConfig, OuterSettings, RunManifest
from noloco_p2p.core.messages import Advert
from noloco_p2p.errors import Declined
from noloco_p2p.io.dht import join_handshake
from noloco_p2p.launch.settings import Overrides
from noloco_p2p.observe.bandwidth_probe import LinkProbe, SnapshotTransfer
from noloco_p2p.observe.diagnosis.findings import Finding
from noloco_p2p.observe.doctor import peers
from noloco_p2p.observe.doctor.doctor_report import DoctorReport
from noloco_p2p.observe.doctor.examination import Examination
from noloco_p2p.observe.doctor.run_requirements import RunRequirements, StageLinks, expected_rate, round_seconds

# --- clocks -------------------------------------------------------------------------------------------------------

TTL_S = 30.0


def judged(**ahead: float) -> list[Finding]:
    return peers.judge_clocks(ahead, TTL_S)


def test_clocks_that_agree_are_ok() -> None:
    assert [(f.severity, f.peer) for f in judged(a=0.2, b=-0.4)] == [("ok", None)]
    assert judged() == []


@pytest.mark.parametrize(("off", "severity"), [(-120.0, "error"), (120.0, "error"), (4.0, "warning")])
def test_if_the_others_agree_this_machines_clock_is_the_wrong_one(off: float, severity: str) -> None:
    (found,) = judged(a=off, b=off + 0.3)
    assert (found.severity, found.name, found.peer) == (severity, "clock", None)
    way = "behind" if off > 0 else "ahead of"
    assert f"this machine's clock is {abs(off):.1f} s {way} those of 2 nodes" == found.sentence


def test_the_one_node_whose_clock_is_off_is_named() -> None:
    (found,) = judged(a=0.1, b=120.0, c=0.0)
    assert (found.severity, found.name, found.peer) == ("error", "clock", "b")
    assert "119.9 s ahead of" in found.sentence
    (found,) = judged(a=0.1, b=-121.0)
    assert (found.peer, found.severity) == ("b", "error"), "this machine agrees with node a"


def test_if_no_clocks_agree_one_counts_as_right_whatever_the_order() -> None:
    found = judged(c=300.0, b=200.0, a=100.0)
    assert [f.peer for f in found] == ["a", "b", "c"]
    assert found[0].sentence == "the clocks of node a and of this machine are 100.0 s apart"
    assert found[2].sentence == "the clock of node c is 200.0 s ahead of the others'"


@pytest.mark.parametrize("joined", [2, peers.MAX_CLOCKS, peers.MAX_CLOCKS + 3])
def test_only_so_many_nodes_are_asked_for_the_time(joined: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them this machine has joined, which have told theirs."""
    asked: list[str] = []

    class Linked:
        async def links(self) -> set[str]:
            return {f"node {number:02}" for number in range(20)}

    async def fetch_manifest(libp2p: object, peer: str) -> tuple[bytes, float]:
        asked.append(peer)
        return b"", 0.5

    monkeypatch.setattr(join_handshake, "fetch_manifest", fetch_manifest)
    libp2p: Any = Linked()
    ahead = {f"node {number:02}": 0.0 for number in range(joined)}
    found = asyncio.run(peers.clocks(DoctorReport(), libp2p, ahead))
    assert len(asked) == max(0, peers.MAX_CLOCKS - joined)
    assert len(found) == max(peers.MAX_CLOCKS, joined)


def test_a_joined_node_that_does_not_tell_the_run_is_an_error_only_if_no_other_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fetch_manifest(libp2p: object, peer: str) -> tuple[bytes, float]:
        if peer == "starting":
            raise Declined("it is still starting")
        return RunManifest().canonical_json(), 0.5

    monkeypatch.setattr(join_handshake, "fetch_manifest", fetch_manifest)
    for joined, severities in ((["starting", "here"], ["ok", "warning"]), (["starting"], ["error"])):
        report, libp2p = DoctorReport(), Mock(joined=[Mock(peer_id=peer) for peer in joined])
        manifest, ahead = asyncio.run(peers.ask_run(report, libp2p, Overrides(())))
        assert (manifest is None, [*ahead]) == (joined == ["starting"], joined[1:])
        assert [found.severity for _, found in report.findings] == severities


# --- expectations -------------------------------------------------------------------------------------------------

MEGABYTE = 1_000_000


def expected(following: StageLinks | None, max_in_flight: int, stage: int = 0, stages: int = 2) -> tuple[float, str]:
    """Microbatches per second of a stage that takes 0.1 s for each, with hidden states of 1 MB."""
    return expected_rate(0.1, (MEGABYTE, MEGABYTE), stage, stages - 1 - stage, following, max_in_flight)


def test_with_a_fast_link_the_device_is_the_bound() -> None:
    assert expected(StageLinks(0.001, 1e9), 4) == (10.0, "device")
    assert expected(None, 4) == (10.0, "device")


def test_a_narrow_link_limits_by_bandwidth_and_a_long_one_by_places_in_flight() -> None:
    rate, bound = expected(StageLinks(0.001, 5e6), 8)
    assert bound == "link"
    assert rate == pytest.approx(5)
    rate, bound = expected(StageLinks(1.0, 1e9), 4)
    assert bound == "places in flight"
    assert rate == pytest.approx(4 / (0.1 + 1.0 + 0.002 + 0.1))


def test_a_middle_stage_transfers_twice_as_much_and_the_last_sends_nothing_on() -> None:
    assert expected(StageLinks(0.001, 1e7), 8, stage=1, stages=3)[0] == pytest.approx(5)
    assert expected(StageLinks(9.0, 10.0), 1, stage=2, stages=3) == (10.0, "device")


def test_an_outer_round_takes_its_transfer_time_and_a_round_trip() -> None:
    assert round_seconds(10_000_000, StageLinks(0.5, 1e6)) == 10.5
    assert round_seconds(10_000_000, StageLinks(0.5, None)) is None


@pytest.mark.parametrize(("announced", "found"), [(1e-310, None), (4.0, (0.25, "as announced by its replicas"))])
def test_an_absurd_speed_that_a_replica_announces_is_ignored(announced: float, found: tuple[float, str] | None) -> None:
    """The time of a microbatch was infinite, which noloco doctor --json could not write: a traceback."""
    needs = RunRequirements(DoctorReport(), RunManifest(), NodeConfig(), None)
    replica = replace(advert(0, 0), microbatches_per_s=announced)
    assert asyncio.run(needs._device_seconds(0, 1000, [replica])) == found


def test_a_running_node_is_not_one_of_the_replicas_that_it_exchanges_weights_with() -> None:
    """Its links to itself were measured, and it seemed to fetch a vector from itself, too."""
    asked: list[str] = []

    class Probe(LinkProbe):
        def __init__(self) -> None:
            pass

        async def round_trip_s(self, peer: Advert, calls: int) -> float:
            asked.append(peer.peer_id)
            return 0.0 if peer.peer_id == own.peer_id else 0.1

        async def transfer(self, peer: Advert, limit_s: float) -> SnapshotTransfer:
            asked.append(peer.peer_id)
            return SnapshotTransfer(1 << 20, 1.0, True)

    own, *mates = replicas = [replace(advert(0, number), microbatches_per_s=1.0) for number in range(3)]
    run = RunManifest(outer=OuterSettings(rule="diloco"))
    needs = RunRequirements(DoctorReport(), run, NodeConfig(), None, own.peer_id)

    async def examine() -> None:
        links = await needs.measure_links(Probe(), 0, replicas)
        assert links == StageLinks(0.1, float(1 << 20))
        await needs.check_speed(0, 1_000, replicas, [links, None])

    asyncio.run(examine())
    assert asked == [*(mate.peer_id for mate in mates), mates[0].peer_id]
    vectors = 2 * run.outer.vector_bytes(1_000, run.compute_dtype)
    assert needs.report.figures["expected_s_per_outer_round"] == pytest.approx(0.1 + vectors / (1 << 20))


def test_a_running_node_is_examined_at_its_own_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The room for its checkpoints and its speed were those of the stage that a further node would have taken."""
    speeds: list[int] = []

    async def sizes(*_: object) -> list[int]:
        return [1_000, 2_000]

    async def speed(needs: RunRequirements, stage: int, *_: object) -> None:
        speeds.append(stage)

    monkeypatch.setattr(RunRequirements, "check", sizes)
    monkeypatch.setattr(RunRequirements, "check_speed", speed)
    own, run = advert(0, 0), RunManifest(stages=2)
    for running, local in ((own.peer_id, NodeConfig()), (own.peer_id, NodeConfig(stage=1)), (None, NodeConfig())):
        examination = Examination(DoctorReport(), Overrides(()), tmp_path, local, None, running)
        asyncio.run(examination._examine_run(Mock(), "me", run, [own], answered=False))
    assert speeds == [0, 1, 1], "with a stage in the settings that one; a further node would take stage 1"


@pytest.mark.parametrize("stage", [0, 1])
def test_the_device_is_measured_on_the_given_stage(stage: int) -> None:
    from noloco_p2p.compute.stage_timing import time_stage

    assert 0 < time_stage(RunManifest(), stage, "cpu", repeats=1) < 60
