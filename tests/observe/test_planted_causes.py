"""Nine causes, each planted in a healthy swarm: the diagnosis names the cause and the node, and nothing before that.

A stage without a replica, a slow node, a half-open link and a stuck device are planted in simulated swarms of real
nodes. The others are planted in one swarm of real processes, and removed again.
"""

import asyncio
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvloop
from barriers import barrier
from processes import LONGEST_S, SMALL, NodeProcess, node_processes, settings, wait_until
from short_runs import LIMITS, manifest_for

from noloco_p2p.config import DirectorySettings, NodeConfig
from noloco_p2p.core.messages import PeerId
from noloco_p2p.io.dht.identity import peer_id_of
from noloco_p2p.launch.settings import read
from noloco_p2p.observe import survey
from noloco_p2p.observe.diagnosis.diagnose import diagnose
from noloco_p2p.observe.diagnosis.findings import Finding, Report
from noloco_p2p.observe.doctor import examination, machine, peers, run_requirements
from noloco_p2p.observe.doctor.doctor_report import DoctorReport
from noloco_p2p.observe.doctor.examination import examine
from noloco_p2p.sim.links import Link
from noloco_p2p.sim.process import SimProcess
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

WELL_S, PLANTED_S = (4.0, 5.0, 6.0, 7.0), 8.05
"""Virtual seconds: when a swarm is observed while healthy, and when the cause is planted."""
FOR_EVER = 1e9


# --- simulated swarms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """An observer's view of a swarm at one moment."""

    findings: list[Finding]
    sentence: str

    @property
    def bad(self) -> list[tuple[str, PeerId | None]]:
        """(name, peer) of each finding that is not ok, worst first."""
        return [(finding.name, finding.peer) for finding in self.findings if finding.severity != "ok"]


def reports(swarm: SimSwarm) -> list[Report]:
    """The status of every announced node; a crashed node refuses the connection."""
    now = asyncio.get_running_loop().time()
    found = []
    for advert in swarm.registry.view(now=now):
        process: SimProcess = swarm.process(advert.peer_id)
        status = process.node.status(now) if process.running else None
        found.append(Report(advert.peer_id, advert, status, "" if status else "connection refused", 0.0))
    return found


def looked(replicas: tuple[int, ...], plant: Callable[[SimSwarm], object], *after_s: float) -> list[Look]:
    """Observe a healthy swarm, plant a cause, observe it again `after_s` seconds later, and end the swarm.

    Fails if anything is found while the swarm is healthy.
    """
    config = NodeConfig(limits=LIMITS, directory=DirectorySettings(refresh_s=0.5, ttl_s=6.0))
    plan = SimPlan(manifest_for(replicas, steps=100_000), replicas, seed=3, config=config, link=Link(latency_s=0.002))
    swarm, well, hurt = SimSwarm(plan), list[Look](), list[Look]()

    def look(into: list[Look]) -> None:
        seen = diagnose(reports(swarm))
        into.append(Look(list(seen.findings), seen.sentence))

    def end() -> None:
        for stage, count in enumerate(replicas):
            for replica in range(count):
                swarm.crash(peer_id(stage, replica))

    for at_s in WELL_S:
        swarm.at(at_s, lambda: look(well))
    swarm.at(PLANTED_S, lambda: plant(swarm))
    for one_s in after_s:
        swarm.at(PLANTED_S + one_s, lambda: look(hurt))
    swarm.at(PLANTED_S + max(after_s) + 0.1, end)
    swarm.run(limit_s=200.0, tolerate=True)
    assert len(well) == len(WELL_S)
    assert len(hurt) == len(after_s)
    for one in well:
        assert set(one.bad) <= {("stage-thin", None)}, "a finding before anything was planted"
        assert one.sentence.startswith("training: ")
    return hurt


def test_1_a_stage_without_a_replica_is_named() -> None:
    def plant(swarm: SimSwarm) -> None:
        swarm.crash("s1r0")
        swarm.crash("s1r1")

    for seen in looked((2, 2), plant, 4.0, 6.0, 10.0):  # while their adverts are valid, and later
        assert seen.bad[0] == ("stage-empty", None), seen.findings
        assert seen.sentence.startswith("stage 1 has had no replica for ")


def test_2_a_node_five_times_slower_is_named() -> None:
    for seen in looked((2, 3), lambda swarm: swarm.slow("s1r1", 5.0), 15.0, 20.0):
        assert seen.bad == [("slow-node", "s1r1")]
        assert "slower than its stage's median and holds back stage 1" in seen.sentence


HALF_OPEN = ("half-open-link", "s1r1")


