"""What the machine is, whatever the run: Python, packages, device, open files, ports, the libp2p daemon, the clock."""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from noloco_p2p import __version__, humanize
from noloco_p2p.config import ListenSettings, NodeConfig
from noloco_p2p.errors import LocalError, Unreachable
from noloco_p2p.io.dht.addresses import reserve_port
from noloco_p2p.observe.doctor.doctor_report import BUSY, Telling, in_time

PACKAGE = "noloco_p2p"
FEW_FILES, TOO_FEW_FILES = 1024, 256
"""Open files: a node with many peers needs two connections to each, besides what libp2p and the data need."""
IMPORT_S = 30.0
"""Longest import of torch; seconds where other processes work too."""
TOOL_S = 3.0
BUILT_AT = 1_750_000_000.0
"""Seconds since 1970. No clock that is right can be before this program was written."""


def check_python(telling: Telling) -> None:
    """The interpreter and every package that this project declares, against what it declares."""
    python, wanted = declared()
    if not _fits(platform.python_version(), python):
        told = f"Python {platform.python_version()}: {PACKAGE} needs {python}"
        telling.error("python", told, "install a Python that fits, and the package in it")
    bad = [fault for fault in map(_package_fault, wanted) if fault is not None]
    for fault in bad:
        telling.error("packages", fault, f"run: {Path(sys.executable).name} -m pip install -U {PACKAGE}")
    if not bad:
        told = f"Python {platform.python_version()}, {PACKAGE} {__version__}, all {len(wanted)} packages fit"
        telling.ok("python", told)


def declared() -> tuple[str, list[str]]:
    """(Python versions, requirements without extras) as the installed package says, or a source checkout."""
    try:
        about = importlib.metadata.metadata(PACKAGE)
        wanted = importlib.metadata.requires(PACKAGE) or []
        return str(about["Requires-Python"]), [one for one in wanted if "extra ==" not in one]
    except importlib.metadata.PackageNotFoundError:
        project = Path(__file__).parents[3] / "pyproject.toml"
        found = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        return str(found["requires-python"]), [str(one) for one in found["dependencies"]]


def _package_fault(requirement: str) -> str | None:
    """Why an installed package does not do; None when it does."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return None
    try:
        here = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed ({wanted.specifier} is needed)"
    if not wanted.specifier.contains(here, prereleases=True):
        return f"{wanted.name} {here} is installed, {wanted.specifier} is needed"
    return None


def _fits(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


async def check_device(telling: Telling, local: NodeConfig) -> str | None:
    """The device that the settings ask for. Returns its name in torch, None when it is not here."""
    try:
        with telling.step("importing torch"):
            return await in_time("importing torch", IMPORT_S, lambda: _device(telling, local))
    except LocalError as error:
        telling.error("device", str(error), "see to the driver, or set device to cpu or auto")
    except Unreachable as error:
        telling.warning("device", str(error), BUSY)
    return None


def _device(telling: Telling, local: NodeConfig) -> str:
    from noloco_p2p.compute.hardware import device_info

    found, driver = device_info(local.device), _driver()
    if found.device != "cpu":
        room = f"{humanize.size(found.free_bytes)} of {humanize.size(found.total_bytes)} free"
        built = f"torch {found.torch_version} for CUDA {found.cuda_version}"
        telling.ok("device", f"{found.device}: {found.name}, {room}, driver {driver or 'unknown'}, {built}")
        return found.device
    cores, threads = len(_cores()), local.threads or found.threads
    asked = os.environ.get("OMP_NUM_THREADS", "not set")
    told = f"cpu: {threads} threads on {cores} cores (OMP_NUM_THREADS {asked}), torch {found.torch_version}"
    if local.device == "auto" and driver is not None:
        advice = "install the CUDA build of torch, or set device to cpu"
        telling.warning("device", f"a GPU is here (driver {driver}), but torch does not see it; {told}", advice)
    elif threads > cores:
        telling.warning("device", told, f"set threads to {cores} or less: more of them wait for one another")
    else:
        telling.ok("device", told)
    return found.device


def _cores() -> Sequence[int]:
    """Those that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity is not None else range(os.cpu_count() or 1)


def _driver() -> str | None:
    """The version of NVIDIA's driver, None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"[0-9.]+", done.stdout)
    return found.group() if done.returncode == 0 and found else None


def check_files(telling: Telling) -> None:
    """The limit on open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{soft} files may be open at once"
    if soft >= FEW_FILES:
        telling.ok("files", told)
        return
    wanted = FEW_FILES if hard == resource.RLIM_INFINITY else min(hard, FEW_FILES)
    say = telling.error if soft < TOO_FEW_FILES else telling.warning
    say("files", f"only {told}", f"run ulimit -n {max(wanted, soft)} before the node, or raise the system's limit")


def check_time(telling: Telling) -> None:
    """Whether the wall clock can be right at all; only peers can tell more."""
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < BUILT_AT:
        telling.error("clock", f"this machine's clock says {told}, which is long ago", "set the clock (NTP)")
    else:
        telling.ok("clock", f"this machine's clock says {told}")


def check_ports(telling: Telling, listen: ListenSettings, *, own_node: bool) -> ListenSettings:
    """Whether the ports can be bound. Returns the settings with 0 for those that cannot, so that the rest can go on.

    `own_node`: the node for which this is asked runs, and has them.
    """
    told, free = [], {}
    for name in ("dht_port", "grpc_port", "metrics_port", "libp2p_metrics_port"):
        port = getattr(listen, name)
        if port is None:
            continue
        if own_node and port:
            free[name] = 0
            continue
        try:
            reserve_port(listen.host, port, f"listen.{name}").close()
        except LocalError as error:
            free[name] = 0
            reason, _, advice = str(error).replace(": choose", "; choose").partition("; ")
            telling.error("port", f"listen.{name}: {reason}", advice)
        else:
            told.append(f"{name} {port or 'any'}")
    if own_node:
        telling.ok("port", "the ports are those of the node that runs")
    elif told:
        telling.ok("port", f"can be bound on {listen.host}: {', '.join(told)}")
    return listen.model_copy(update=free)
