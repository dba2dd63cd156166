"""A node's directory: its identity, the run that it belongs to, and the files for its launcher and its owner."""

import glob
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from noloco_p2p.config import ListenSettings, NodeConfig, RunManifest
from noloco_p2p.errors import LocalError, OtherRun, Violation
from noloco_p2p.host import cores, memory_bytes
from noloco_p2p.humanize import plural
from noloco_p2p.io import durable_files
from noloco_p2p.io.dht.addresses import from_here, reserve_port
from noloco_p2p.io.dht.identity import KEY, Identity
from noloco_p2p.io.durable_files import read_if_there, writing
from noloco_p2p.launch import homes, node_probe, settings
from noloco_p2p.launch.homes import Home

if TYPE_CHECKING:
    from noloco_p2p.core.messages import Advert
    from noloco_p2p.io.dht.libp2p import Libp2pDaemon
    from noloco_p2p.io.telemetry.prometheus_telemetry import PrometheusTelemetry
    from noloco_p2p.node.loop import Node


LOCAL = "local.json"
"""File in a node's directory that says where the run's data and tokenizer are on this machine."""
MANIFEST = "manifest.json"
"""File in a node's directory with the manifest of the run that the directory, with its checkpoints, belongs to."""


def own_identities(home: Path | None) -> Iterator[Identity]:
    """The identity in a node's directory; if none is given, that of each `node-<n>` not in use, one after the other.

    The caller takes the next one if a directory belongs to another run. Raises ConfigError if `home` is something else,
    LocalError.
    """
    if home is not None:
        homes.require_own(home, Home.NODE)
        yield Identity.open(home / KEY)
        return
    with writing(node_probe.HOME):
        node_probe.HOME.mkdir(exist_ok=True)  # fails if it is a file, in which no number is ever free
    for number in itertools.count(1):
        path = node_probe.HOME / f"node-{number}"
        if homes.kind_of(path) in (Home.NODE, Home.EMPTY) and (free := Identity.open_if_free(path / KEY)) is not None:
            yield free


def stored_manifest(directory: Path) -> RunManifest | None:
    """The run that this directory belongs to; None for a fresh directory.

    Raises LocalError as `stored_run` does, and for a run of another version: with the keys of this version it would be
    another run, without its checkpoints.
    """
    found = stored_run(directory)
    if found is not None and found[0] != found[1].run_id:
        raise LocalError(f"{directory / MANIFEST} was written by another version: name another directory")
    return found and found[1]


def stored_run(directory: Path) -> tuple[str, RunManifest] | None:
    """(id, manifest) of the run that this directory belongs to, whichever version wrote it; None for a fresh directory.

    Raises LocalError (unreadable, damaged).
    """
    path = directory / MANIFEST
    if (data := read_if_there(path)) is None:
        return None
    try:
        return hashlib.sha256(data).hexdigest(), settings.manifest_from_json(data)
    except Violation as error:
        raise LocalError(f"{path} is damaged, or another version wrote it: name another directory") from error


def refuse_other_run(directory: Path, manifest: RunManifest) -> None:
    """Raise OtherRun if a node's directory belongs to a run with other settings."""
    stored = stored_manifest(directory)
    if stored is not None and stored != manifest:
        keys = ", ".join(k for k in RunManifest.model_fields if getattr(stored, k) != getattr(manifest, k))
        raise OtherRun(f"{directory} belongs to the run {stored.name} with other settings ({keys}); name another --dir")


def same_ports(directory: Path, listen: ListenSettings) -> ListenSettings:
    """The settings with the ports that this node had before, so that its peers find it again.

    Only ports that are set to 0 are replaced, and only if the earlier ones are still free, and set for nothing else.
    """
    found = node_probe.read_json(directory / node_probe.ENDPOINTS) or {}
    before = {
        "dht_port": "".join(node_probe.texts(found.get("join"))[-1:]).partition("/tcp/")[2].partition("/")[0],
        "grpc_port": str(found.get("grpc", "")).rpartition(":")[2],
        "metrics_port": str(found.get("metrics", "")).rpartition(":")[2].partition("/")[0],
    }
    ports = {name: int(port) for name, port in before.items() if re.fullmatch("[0-9]{1,5}", port)}
    wanted = {name: port for name, port in ports.items() if getattr(listen, name) == 0 and 0 < port < 65536}
    others = dict(listen).values()
    return listen.model_copy(update={n: p for n, p in wanted.items() if p not in others and _is_free(listen.host, p)})


def _is_free(host: str, port: int) -> bool:
    with suppress(LocalError), reserve_port(host, port):
        return True
    return False