@pytest.mark.parametrize("way", [("s0r0", "s1r1"), ("s1r1", "s0r0")], ids=["requests", "answers"])
def test_3_a_half_open_link_is_named_with_both_its_ends(way: tuple[PeerId, PeerId]) -> None:
    """At the moment when the link is retried nothing shows, so an observer looks twice."""
    looks = looked(
        (2, 2), lambda swarm: swarm.network.block(barrier("one_way", *way)), *(10 + 0.5 * n for n in range(12))
    )
    for first, second in zip(looks, looks[5:], strict=False):
        assert HALF_OPEN in (first.bad + second.bad)
    for seen in looks:
        assert set(seen.bad) <= {HALF_OPEN}
        assert not seen.bad or ("s0r0" in seen.sentence and "s1r1" in seen.sentence)


def test_3_the_only_link_to_a_stage_is_an_error() -> None:
    for seen in looked((1, 1), lambda swarm: swarm.network.block(barrier("one_way", "s0r0", "s1r0")), 12.0, 16.0):
        assert seen.findings[0].severity == "error", seen.findings
        assert seen.bad[0] == ("half-open-link", "s1r0")
        assert "s0r0" in seen.sentence


def test_9_a_stuck_device_is_named_and_not_the_nodes_that_wait_for_it() -> None:
    for seen in looked((2, 2), lambda swarm: swarm.slow("s1r0", FOR_EVER), 15.0, 18.0):
        assert seen.bad[0] == ("device", "s1r0"), seen.findings
        assert "its device has been stuck in" in seen.sentence


# --- real processes -----------------------------------------------------------------------------------------------

NODE_WITH_CLOCK = (sys.executable, str(Path(__file__).parents[1] / "support" / "node_with_clock.py"))
CHECKPOINT_LIMIT_BYTES = 300_000
"""Less than the size of a checkpoint of SMALL, more than any other file of a node."""
OFF_S = 120.0
PLANTED = {"clock", "disk", "port", "run", "libp2p"}
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(range(32)))}"
"""A join address that does not answer."""
SEEN_S = 40.0
"""A planted cause must be found within this time, and be gone within it after it is removed."""


@dataclass(frozen=True)
class Pair:
    """A swarm of one stage with two replicas, each a process, which trains until the end of the tests."""

    first: NodeProcess
    second: NodeProcess

    @property
    def clock(self) -> Path:
        """The file with the seconds by which the second node's clock is ahead."""
        return self.second.dir.with_suffix(".clock")

    @property
    def address(self) -> str:
        """The join address."""
        return self.first.endpoints().join[0]

    def with_cause(self, cause: str) -> list[PeerId | None]:
        """The nodes that the diagnosis of both statuses names for this cause."""
        found = diagnose(uvloop.run(survey.by_url(self.first.endpoints().metrics))).findings
        return [finding.peer for finding in found if finding.name == cause]

    @contextmanager
    def names(self, cause: str, node: NodeProcess) -> Iterator[None]:
        """Check that no node is named for the cause before the `with` block plants it, and only this one afterwards."""
        assert not self.with_cause(cause), "a finding before anything was planted"
        me = node.endpoints().peer_id
        yield
        wait_until(lambda: self.with_cause(cause) == [me], f"{cause} of {me} in the diagnosis", SEEN_S)

    def forgets(self, cause: str) -> None:
        """Wait until no node is named for the cause any more, after it has been removed."""
        wait_until(lambda: not self.with_cause(cause), f"the end of {cause} in the diagnosis", SEEN_S)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Shared, because starting two nodes takes longer than all the tests with them."""
    with tempfile.TemporaryDirectory(prefix="noloco-planted-") as name, node_processes(Path(name)) as nodes:
        run = settings(stages="1", steps="1000000", checkpoint__every_steps="1")

        def start(own_dir: str, *arguments: str) -> NodeProcess:
            clock = str(nodes.home / f"{own_dir}.clock")
            return nodes.start(clock, *arguments, command=NODE_WITH_CLOCK, own_dir=own_dir)

        first = start("first", *SMALL, *run)
        second = start("second", "--join", first.endpoints().join[0], *settings(checkpoint__every_steps="1"))
        for node in (first, second):
            node.wait_for_steps(1)
        yield Pair(first, second)


def doctor(pair: Pair, *, config: Path | None = None, sets: tuple[str, ...] = ()) -> list[Finding]:
    """The findings of `noloco doctor` about the swarm, with these settings."""
    report, join = DoctorReport(), (pair.address, NOBODY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "LOOK_AGAIN_S", 0.1)
        patch.setattr(peers, "READING_PAUSE_S", 0.1)
        for module, limit in (
            (machine, "IMPORT_S"),
            (peers, "IMPORT_S"),
            (run_requirements, "MODEL_S"),
            (run_requirements, "DATA_S"),
        ):
            patch.setattr(module, limit, LONGEST_S)  # the tests' machine may be busy
        uvloop.run(examine(report, join, read(config, {}, sets), None))
    return [finding for _, finding in report.findings]


@pytest.fixture(scope="module")
def misled(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Finding]:
    """The doctor's findings on a machine with three faults at once; checks that it finds none without them."""
    well = doctor(pair)
    assert not [finding for finding in well if finding.severity != "ok" and finding.name in PLANTED]
    (dead,) = [finding for finding in well if finding.name == "join" and finding.severity != "ok"]
    assert dead.severity == "warning"
    assert dead.sentence.startswith(f"join address {NOBODY}: nobody answers"), "the other address answers"
    assert {"run", "clock", "port", "libp2p", "peers", "latency", "bandwidth", "round"} <= {f.name for f in well}
    config = tmp_path_factory.mktemp("misled") / "other.yaml"
    config.write_text("stages: 1\nouter:\n  inner_steps: 7\n")
    with pytest.MonkeyPatch.context() as patch:
        right_time = time.time
        patch.setattr(time, "time", lambda: right_time() + OFF_S)
        return doctor(pair, config=config, sets=("listen.announce_host=127.0.0.77",))


