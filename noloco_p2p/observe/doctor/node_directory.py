"""A node's own directory: whose it is, whether its process lives, how it is."""

from pathlib import Path

from noloco_p2p import humanize
from noloco_p2p.errors import Unreachable
from noloco_p2p.launch import control, node_probe
from noloco_p2p.launch.node_probe import HOME, NodeEndpoints
from noloco_p2p.observe import health_check
from noloco_p2p.observe.doctor.doctor_report import Telling, in_time

HEALTH_S = 6.0
"""Longest wait for a node's word about its health: it answers from a thread of its own."""


async def check_home(telling: Telling, directory: Path) -> list[NodeEndpoints]:
    """The nodes whose directory this is, or that have theirs just below it; returns those that run."""
    node_dirs = list(control.node_dirs(directory))
    if not node_dirs:
        telling.ok("node", f"no node has been in {directory} yet")
        return []
    running = []
    for node_dir in node_dirs:
        endpoints = node_probe.read_endpoints(node_dir)
        if control.running_pid(node_dir) is not None and endpoints is not None:
            running.append(endpoints)
            await _check_health(telling, node_dir, endpoints)
        elif control.in_use(node_dir):
            telling.ok("node", f"{node_dir}: its process has started, and is not reachable yet")
        else:
            _tell_ended(telling, node_dir, endpoints)
    return running


def _tell_ended(telling: Telling, node_dir: Path, endpoints: NodeEndpoints | None) -> None:
    """Of a node that does not run: how it ended."""
    summary = node_probe.read_json(node_dir / node_probe.SUMMARY)
    written = _age_order(node_dir)
    if endpoints is not None and (summary is None or not written):
        told = f"{node_dir}: the node's process {endpoints.pid} is gone, and did not end by itself"
        telling.warning("node", told, "start it again with the same --dir: it goes on from its checkpoint")
    else:
        state = "" if summary is None else f", it ended {summary.get('state')}"
        telling.ok("node", f"{node_dir}: no node runs here{state}")


def _age_order(node_dir: Path) -> bool:
    """Whether the summary is of the last process that told where it can be reached."""
    try:
        told, ended = ((node_dir / name).stat().st_mtime for name in (node_probe.ENDPOINTS, node_probe.SUMMARY))
    except OSError:
        return False
    return ended >= told


async def _check_health(telling: Telling, node_dir: Path, endpoints: NodeEndpoints) -> None:
    who = f"{node_dir}: node {humanize.peer(endpoints.peer_id)} (process {endpoints.pid})"
    try:
        with telling.step(f"asking the node of {node_dir} how it is"):
            well, line = await in_time(
                "its word about its health", HEALTH_S, lambda: health_check.ask(node_dir, None, HOME)
            )
    except Unreachable as error:
        well, line = False, str(error)
    if well:
        telling.ok("node", f"{who} is well")
    else:
        advice = (
            "see below what it waits for, and its log; a process that is stopped or blocked has to be started again"
        )
        telling.error("node", f"{who}: {line}", advice, endpoints.peer_id)
