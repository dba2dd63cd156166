"""Checks of the machine for any run: Python, packages, device, open files, ports, the clock, a node's directory."""

import importlib.metadata
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from noloco_p2p import __version__
from noloco_p2p.config import ListenSettings, NodeConfig
from noloco_p2p.errors import LocalError, NolocoError
from noloco_p2p.host import cores
from noloco_p2p.humanize import clock, plural, short_id, size_text
from noloco_p2p.io.dht.adverts import dht_time
from noloco_p2p.io.durable_files import read_if_there
from noloco_p2p.io.security.revocations import Revocations
from noloco_p2p.io.transport.connection_limit import allow_many_files
from noloco_p2p.launch import foreseen, node_probe, run_files, run_key
from noloco_p2p.launch.node_probe import NodeEndpoints
from noloco_p2p.observe import health_check
from noloco_p2p.observe.doctor.doctor_report import BUSY, DoctorReport, in_time

PACKAGE = "noloco_p2p"
FEW_FILES, TOO_FEW_FILES = 1024, 256
"""Limits on open files below which there is a warning, and below which it is an error. A node needs up to eleven
connections to each of its peers, and more files for libp2p and the data."""
IMPORT_S = 30.0
"""Longest import of torch; it takes seconds if other processes are busy."""
TOOL_S = 3.0
"""Longest wait for nvidia-smi."""
HEALTH_S = 6.0
"""Longest wait for a node's health, which a separate thread of the node answers."""
TCP = Path("/proc/sys/net/ipv4")
FAR = {
    "tcp_slow_start_after_idle": ("0", "start slowly again after each idle period"),
    "tcp_congestion_control": ("bbr", "slow down after each loss"),
}
"""Setting of TCP → the value that suits far peers, and what connections do with any other."""
BUILT_AT = 1_750_000_000.0
"""Unix seconds. No correct clock shows a time before this program was written."""


# --- Python and packages ----------------------------------------------------------------------------------------------


def check_python(report: DoctorReport) -> None:
    """Check the interpreter and every package against the versions that the project requires."""
    here = platform.python_version()
    python, wanted = declared()
    if not SpecifierSet(python).contains(here, prereleases=True):
        advice = f"install a supported Python, and {PACKAGE} in it"
        report.error("python", f"Python {here}: {PACKAGE} needs {python}", advice)
    faults = {one: fault for one in wanted if (fault := _package_fault(Requirement(one))) is not None}
    for one, fault in faults.items():
        report.error("packages", fault, f"run: {Path(sys.executable).name} -m pip install -U {shlex.quote(one)}")
    if not faults:
        report.ok("python", f"Python {here}, {PACKAGE} {__version__}, all {len(wanted)} required packages fit")


def declared() -> tuple[str, list[str]]:
    """(Python versions, requirements without extras) of the installed package."""
    about = importlib.metadata.metadata(PACKAGE)
    wanted = about.get_all("Requires-Dist") or []
    return str(about["Requires-Python"]), [one for one in wanted if "extra ==" not in one]


def _package_fault(wanted: Requirement) -> str | None:
    """Why an installed package does not meet a requirement; None if it does, or if the requirement does not apply."""
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    try:
        here = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed ({wanted.specifier} is needed)"
    fits = wanted.specifier.contains(here, prereleases=True)
    return None if fits else f"{wanted.name} {here} is installed, {wanted.specifier} is needed"


# --- the device -------------------------------------------------------------------------------------------------------


async def check_device(report: DoctorReport, local: NodeConfig) -> str | None:
    """Check the device in the settings. Returns its name in torch; None if it is not available."""
    doing, advice = "importing torch", "check the driver, or set device to cpu or auto"
    return await report.attempt("device", doing, in_time(doing, IMPORT_S, lambda: _device(report, local)), advice, BUSY)


def _device(report: DoctorReport, local: NodeConfig) -> str:
    from noloco_p2p.compute.hardware import device_info

    found, driver = device_info(local.device), _driver()
    if found.device != "cpu":
        room = f"{size_text(found.free_bytes)} of {size_text(found.total_bytes)} free"
        built = f"torch {found.torch_version} for CUDA {found.cuda_version}"
        report.ok("device", f"{found.device}: {found.name}, {room}, driver {driver or 'unknown'}, {built}")
        return found.device
    usable, threads = cores(), local.threads or found.threads
    asked = os.environ.get("OMP_NUM_THREADS", "not set")
    used = f"{plural(threads, 'thread')} on {plural(usable, 'core')}"
    sentence = f"cpu: {used} (OMP_NUM_THREADS {asked}), torch {found.torch_version}"
    if local.device == "auto" and driver is not None:
        advice = "install the CUDA build of torch, or set device to cpu"
        report.warning("device", f"there is a GPU (driver {driver}), but torch does not see it; {sentence}", advice)
    elif threads > usable:
        report.warning("device", sentence, f"set threads to {usable} or fewer: more of them wait for one another")
    else:
        report.ok("device", sentence)
    return found.device


def _driver() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.match(r"[0-9.]+", answer)
    return found and found.group()


# --- files, clock, ports ----------------------------------------------------------------------------------------------


def check_files(report: DoctorReport) -> None:
    """Check the limit on open files, which a node raises as far as it may."""
    allow_many_files()
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY or most >= FEW_FILES:
        report.ok("files", f"{'any number of' if most < 0 else f'up to {most}'} open files are allowed")
        return
    add = report.error if most < TOO_FEW_FILES else report.warning
    add("files", f"only {most} open files are allowed", f"raise the hard limit (ulimit -Hn) to {FEW_FILES}, as root")