def errors(findings: list[Finding], name: str) -> list[Finding]:
    return [finding for finding in findings if finding.name == name and finding.severity == "error"]


def test_4_a_clock_that_is_two_minutes_ahead_is_this_machines(misled: list[Finding]) -> None:
    (found,) = errors(misled, "clock")
    assert found.peer is None
    off = re.search(r"this machine's clock is ([0-9.]+) s ahead of those of 2 nodes", found.sentence)
    assert off is not None
    assert float(off[1]) == pytest.approx(OFF_S, abs=2.0)
    assert "NTP" in found.advice


def test_6_an_announced_port_that_leads_nowhere_is_named(misled: list[Finding], pair: Pair) -> None:
    (found,) = (finding for finding in misled if finding.name == "port" and finding.severity == "warning")
    assert "cannot reach this machine at 127.0.0.77:" in found.sentence
    assert "reached over links that it keeps to public nodes" in found.sentence
    assert found.peer not in (None, pair.first.endpoints().peer_id, pair.second.endpoints().peer_id)
    assert "listen.announce_host" in found.advice


def test_7_a_configuration_of_another_run_is_named_by_its_key(misled: list[Finding], pair: Pair) -> None:
    (found,) = errors(misled, "run")
    assert "other.yaml:3: outer.inner_steps is 7 here, 4 in the swarm" in found.sentence
    assert found.peer == pair.first.endpoints().peer_id


def test_5_a_disk_that_takes_no_checkpoint_is_named(pair: Pair) -> None:
    node = pair.second
    limits = resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE)
    with pair.names("disk", node):
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (CHECKPOINT_LIMIT_BYTES, limits[1]))
    resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, limits)
    pair.forgets("disk")


def test_a_running_node_is_reported_as_healthy(pair: Pair) -> None:
    report = DoctorReport()
    (running,) = uvloop.run(machine.check_node_dirs(report, pair.first.dir))
    assert running == pair.first.endpoints()
    assert [(finding.severity, finding.name) for _, finding in report.findings] == [("ok", "node")]
    assert f"(process {pair.first.process.pid}) is healthy" in report.findings[0][1].sentence


@pytest.mark.usefixtures("misled")  # must run first, because a dead daemon is reported for a minute
def test_8_a_killed_libp2p_daemon_is_named(pair: Pair) -> None:
    node = pair.second
    with pair.names("libp2p", node):
        os.kill(daemon_of(node), signal.SIGKILL)
    assert node.process.poll() is None, "the node outlives its daemon"


def daemon_of(node: NodeProcess) -> int:
    """The process id of a node's p2pd."""
    for task in Path(f"/proc/{node.process.pid}/task").iterdir():
        with suppress(OSError):  # the thread or process has just ended
            for child in (task / "children").read_text().split():
                if "p2pd" in Path(f"/proc/{child}/cmdline").read_text():
                    return int(child)
    raise AssertionError(f"no p2pd below process {node.process.pid}")


def test_4_the_node_whose_clock_is_two_minutes_ahead_is_named(pair: Pair) -> None:
    with pair.names("clock", pair.second):
        pair.clock.write_text(str(OFF_S))
    pair.clock.write_text("0")
    pair.forgets("clock")