def introduce(directory: Path, advert: "Advert", libp2p: "Libp2pDaemon", host: str, how_to_join: str) -> None:
    """Print who this node is, where its metrics are and how to join it, and write the same to `endpoints.json`.

    `host` is where it listens: `noloco-node health` asks there, because the announced address may not lead back here.
    An invitation in `how_to_join` is printed, but not stored.
    """
    lines = {"peer id": advert.peer_id, "run": advert.run_id, "metrics": advert.metrics, "join": how_to_join}
    with writing("standard output"):
        print("\n".join(f"{name:8} {value}" for name, value in lines.items()), flush=True)
    write_json(
        directory / node_probe.ENDPOINTS,
        {
            "peer_id": advert.peer_id,
            "run_id": advert.run_id,
            "pid": os.getpid(),
            "join": libp2p.join_addresses,
            "dialled": not libp2p.asks_only,
            "metrics": advert.metrics,
            "health": f"http://{from_here(host)}:{urlsplit(advert.metrics).port}/health",
            "grpc": advert.addresses[0],
        },
    )


def store_summary(directory: Path, node: "Node", telemetry: "PrometheusTelemetry") -> None:
    """Write `summary.json`: what the node did. Only stage 0 has losses, in nats per token. Raises LocalError."""
    advert = node.state.advert
    found = telemetry.totals() | {
        "peer_id": advert.peer_id,
        "run_id": advert.run_id,
        "stage": advert.stage,
        "state": "finished" if node.finished else advert.state,
        "step": advert.step,
        "evaluation_s": node.state.evaluated_between_steps_s,
    }
    found |= {} if advert.stage == 0 else {"first_loss": None, "final_loss": None}
    store_unless_less(directory / node_probe.SUMMARY, found)


def store_unless_less(path: Path, summary: Mapping[str, object]) -> bool:
    """Write the summary of a node or swarm, unless the existing file says more. Returns whether it was written.

    A summary of a finished run says more than one of an unfinished run; otherwise, one with inner steps says more than
    one without. The modification time of the file becomes now in either case. Raises LocalError.
    """

    def knows(one: Mapping[str, object]) -> tuple[bool, bool]:
        return bool(one.get("completed") or one.get("state") == "finished"), bool(one.get("inner_steps"))

    if knows(node_probe.read_json(path) or {}) > knows(summary):
        with writing(path):
            os.utime(path)
        return False
    write_json(path, summary)
    return True


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON object as `write_whole` does."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")


class LocalFiles(NamedTuple):
    """Where a node reads what its run needs in addition to the manifest, as absolute paths."""

    tokenizer_dir: str | None = None
    data_files: tuple[str, ...] = ()

    @classmethod
    def of(cls, local: NodeConfig) -> "LocalFiles":
        """The files named in a node's settings."""
        return cls(local.tokenizer_dir and absolute(local.tokenizer_dir), tuple(map(_absolute_glob, local.data_files)))


def absolute(name: str) -> str:
    """The same path, in a form that does not depend on the working directory."""
    return str(Path(os.path.expanduser(name)).absolute())


def _absolute_glob(name: str) -> str:
    """As `absolute`, for a file or a glob: the name of the working directory has no wildcards."""
    path = Path(os.path.expanduser(name))
    return absolute(name) if path.is_absolute() or path.is_file() else f"{glob.escape(os.getcwd())}/{name}"


def store_local_files(directory: Path, local: NodeConfig) -> None:
    """Store where the run's files are, for later commands (`noloco export`, `noloco eval`). Raises LocalError."""
    write_json(directory / LOCAL, LocalFiles.of(local)._asdict())


def local_files(directories: Iterable[Path]) -> LocalFiles:
    """The files of the first of these nodes that has stored them."""
    found = next(filter(None, (node_probe.read_json(directory / LOCAL) for directory in directories)), {})
    tokenizer = found.get("tokenizer_dir")
    return LocalFiles(tokenizer if isinstance(tokenizer, str) else None, node_probe.texts(found.get("data_files")))


def run_summary(directories: Iterable[Path], run_id: str) -> Mapping[str, object]:
    """The summary of the swarm that these nodes belong to; empty if no launcher wrote one."""
    found = (node_probe.read_json(home.absolute().parent / node_probe.SUMMARY) or {} for home in directories)
    return next((one for one in found if one.get("run_id") == run_id), {})


def store_manifest(directory: Path, manifest: RunManifest) -> None:
    """Store the run that this directory belongs to from now on, in the form that is hashed. Raises LocalError."""
    write_whole(directory / MANIFEST, manifest.canonical_json())


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: readers see the old content or all of the new, even after a power failure.

    `mode` is the mode of a new file. Raises LocalError (a full disk).
    """
    with writing(path):
        durable_files.write_whole(path, content, mode)


def machine() -> str:
    """The hardware of this machine in a few words."""
    memory = f"{memory_bytes() / 2**30:.0f} GiB of memory"
    return f"{platform.system()} {platform.machine()}, {plural(cores(), 'core')}, {memory}"


def command(program: str) -> str:
    """The command line of this process, without the invitation that it may contain, which is a secret."""
    return re.sub(r"/invite/\w+", "/invite/…", shlex.join([program, *sys.argv[1:]]))
