"""`noloco track` and `noloco swarm --track`: a swarm's figures as one run of TensorBoard or Weights & Biases.

They are written by an observer, from what the nodes report at `/status`; no node is aware of it.
"""

import asyncio
import importlib.util
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import ConfigError, LocalError, PeerError, Unreachable
from noloco_p2p.humanize import plural
from noloco_p2p.io.durable_files import writing
from noloco_p2p.launch import homes, node_probe
from noloco_p2p.observe import survey
from noloco_p2p.observe.diagnosis.findings import Report
from noloco_p2p.observe.diagnosis.swarm_view import SwarmView
from noloco_p2p.observe.top import Readings, readings

Tracker = Literal["tensorboard", "wandb"]
INTERVAL_S = 2.0
"""Pause between two readings."""
HOME = Path("noloco-track")
"""Where `noloco track` writes without --dir."""
OF_STAGE_0 = ("loss", "learning_rate", "grad_norm")
"""Figures averaged over the replicas of stage 0."""
FINAL = ("validation_loss", "tokens_per_s")
"""Figures of `summary.json` that `noloco swarm --track` writes at the last step."""


class EventFile:
    """An event file of TensorBoard (the extra `tensorboard`), written without torch.

    TensorBoard's own writer has a thread, which prints a traceback if the disk is full.
    """

    def __init__(self, directory: Path) -> None:
        """Create the file in this directory. Raises LocalError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._directory = Event, directory
        with writing(directory):
            self._file = RecordWriter((directory / f"events.out.tfevents.{time.time():.6f}").open("xb"))
            self._file.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self.how_to_view = f"tensorboard --logdir {shlex.quote(str(directory))}"
        """The command that shows it."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step that is not before the last step written. Raises LocalError."""
        values = [{"tag": name, "simple_value": value} for name, value in figures.items()]
        event = self._event(wall_time=time.time(), step=step, summary={"value": values})
        with writing(self._directory):
            self._file.write(event.SerializeToString())
            self._file.flush()

    def close(self) -> None:
        """Write what is buffered and close the file. Raises LocalError."""
        with writing(self._directory):
            self._file.close()


class WandbRun:
    """A run of Weights & Biases (the extra `wandb`): online, or in files to upload later with WANDB_MODE=offline."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any]) -> None:
        """Start a run with files in `directory`/wandb. Raises ConfigError if wandb refuses, as without an account."""
        import wandb

        self._error: type[Exception] = wandb.errors.Error
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        try:
            self._run = wandb.init(project="noloco", name=name, config=dict(config), dir=str(directory), settings=quiet)
        except self._error as error:
            raise ConfigError(f"wandb: {str(error).rstrip('.')}; WANDB_MODE=offline writes files only") from error
        online = not self._run.offline and self._run.url  # offline, wandb would warn that it has no address
        self.how_to_view = online or f"wandb sync {shlex.quote(str(Path(self._run.dir).parent))}"
        """The address of the run, or the command that uploads it."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """As `EventFile.write`."""
        with self._local_errors():
            self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Send what is buffered and end the run. Raises LocalError."""
        with self._local_errors():
            self._run.finish()

    @contextmanager
    def _local_errors(self) -> Iterator[None]:
        try:
            yield
        except (self._error, OSError) as error:  # an OSError if wandb's own process has died
            raise LocalError(f"wandb: {error}") from error


def check(option: str, to: Tracker) -> None:
    """Raise ConfigError, naming the command-line `option`, if the tracker's package is not installed."""
    if importlib.util.find_spec(to) is None:
        raise ConfigError(f"{option} {to} needs the package {to}: pip install {to}")


def open_sink(to: Tracker, directory: Path, name: str, config: Mapping[str, Any]) -> EventFile | WandbRun:
    """Start a run in a folder of `directory` that has the tracker's name. Raises ConfigError or LocalError."""
    with writing(directory):
        (directory / to).mkdir(parents=True, exist_ok=True)
    return EventFile(directory / to) if to == "tensorboard" else WandbRun(directory, name, config)


def figures(swarm: SwarmView) -> dict[str, float]:
    """The figures written for one reading: means over the nodes that know a value, sums of rates, nodes by state."""
    means = {name: swarm.mean(name) for name in OF_STAGE_0}
    means |= {f"replica_std/stage_{stage}": swarm.mean("replica_std", stage) for stage in range(swarm.stages)}
    found = {name: mean for name, mean in means.items() if mean is not None}
    if not swarm.ended:
        found["tokens_per_s"] = swarm.tokens_per_s
    found["bytes_per_s"] = sum(status.figures.bytes_per_s for status in swarm.statuses.values())
    counts = Counter(status.advert.state for status in swarm.statuses.values())
    counts["silent"] = len(swarm.reports) - len(swarm.statuses)
    return found | {f"nodes/{state}": count for state, count in counts.items() if count}


