"""Plans what `noloco swarm` starts: a fresh run, or the unfinished run in a directory.

DIR/swarm.json     the settings of all nodes, used again when the run is resumed; also a valid configuration file
DIR/swarm.lock     held by the running launcher
DIR/summary.json   written at the end
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

from noloco_p2p.config import NodeConfig, RunManifest, SecuritySettings
from noloco_p2p.core.messages import Holding
from noloco_p2p.core.resume import least_newest, nearness
from noloco_p2p.core.schedule import due_round
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.io.dht.identity import locked
from noloco_p2p.io.durable_files import writing
from noloco_p2p.launch import homes, node_probe, run_files, settings
from noloco_p2p.launch.homes import Home
from noloco_p2p.launch.yaml_entries import ENVIRONMENT_PREFIX

SETTINGS, LOCK = "swarm.json", "swarm.lock"
ROOT_KEY = "root.key"
"""The key of a members-only run."""
INVITED_S = 3_600.0
"""Time for which the first node's invitation admits the others, seconds."""
NODES_END_S = 15.0
"""Longest wait for the nodes of a launcher that was killed to notice and end, seconds."""
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """The run to start, and its nodes."""

    manifest: RunManifest
    local: NodeConfig
    resumes: bool
    """Whether the directory holds a run that has not ended."""

    @property
    def nodes(self) -> list[tuple[int, int]]:
        """(stage, replica) of every node."""
        return list(product(range(self.manifest.stages), range(self.manifest.start_replicas)))

    def arguments(self, run_dir: Path) -> list[str]:
        """The arguments of every node: the file with its settings, and changes to them.

        All nodes are on this machine and share these settings, so no port is fixed in them. `NodeProcess` adds where
        each node listens.
        """
        ports = ["dht_port", "grpc_port", "metrics_port"]
        ports += [] if self.local.listen.libp2p_metrics_port is None else ["libp2p_metrics_port"]
        sets = ["listen.announce_host=null", *(f"listen.{port}=0" for port in ports)]
        # Otherwise a first node that others can reach would make a key, and with it another run.
        sets += ["security=open"] if self.manifest.security.root_key is None else []
        return ["--config", str(run_dir / SETTINGS), *(word for each in sets for word in ("--set", each))]

    def environment(self, threads: int) -> dict[str, str]:
        """The environment of every node: ours without settings, because those have already been read.

        numpy gets a single thread: nodes do not compute with it, and it would start its threads on import, before the
        nodes are forked.
        """
        own = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
        return {**own, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}

    def join_address(self, first: Path, address: str) -> str:
        """The address that the other nodes join: `address` of the first node, in a members-only run with an invitation.

        `first` is the directory of the first node.
        """
        if self.manifest.security.root_key is None or len(self.nodes) == 1:
            return address
        from noloco_p2p.launch import run_key

        return run_key.invite(first, first.parent / ROOT_KEY, uses=len(self.nodes) - 1, seconds=INVITED_S, stage=None)

    def write(self, run_dir: Path) -> None:
        """Store the settings in the directory. Paths are made absolute, because the run may be continued from another
        working directory. Raises LocalError."""
        everything = self.manifest.model_dump(mode="json") | self.local.model_dump(mode="json")
        everything |= run_files.LocalFiles.of(self.local)._asdict()
        everything["audit"]["dir"] = self.local.audit.dir and run_files.absolute(self.local.audit.dir)
        run_files.write_json(run_dir / SETTINGS, everything)


def for_members(plan: SwarmPlan, run_dir: Path) -> SwarmPlan:
    """The plan of a members-only run: with the key in this directory, which a fresh run makes if there is none.

    Raises ConfigError, LocalError.
    """
    from noloco_p2p.launch import run_key

    path = run_dir / ROOT_KEY
    if plan.resumes:
        if plan.manifest.security.root_key is None:
            raise ConfigError(f"--members: the unfinished run of {run_dir} is open: leave it out")
        return plan
    public = run_key.public_half(run_key.read(path)) if path.exists() else run_key.make(path)
    return replace(plan, manifest=plan.manifest.model_copy(update={"security": SecuritySettings(root_key=public)}))


def check_key(plan: SwarmPlan, run_dir: Path | None) -> None:
    """Raise ConfigError unless the run is open or its key is in this directory: the first node would make another key,
    and with it another run."""
    from noloco_p2p.launch import run_key

    root, path = plan.manifest.security.root_key, run_dir and run_dir / ROOT_KEY
    if root is not None and (path is None or not path.exists() or run_key.public_half(run_key.read(path)) != root):
        lack = f"security.root_key: its private key is not in {path or f'a --dir, as {ROOT_KEY}'}"
        raise ConfigError(f"{lack}: put it there, or leave the setting out and give --members")


