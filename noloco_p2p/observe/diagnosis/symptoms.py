"""What nodes show without following any wait. Pure. `vacancies.py` has what stages show.

Every function takes the swarm and gives what is wrong of its kind. Thresholds stand at the top, with their reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from noloco_p2p.core.messages import PeerId
from noloco_p2p.core.status import AnyReplica, Resource, Status, Wait
from noloco_p2p.humanize import compact, elapsed, finite, short_id, size_text
from noloco_p2p.observe.diagnosis.findings import Finding, Report, Severity, line, named
from noloco_p2p.observe.diagnosis.swarm_view import Swarm, median

SLOW_FACTOR = 2.0
"""So many times slower than the others of its stage is slow."""
SLOW_FACTOR_ACROSS = 3.0
"""The same against other stages, whose work is not quite the same."""
CLOCK_OFF_S = 5.0
"""Beyond this a clock is off; asking takes a part of it, NTP keeps far below."""
CLOCK_BAD_S = 15.0
"""Half the life of an advert by default: from here on adverts look expired, and nodes may not join."""
LOOP_SILENT_S = 5.0
"""The loop's heart beats many times a second."""
STUCK_STEPS, STUCK_FLOOR_S = 10.0, 10.0
"""An operation of the device that takes so many inner steps, and at least so long, does not come back."""
DISK_LOW_BYTES, DISK_FULL_BYTES = 1 << 30, 128 << 20
"""What a checkpoint takes is not known here: a model of a few million parameters needs 100 MB for one."""
NONFINITE_SHARE, NONFINITE_LEAST = 0.1, 3
"""From so large a part of the microbatches on, and at least so many."""


@dataclass(frozen=True, order=True, slots=True)
class CallLink:
    """The way from one node to another that it calls."""

    caller: PeerId
    callee: PeerId


Place = PeerId | AnyReplica | CallLink
"""Where in a swarm something is wrong: at a node, a stage, or a link."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A finding, and the place in the swarm at which a wait that leads there ends."""

    finding: Finding
    at: Place | None
    """None: nobody can wait for it."""


def cause(severity: Severity, name: str, peer: PeerId | None, sentence: str, advice: str) -> Cause:
    """A cause at a node, or one that nobody waits for."""
    return Cause(Finding(severity, name, peer, sentence, advice), peer)


def who(report: Report) -> str:
    """`node 12D3…Qx7Qf of stage 1`."""
    stage = report.newest.stage if report.newest is not None else -1
    return f"node {short_id(report.peer)}" + (f" of stage {compact(stage)}" if stage >= 0 else "")


def stuck(status: Status) -> Wait | None:
    """The longest wait for the own device that is too long for anything that comes back."""
    step_s = finite(status.step_took_s)
    longest_s = max(STUCK_STEPS * step_s, STUCK_FLOOR_S) if step_s > 0 else float("inf")
    for wait in sorted(status.waits, key=lambda wait: -finite(wait.since_s)):
        if wait.whom == Resource.DEVICE and not wait.idle:
            waited_s = finite(wait.since_s)
            if waited_s > longest_s or (wait.deadline_s is not None and waited_s > finite(wait.deadline_s) > 0):
                return wait
    return None


# --- nodes ------------------------------------------------------------------------------------------------------------