class Tracking:
    """Writes readings of a swarm to a sink, each step once."""

    def __init__(self, sink: EventFile | WandbRun) -> None:
        self.sink = sink
        self.step = 0
        """The last step that was written."""
        self.written = 0
        self.ended = False
        """Whether the run had ended by the last reading."""
        self.no_nodes: dict[str, float] = {}
        """0 for each state that some node has been in: the series of a state goes on after the last node leaves it."""
        self._validated: dict[PeerId, float] = {}
        """The validation loss last written for each node."""

    def take(self, reports: Sequence[Report]) -> None:
        """Write what is new in a reading. Raises Unreachable if no node answered, and LocalError."""
        swarm = _answering(reports)
        found, step = self.no_nodes | figures(swarm), round(swarm.step)
        self.no_nodes |= {name: 0 for name in found if name.startswith("nodes/")}
        # A validation loss belongs to its own step only: once written, it is not part of the mean at a later step.
        losses = {peer: s.figures.validation_loss for peer, s in swarm.statuses.items() if s.advert.stage == 0}
        new = {peer: loss for peer, loss in losses.items() if loss is not None and loss != self._validated.get(peer)}
        found |= {"validation_loss": fmean(new.values())} if new else {}
        if swarm.begun and (step > self.step or (step == self.step and "validation_loss" in found)):
            self.write(step, found)
            self._validated |= new
        self.ended = swarm.ended or swarm.step >= swarm.steps > 0

    def write(self, step: int, found: Mapping[str, float]) -> None:
        """Write the figures of a step. Raises LocalError."""
        self.sink.write(step, found)
        self.step, self.written = step, self.written + 1

    async def follow(self, read: Readings, stop: threading.Event, say: Callable[[str], None]) -> None:
        """Read and write until `stop` is set, or the run has ended and no node answers any more. Raises LocalError."""
        silent = False
        while not await asyncio.to_thread(stop.wait, INTERVAL_S):
            try:
                self.take(await read())
                silent = False
            except PeerError as error:
                if self.ended:
                    return
                if not silent:
                    say(f"waiting for the swarm: {error}")
                silent = True


@contextmanager
def tracked(to: Tracker, run_dir: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Inside the `with`, a thread writes the figures of the swarm in this directory; at the end, those of its summary.

    A sink that fails ends the tracking, not the run. Raises ConfigError or LocalError if the sink cannot be opened.
    """
    tracking = Tracking(open_sink(to, run_dir, run_dir.name, config))
    print(f"track     {tracking.sink.how_to_view}", flush=True)
    stop, failures = threading.Event(), list[LocalError]()

    def work() -> None:
        with _reported(failures):
            asyncio.run(tracking.follow(partial(_of_directory, run_dir), stop, lambda _: None))

    thread = threading.Thread(target=work, name="track")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        summary = node_probe.read_json(run_dir / node_probe.SUMMARY) or {}
        with _reported(failures), closing(tracking.sink):
            if summary.get("completed"):
                known = {name: float(summary[name]) for name in FINAL if summary.get(name) is not None}
                known |= tracking.no_nodes | {"nodes/finished": len(summary["nodes"])}
                tracking.write(max(tracking.step, int(summary["steps"])), known)


def run_track(join: Sequence[str], url: str | None, to: Tracker, directory: Path | None) -> None:
    """Write until the run has ended, or Ctrl-C. Raises ConfigError, LocalError, and PeerError if no node answers."""
    check("--to", to)
    if directory is not None:
        homes.require("--dir ", directory, homes.Home.TRACKED, homes.Home.EMPTY)
    with suppress(KeyboardInterrupt):
        asyncio.run(_observe(join, url, to, directory))


async def _observe(join: Sequence[str], url: str | None, to: Tracker, directory: Path | None) -> None:
    say = partial(print, flush=True)
    async with readings(join, url) as read:
        reports = await read()
        swarm = _answering(reports)
        label = re.sub(r"[^\w-]+", "-", f"{swarm.run_name[:64]}-{swarm.run_id[:8]}")
        config = {"run_id": swarm.run_id, "stages": swarm.stages, "steps": swarm.steps}
        tracking = Tracking(open_sink(to, directory or HOME / label, label, config))
        say(f"track     {tracking.sink.how_to_view}")
        try:
            tracking.take(reports)
            await tracking.follow(read, threading.Event(), say)
        finally:
            tracking.sink.close()
            say(f"{plural(tracking.written, 'reading')} written, up to step {tracking.step:,}")


def _answering(reports: Sequence[Report]) -> SwarmView:
    """The swarm of a reading. Raises Unreachable if no node answered."""
    swarm = SwarmView(reports)
    if not swarm.statuses:
        why = next((f": {report.failure}" for report in swarm.reports), "")
        raise Unreachable(f"no node answers with its status (nodes found: {len(swarm.reports)}){why}")
    return swarm


async def _of_directory(run_dir: Path) -> list[Report]:
    """The swarm of the nodes in this directory, as seen by the first one that answers. Raises Unreachable."""
    for node_dir in node_probe.node_dirs(run_dir):
        if (found := node_probe.running(node_dir)) is not None:
            with suppress(PeerError):
                return await survey.by_url(found.metrics)
    raise Unreachable(f"no node of {run_dir} answers")


@contextmanager
def _reported(failures: list[LocalError]) -> Iterator[None]:
    """Report a sink that fails as one line, the first time, and carry on without it."""
    try:
        yield
    except LocalError as error:
        if not failures:
            print(f"tracking has ended: {error}", flush=True)
        failures.append(error)