def check_tcp(report: DoctorReport) -> None:
    """Check whether the settings of TCP suit far peers; only Linux shows them."""
    try:
        slow = [(name, *best) for name, best in FAR.items() if (TCP / name).read_text("ascii").strip() != best[0]]
    except OSError:
        return
    whys, settings = (" and ".join(why for *_, why in slow), " ".join(f"net.ipv4.{name}={to}" for name, to, _ in slow))
    advice = f"connections {whys}; sysctl -w {settings}, as root, speeds up far peers"
    report.ok("line", advice if slow else "connections keep their speed after an idle period and after losses")


def check_time(report: DoctorReport) -> None:
    """Check whether the wall clock can be right at all; only a comparison with peers can tell more."""
    now = time.time()
    sentence = f"this machine's clock shows {clock(now)} UTC"
    if now < BUILT_AT:
        report.error("clock", f"{sentence}, which cannot be right", "set the clock (NTP)")
    else:
        report.ok("clock", sentence)


def check_ports(report: DoctorReport, listen: ListenSettings, *, own_node: bool) -> ListenSettings:
    """Check whether the ports can be bound. Returns the settings with 0 for ports that cannot be, for further checks.

    `own_node`: the node in question is running and uses them.
    """
    faults = foreseen.port_faults(listen)
    if own_node:
        report.ok("port", "the ports are in use by the running node")
        return listen.model_copy(update=dict.fromkeys(faults, 0))
    wrong = {name: str(fault) for name, fault in faults.items() if fault is not None}
    for name, fault in wrong.items():
        reason, advice = re.split("; |: (?=choose|give)", fault, maxsplit=1)
        report.error("port", f"listen.{name}: {reason}", advice)
    if free := [f"{name} {getattr(listen, name) or 'any'}" for name in faults if name not in wrong]:
        report.ok("port", f"available on {listen.host}: {', '.join(free)}")
    return listen.model_copy(update=dict.fromkeys(wrong, 0))


# --- a node's own directory -------------------------------------------------------------------------------------------


async def check_node_dirs(report: DoctorReport, directory: Path) -> list[NodeEndpoints]:
    """Check the nodes of this directory, or of those directly below it. Returns the running ones.

    Healthy nodes come first, because a node that hangs cannot say anything about its swarm.
    """
    found: list[tuple[bool, NodeEndpoints]] = []
    node_dirs = list(node_probe.node_dirs(directory))
    for node_dir in node_dirs:
        if (running := node_probe.running(node_dir)) is not None:
            found.append((await _check_health(report, node_dir, running), running))
        elif node_probe.in_use(node_dir):
            report.ok("node", f"{node_dir}: its process has started, but cannot be reached yet")
        else:
            _report_end(report, node_dir)
    if not node_dirs:
        report.ok("node", f"no node has run in {directory} yet")
    return [running for _, running in sorted(found, key=lambda each: not each[0])]


def _report_end(report: DoctorReport, node_dir: Path) -> None:
    """Report how a stopped node ended: cleanly if its summary is newer than the endpoints of its last process."""
    endpoints, summary = node_probe.read_endpoints(node_dir), node_probe.read_json(node_dir / node_probe.SUMMARY)
    started, ended = (node_probe.written_at(node_dir / name) for name in (node_probe.ENDPOINTS, node_probe.SUMMARY))
    if endpoints is not None and (summary is None or ended < started):
        sentence = f"{node_dir}: the node's process {endpoints.pid} is gone, and did not exit cleanly"
        report.warning("node", sentence, "restart it with the same --dir: it continues from its checkpoint")
    else:
        state = "" if summary is None else f"; its last state: {summary.get('state')}"
        report.ok("node", f"{node_dir}: no node is running here{state}")
    _check_certificate(report, node_dir)


def _check_certificate(report: DoctorReport, node_dir: Path) -> None:
    """Report why a stopped node of a members-only run needs a new invitation, as far as its directory shows that."""
    advice = "join with a new invitation (noloco invite)"
    try:
        manifest, chain = run_files.stored_manifest(node_dir), read_if_there(node_dir / run_key.CERTIFICATE)
        trust = run_key.trust_in(manifest) if manifest is not None else None
        if trust is None or chain is None:
            return
        own = trust.membership(chain)
        Revocations(trust, node_dir / run_key.REVOKED).refuse((own.peer_id, own.issuer))
        # The node of the run's owner, or of a swarm, gets another certificate when it is started.
        admits = (node_dir / run_key.ISSUER).exists() or (node_dir.absolute().parent / run_key.KEY).exists()
        if dht_time() >= own.until and not admits:
            raise LocalError(f"this node's certificate has expired: {advice}")
    except NolocoError as error:
        reason, _, told = str(error).partition(": ")
        report.error("members", f"{node_dir}: {reason}", told or advice)


async def _check_health(report: DoctorReport, node_dir: Path, endpoints: NodeEndpoints) -> bool:
    """Check whether the node is healthy, and return that."""
    node = f"{node_dir}: node {short_id(endpoints.peer_id)} (process {endpoints.pid})"
    advice = "see below for what it waits for, and its log; restart it if its process is stopped or blocked"
    answer = in_time(f"asking the {node}", HEALTH_S, lambda: health_check.ask(node_dir, None))
    found = await report.attempt("node", f"asking the node in {node_dir} for its status", answer, advice)
    if found is not None and found[0]:
        report.ok("node", f"{node} is healthy")
    elif found is not None:
        report.error("node", f"{node}: {found[1]}", advice, endpoints.peer_id)
    return found is not None and found[0]