class ResumePoint(NamedTuple):
    """About where a resumed run continues. A node may begin a round away: at its own checkpoint, if that is older but
    comes first, or at a newer one, if its clock jumped over that round."""

    round: int
    step: int


def make_plan(overrides: settings.Overrides, run_dir: Path | None) -> SwarmPlan:
    """The plan that these settings ask for. Nothing is created yet.

    Raises ConfigError, also if the directory holds a finished run, an unfinished run with another manifest, or a node
    of another run; LocalError if a node's directory does not say to which run it belongs.
    """
    if run_dir is not None:
        homes.require_own(run_dir, Home.SWARM)
        homes.refuse_finished("", run_dir)
    if run_dir is None or not (stored_path := run_dir / SETTINGS).exists():
        plan = SwarmPlan(overrides.manifest(), overrides.node(), resumes=False)
    else:
        stored = settings.read(stored_path, {}, [])
        manifest = stored.manifest()
        overrides.check_agrees(manifest, f"in the unfinished run of {run_dir}: leave it out, or name another --dir")
        plan = SwarmPlan(manifest, settings.Overrides((*stored.entries, *overrides.entries)).node(), resumes=True)
    if run_dir is not None:
        for stage, replica in plan.nodes:
            run_files.refuse_other_run(run_dir / f"{stage}-{replica}", plan.manifest)
    return plan


def make_run_dir(name: str, directory: Path | None) -> Path:
    """Make the directory of this run: the one given, or a fresh `noloco-runs/<name>-<n>`. Raises LocalError."""
    try:
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            return directory
        node_probe.HOME.mkdir(exist_ok=True)  # fails if it is a link to nothing, in which no number is ever free
        for n in count(1):
            with suppress(FileExistsError):
                fresh = node_probe.HOME / f"{name}-{n}"
                fresh.mkdir()
                break
        return fresh
    except OSError as error:
        raise LocalError(f"{error.filename} cannot be created: {error.strerror}") from error


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Lock the directory against a second launcher. Raises LocalError if there is one."""
    with writing(run_dir / LOCK):
        lock = locked(run_dir / LOCK)
    if lock is None:
        raise LocalError(f"another noloco swarm is running in {run_dir}: stop it, or name another --dir")
    try:
        yield
    finally:
        os.close(lock)


def wait_for_old_nodes(node_dirs: Sequence[Path]) -> None:
    """Wait until no node runs in these directories. Raises LocalError if one still does after NODES_END_S."""
    give_up_at = time.monotonic() + NODES_END_S
    for node_dir in node_dirs:
        while node_probe.in_use(node_dir):
            if time.monotonic() >= give_up_at:
                raise LocalError(f"a node is still running in {node_dir}: stop it, or name another --dir")
            time.sleep(POLL_S)


def resume_point(plan: SwarmPlan, run_dir: Path) -> ResumePoint | None:
    """Where the run continues from the checkpoints in the directory; None if there are none. Raises LocalError."""
    from noloco_p2p.io.storage.checkpoint_format import stored_checkpoints

    return common_point(s.holding for s in stored_checkpoints(run_dir) if s.manifest.run_id == plan.manifest.run_id)


def is_saved(plan: SwarmPlan, run_dir: Path) -> bool:
    """Whether every stage has a checkpoint of the last outer round, or none are to be written. Raises LocalError."""
    from noloco_p2p.io.storage.checkpoint_format import stored_checkpoints

    run = plan.manifest
    found = [one.manifest for one in stored_checkpoints(run_dir) if one.manifest.run_id == run.run_id]
    ended = {one.stage for one in found if due_round(run.steps, run.outer.inner_steps, one.round, run.steps) is None}
    return plan.local.checkpoint.every_steps is None or ended == set(range(run.stages))


def common_point(held: Iterable[Holding]) -> ResumePoint | None:
    """The newest outer round that every stage with checkpoints has reached, and the lowest step at which one continues.

    A stage continues from the checkpoint nearest to that round. None if there is no checkpoint.
    """
    holdings = list(held)
    if (round := least_newest(holdings)) is None:
        return None
    by_nearness = sorted(holdings, key=lambda held: nearness(held, round), reverse=True)
    nearest = {holding.stage: holding for holding in by_nearness}  # the last of each stage stays
    return ResumePoint(round, min(holding.step for holding in nearest.values()))
