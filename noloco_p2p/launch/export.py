"""`noloco export`: the trained model of a run as a Hugging Face directory."""

import contextlib
import json
import logging
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p import __version__
from noloco_p2p.config import RunManifest
from noloco_p2p.errors import NO_JSON, ConfigError, Violation
from noloco_p2p.io.data.tokenizers import Tokenizer, load_tokenizer
from noloco_p2p.io.durable_files import writing
from noloco_p2p.launch import homes, node_probe, run_files, settings
from noloco_p2p.launch.homes import Home
from noloco_p2p.launch.model_card import CARD, model_card

if TYPE_CHECKING:
    from noloco_p2p.launch.collection import CollectedWeights

Say = Callable[[str], None]
"""Accepts a line to show to the user."""
RECORD = "noloco.json"
"""File in an exported directory: where the weights come from, and the run's manifest."""
REPLICAS = "replicas"
"""Folder in an exported directory: `<i>/` is the model made of the i-th replica of every stage, without averaging."""
TOKENIZER = "tokenizer_config.json"
"""File in an exported directory, if the tokenizer was known."""


def run_export(
    join: Sequence[str],
    dirs: Sequence[Path],
    out: Path,
    *,
    merge: str,
    replicas: bool,
    tokenizer_dir: str | None,
    say: Say = print,
) -> None:
    """Collect, merge and write the weights, and `say` which ones were used. Raises ConfigError, LocalError, PeerError.

    The weights come from a swarm (`join`) or from checkpoints (`dirs`). `merge` is `mean` or `trimmed` (mean), over all
    replicas of each stage, or `one` replica of each. With `replicas`, the models before averaging are written as well.
    """
    if bool(join) == bool(dirs):
        raise ConfigError("say where the weights are: either --join ADDR (a running swarm) or --from DIR")
    homes.refuse_existing(out)
    found = _collected(join, dirs, one=merge == "one", say=say)
    with replaced(out) as fresh:
        write(found, fresh, merge, tokenizer_dir, replicas, say)
    for stage, mine in enumerate(found.stages):
        peers = ", ".join(f"{replica.peer} (step {replica.step})" for replica in mine)
        what = "trimmed mean of " if merge == "trimmed" else "mean of " if len(mine) > 1 else ""
        say(f"stage {stage}: {what}{peers}")
    say(f"run {found.run_id}, outer round {found.round} → {out}")


def _collected(join: Sequence[str], directories: Sequence[Path], *, one: bool, say: Say) -> "CollectedWeights":
    if directories:
        from noloco_p2p.launch.collection import from_directories

        return from_directories(directories, one=one, say=say)
    import uvloop

    from noloco_p2p.launch.live_collection import from_swarm

    logging.getLogger("hivemind").setLevel(logging.ERROR)
    found: CollectedWeights = uvloop.run(from_swarm(join, one=one, say=say))
    return found


def write(
    found: "CollectedWeights", directory: Path, merge: str, tokenizer_dir: str | None, replicas: bool, say: Say = print
) -> None:
    """Write model, tokenizer and record to an existing directory; with `replicas`, also the models before averaging.

    Raises ConfigError, LocalError.
    """
    from noloco_p2p.compute import exported_model
    from noloco_p2p.launch.progress_line import counted

    exported_model.silence_transformers()
    manifest = found.manifest
    eos = _write_tokenizer(manifest, tokenizer_dir or found.local.tokenizer_dir, directory, say)
    most = max(map(len, found.stages))
    chains = most if merge != "one" and replicas and most > 1 else 0
    merged = exported_model.trimmed_mean if merge == "trimmed" else exported_model.mean
    for stage, mine in enumerate(found.stages):
        if merge == "trimmed" and len(mine) < 3:
            raise ConfigError(f"--merge trimmed needs three replicas of each stage; stage {stage} has {len(mine)} here")
    models = {directory: [merged([r.weights for r in mine]) for mine in found.stages]}
    for i in range(chains):
        models[directory / REPLICAS / str(i)] = [mine[i % len(mine)].weights for mine in found.stages]
    with counted("writing", len(models)) as done:
        for place, weights in models.items():
            place.mkdir(parents=True, exist_ok=True)
            exported_model.write_model(manifest, weights, place, eos)
            done()
    record = {
        "run_id": found.run_id,
        "round": found.round,
        "step": max(replica.step for mine in found.stages for replica in mine),
        "merge": merge,
        "stages": [[{"peer_id": r.peer, "step": r.step} for r in mine] for mine in found.stages],
        "replicas": chains,
        "version": __version__,
        "manifest": manifest.model_dump(mode="json"),
        "data_files": found.local.data_files,
    }
    run_files.write_json(directory / RECORD, record)
    run_files.write_whole(directory / CARD, model_card(record, found.summary).encode())