def _silent_loops(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        silent_s = finite(status.figures.loop_silent_s)
        if silent_s > LOOP_SILENT_S:
            told = f"{who(swarm.by_peer[peer])}: its event loop stands still since {elapsed(silent_s)}"
            advice = (
                "something blocks its process (a debugger, a stopped disk, no memory): look at it there, restart it"
            )
            yield cause("error", "loop", peer, told, advice)


def _stuck_devices(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        wait = stuck(status)
        if wait is not None:
            told = f"{who(swarm.by_peer[peer])}: its device is stuck in: {wait.what}, since {elapsed(wait.since_s)}"
            advice = "look at the device there (nvidia-smi, other programs on it, memory); restart the node"
            yield cause("error", "device", peer, told, advice)


_SERIOUS = ("disk", "libp2p")


def _troubles(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        for trouble in status.troubles[:8]:
            told = f"{who(swarm.by_peer[peer])}: {trouble.message} (since {elapsed(trouble.since_s)})"
            severity: Severity = "error" if trouble.name in _SERIOUS else "warning"
            yield cause(severity, line(trouble.name), peer, told, "the node goes on; its log has more")


def _disks(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        free = status.figures.disk_free_bytes
        if free is None or finite(free) >= DISK_LOW_BYTES or any(t.name == "disk" for t in status.troubles):
            continue
        severity: Severity = "error" if finite(free) < DISK_FULL_BYTES else "warning"
        told = f"{who(swarm.by_peer[peer])}: {size_text(free)} are left on the disk of its directory"
        advice = "free some space there, or lower checkpoint.keep: checkpoints fail on a full disk"
        yield cause(severity, "disk", peer, told, advice)


def _non_finite(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        ended = status.figures.microbatches
        bad, all_ended = finite(ended.get("nonfinite")), sum(finite(count) for count in ended.values())
        if bad >= NONFINITE_LEAST and bad >= NONFINITE_SHARE * all_ended:
            told = f"{who(swarm.by_peer[peer])}: {compact(bad)} of {compact(all_ended)} microbatches were not finite"
            advice = "if it is only this node, look at its device; else lower inner.peak_learning_rate"
            yield cause("warning", "nonfinite", peer, told, advice)


def _clocks(swarm: Swarm) -> Iterator[Cause]:
    known = [(r.peer, finite(r.clock_ahead_s)) for r in swarm.everybody if r.clock_ahead_s is not None]
    middle = median(sorted([0.0, *(ahead for _, ahead in known)]))
    if not known or middle is None:
        return
    advice = "set the clock of that machine (for example by NTP); it must agree within half of directory.ttl_s"
    if len(known) > 1 and abs(middle) > CLOCK_OFF_S:
        told = (
            f"this machine's clock is {elapsed(abs(middle))} {'behind' if middle > 0 else 'ahead of'} the nodes' clocks"
        )
        yield cause(_clock_severity(middle), "clock", None, told, advice)
    for peer, ahead in known:
        off = ahead - middle
        if abs(off) > CLOCK_OFF_S:
            way = "ahead of" if off > 0 else "behind"
            told = f"node {short_id(peer)}: its clock is {elapsed(abs(off))} {way} the others"
            if len(known) == 1:
                told = f"the clocks of node {short_id(peer)} and of this machine are {elapsed(abs(off))} apart"
            yield Cause(Finding(_clock_severity(off), "clock", peer, told, advice), None)


def _clock_severity(off_s: float) -> Severity:
    return "error" if abs(off_s) > CLOCK_BAD_S else "warning"


def _unreachable(swarm: Swarm) -> Iterator[Cause]:
    for report in swarm.reports:
        advert = report.advert
        if report.status is not None or (advert is not None and advert.state in ("draining", "left")):
            continue
        failure = report.failure or "it tells no status address"
        address = "" if advert is None else advert.metrics.removesuffix("/metrics")
        at = f" at {address}" if address not in failure else ""
        age = "" if advert is None else f"; it announced itself {elapsed(report.age_s)} ago"
        told = f"{who(report)} does not tell its status{at}: {failure}{age}"
        advice = "if its process is gone, start it again; else its listen.metrics_port must be open to this machine"
        yield cause("warning" if swarm.statuses else "error", "unreachable", report.peer, told, advice)


def _strangers(swarm: Swarm) -> Iterator[Cause]:
    for report in swarm.everybody:
        advert = report.newest
        if advert is not None and advert.run_id != swarm.run_id:
            other, mine = line(advert.run_id)[:12], (swarm.run_id or "")[:12]
            told = f"node {short_id(report.peer)} works on another run: {other}, not {mine}"
            advice = "start it with the join address of this run (and --run to be sure)"
            yield cause("error", "run", report.peer, told, advice)


def _versions(swarm: Swarm) -> Iterator[Cause]:
    of_version: dict[str, list[PeerId]] = {}
    for peer, status in swarm.statuses:
        of_version.setdefault(status.advert.version, []).append(peer)
    if len(of_version) > 1:
        usual = min(of_version, key=lambda version: (-len(of_version[version]), version))
        for version in sorted(of_version.keys() - {usual}):
            peers = of_version[version]
            told = f"{named(peers)}: version {line(version)[:40] or 'unknown'}, the others have {line(usual)[:40]}"
            finding = Finding("warning", "version", peers[0], told, "install the same version everywhere")
            yield Cause(finding, None)


def _slow(swarm: Swarm) -> Iterator[Cause]:
    speeds: dict[int, dict[PeerId, float]] = {}
    for peer, status in swarm.statuses:
        advert = status.advert
        if advert.state == "training" and finite(advert.microbatches_per_s) > 0:
            speeds.setdefault(advert.stage, {})[peer] = finite(advert.microbatches_per_s)
    for stage, mine in sorted(speeds.items()):
        for peer, speed in mine.items():
            mates = [other for mate, other in mine.items() if mate != peer]
            elsewhere = [other for s, group in speeds.items() if s != stage for other in group.values()]
            usual = median(mates or elsewhere)
            if usual is not None and usual / speed >= (SLOW_FACTOR if mates else SLOW_FACTOR_ACROSS):
                than = "its stage's median" if mates else "the other stages' median"
                factor = min(usual / speed, 9999.0)
                told = (
                    f"node {short_id(peer)} is {factor:.1f}× slower than {than} and holds back stage {compact(stage)}"
                )
                advice = (
                    "look what else runs on its device, or give it a faster one; noloco-node without it may be faster"
                )
                yield cause("warning", "slow-node", peer, told, advice)


def _resting(swarm: Swarm) -> Iterator[Cause]:
    for peer, status in swarm.statuses:
        state = status.advert.state
        if state in ("paused", "draining"):
            told = f"{who(swarm.by_peer[peer])} " + (
                "is paused" if state == "paused" else "finishes its work and leaves"
            )
            advice = "noloco resume DIR on its machine" if state == "paused" else "nothing to do"
            yield cause("ok", state, peer, told, advice)


SYMPTOMS: tuple[Callable[[Swarm], Iterator[Cause]], ...] = (
    _silent_loops,
    _stuck_devices,
    _troubles,
    _disks,
    _non_finite,
    _clocks,
    _unreachable,
    _strangers,
    _versions,
    _slow,
    _resting,
)


def symptoms(swarm: Swarm) -> list[Cause]:
    """All of them."""
    return [found for look in SYMPTOMS for found in look(swarm)]
