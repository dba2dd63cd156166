"""`noloco export`: the trained model of a run as a Hugging Face directory."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p import __version__
from noloco_p2p.config import RunManifest
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.launch import run_files

if TYPE_CHECKING:
    from noloco_p2p.launch.collection import CollectedWeights

RECORD = "noloco.json"
"""In an exported directory: where the weights come from, and the run's manifest."""
REPLICAS = "replicas"
"""In an exported directory: `<i>/`, the model of the i-th replica of every stage, not averaged."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What the command line asks for."""

    join: tuple[str, ...]
    directories: tuple[Path, ...]
    out: Path
    mean: bool
    """The mean of all replicas of each stage; False: one replica of each."""
    replicas: bool
    """Of a mean: the single replicas as well."""
    tokenizer_dir: str | None


def run_export(options: ExportOptions) -> None:
    """Collect, merge, write, and say what was used. Raises ConfigError, LocalError, PeerError."""
    if bool(options.join) == bool(options.directories):
        raise ConfigError("say where the weights are: either --join ADDR (a swarm that runs) or --from DIR")
    if options.out.is_file() or (options.out.is_dir() and any(options.out.iterdir())):
        raise ConfigError(f"--out {options.out} is not empty: name a directory that does not exist yet")
    found = _collected(options)
    with _replaced(options.out) as fresh:
        _write(options, found, fresh)
    for stage, mine in enumerate(found.stages):
        peers = ", ".join(f"{replica.peer} (step {replica.step})" for replica in mine)
        print(f"stage {stage}: {'mean of ' if len(mine) > 1 else ''}{peers}")
    print(f"run {found.manifest.run_id}, outer round {found.round} → {options.out}")


def _collected(options: ExportOptions) -> "CollectedWeights":
    if options.directories:
        from noloco_p2p.launch.collection import from_directories

        return from_directories(options.directories, one=not options.mean, say=print)
    import logging

    import uvloop

    from noloco_p2p.launch.live_collection import from_swarm

    logging.getLogger("hivemind").setLevel(logging.ERROR)
    found: CollectedWeights = uvloop.run(from_swarm(options.join, one=not options.mean, say=print))
    return found


def _write(options: ExportOptions, found: "CollectedWeights", directory: Path) -> None:
    """Model, tokenizer and record, and the single replicas of a mean."""
    from noloco_p2p.compute import exported_model
    from noloco_p2p.launch.collection import progress_bar

    exported_model.silence_transformers()
    manifest = found.manifest
    eos = _write_tokenizer(manifest, options.tokenizer_dir, directory)
    chains = max(len(stage) for stage in found.stages)
    chains = chains if options.mean and options.replicas and chains > 1 else 0
    with progress_bar("writing", 1 + chains) as done:
        means = [exported_model.mean([r.weights for r in mine]) for mine in found.stages]
        exported_model.write_model(manifest, means, directory, eos)
        done()
        for i in range(chains):
            (directory / REPLICAS / str(i)).mkdir(parents=True)
            chain = [mine[i % len(mine)].weights for mine in found.stages]
            exported_model.write_model(manifest, chain, directory / REPLICAS / str(i), eos)
            done()
    run_files.write_json(
        directory / RECORD,
        {
            "run_id": manifest.run_id,
            "round": found.round,
            "step": max(replica.step for mine in found.stages for replica in mine),
            "merge": "mean" if options.mean else "one",
            "stages": [[{"peer_id": r.peer, "step": r.step} for r in mine] for mine in found.stages],
            "replicas": chains,
            "version": __version__,
            "manifest": manifest.model_dump(mode="json"),
        },
    )


def _write_tokenizer(manifest: RunManifest, tokenizer_dir: str | None, directory: Path) -> int | None:
    """Its end-of-text id. Token ids that were given as such (parquet) have a tokenizer only if one is named here."""
    from noloco_p2p.compute import exported_model
    from noloco_p2p.io.data.tokenizers import load_tokenizer

    name = manifest.data.tokenizer
    if manifest.data.kind == "parquet" and tokenizer_dir is None and name == "bytes":
        print("no tokenizer is written: the run read token ids; name theirs with --tokenizer-dir")
        return None
    if tokenizer_dir is not None and manifest.data.kind == "parquet":
        name = tokenizer_dir
    eos = load_tokenizer(name, tokenizer_dir, int(str(manifest.model.config["vocab_size"]))).eos
    exported_model.write_tokenizer(tokenizer_dir or (None if name == "bytes" else name), directory)
    return eos


def read_record(directory: Path) -> tuple[RunManifest, int]:
    """The manifest and the number of single replicas of an exported directory. Raises ConfigError."""
    from noloco_p2p.errors import Violation
    from noloco_p2p.launch.settings import manifest_from_json

    path = directory / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return manifest_from_json(json.dumps(record["manifest"]).encode()), int(record["replicas"])
    except (OSError, ValueError, KeyError, TypeError, Violation) as error:
        raise ConfigError(f"{directory} is not what `noloco export` writes: {path.name} cannot be read") from error


@contextlib.contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """A fresh directory beside `out` that becomes `out` when the context ends well, and is removed when it does not."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}.new")
    try:
        fresh.mkdir(parents=True)
        yield fresh
        fresh.rename(out)
    except OSError as error:
        raise LocalError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