def _write_tokenizer(manifest: RunManifest, tokenizer_dir: str | None, directory: Path, say: Say) -> int | None:
    """Write the run's tokenizer. Returns its end-of-text id; None if the tokenizer is unknown.

    For data that is token ids (parquet) with tokenizer `bytes`, it is only known if `tokenizer_dir` is given.
    """
    from noloco_p2p.compute import exported_model

    name, parquet = manifest.data.tokenizer, manifest.data.kind == "parquet"
    if parquet and tokenizer_dir is None and name == "bytes":
        say("no tokenizer written: the run read token ids; name their tokenizer with --tokenizer-dir")
        return None
    if parquet and tokenizer_dir is not None:
        name = str(Path(tokenizer_dir).absolute())
    try:
        eos = load_tokenizer(name, tokenizer_dir, int(str(manifest.model.config["vocab_size"]))).eos
    except ConfigError as error:
        raise ConfigError(f"{error}; --tokenizer-dir DIR names the run's tokenizer") from error
    exported_model.write_tokenizer(tokenizer_dir or (None if name == "bytes" else name), directory)
    return eos


def read_record(directory: Path) -> tuple[RunManifest, int]:
    """(manifest, number of models under REPLICAS) of an exported directory. Raises ConfigError."""
    more = {Home.SWARM: "", Home.NODE: ", with another --from for each other stage"}.get(homes.kind_of(directory))
    made = f"noloco export --from {shlex.quote(str(directory))} --out DIR makes one{more}"
    homes.require("", directory, Home.MODEL, advice="name another one" if more is None else made)
    path = directory / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        manifest = settings.manifest_from_json(json.dumps(record["manifest"]).encode())
        int(str(manifest.model.config["vocab_size"]))  # every tokenizer is checked against it
        return manifest, int(record["replicas"])
    except (OSError, *NO_JSON, KeyError, TypeError, OverflowError, Violation) as error:
        raise ConfigError(f"{directory} is not what `noloco export` writes: {path.name} cannot be read") from error


def recorded_data(directory: Path) -> tuple[str, ...]:
    """The data files that the run read, as absolute paths on the machine that exported the directory."""
    return node_probe.texts((node_probe.read_json(directory / RECORD) or {}).get("data_files"))


def exported_tokenizer(manifest: RunManifest, directory: Path) -> Tokenizer:
    """The tokenizer of an exported directory. Raises ConfigError."""
    if not (directory / TOKENIZER).exists():
        raise ConfigError(f"{directory} has no tokenizer: export again with --tokenizer-dir")
    name = manifest.data.tokenizer if manifest.data.kind != "parquet" else str(directory.absolute())
    vocabulary = int(str(manifest.model.config["vocab_size"]))
    return load_tokenizer(name, None if name == "bytes" else str(directory), vocabulary)


@contextlib.contextmanager
def replaced(out: Path) -> Iterator[Path]:
    """A fresh directory that becomes `out` if the context ends without an error, and is removed otherwise.

    It is created next to `out`, or inside an `out` that exists, which may be a volume or a link, or have hidden files.
    """
    there, unique = out.is_dir(), secrets.token_hex(4)
    fresh = out / f".{unique}.new" if there else out.with_name(f".{out.name}.{unique}.new")
    with writing(out), contextlib.ExitStack() as closing:
        closing.callback(shutil.rmtree, fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        # Some libraries write weights that only their owner may read: grant what the directory grants.
        for path in fresh.rglob("*"):
            path.chmod(fresh.stat().st_mode & (0o777 if path.is_dir() else 0o666))
        if not there:
            fresh.rename(out)
            return
        homes.refuse_existing(out)  # another command may have filled it meanwhile
        # The record is moved last, because it marks the directory as a model.
        for path in sorted(fresh.iterdir(), key=lambda path: path.name == RECORD):
            path.rename(out / path.name)
