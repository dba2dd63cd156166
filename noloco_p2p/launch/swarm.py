"""`noloco swarm`: a whole swarm as node processes on this machine.

    plan → start all nodes → tell the others where the first one is → watch → end → summary.json

The launcher trains nothing and shares no memory with the nodes: it reads their files and their metrics.
"""

import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from noloco_p2p.core import hours
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.host import cores
from noloco_p2p.humanize import plural
from noloco_p2p.launch import foreseen, join_file, node_probe, run_files, swarm_end
from noloco_p2p.launch import swarm_plan as planning
from noloco_p2p.launch.fork_server_process import ForkServerProcess
from noloco_p2p.launch.line_spec import LineSpec
from noloco_p2p.launch.local_time import local_time
from noloco_p2p.launch.node_process import NodeProcess, end_all
from noloco_p2p.launch.relay_process import RelayProcess
from noloco_p2p.launch.settings import Overrides
from noloco_p2p.launch.stop_signals import stop_signals
from noloco_p2p.launch.swarm_display import Display, complain, current_row, row, warnings
from noloco_p2p.launch.swarm_plan import ROOT_KEY, ResumePoint, SwarmPlan
from noloco_p2p.launch.swarm_summary import summarise, summary_lines

ADDRESS = "join-address"
"""File in the run's directory from which all nodes but the first read the address to join."""
TICK_S = 0.2
"""Pause between two looks at the processes, seconds."""
START_INTERVAL_S = 1.0
"""Time between two updates of the display until the first inner step, seconds."""
LOG_LINES = 15
"""Number of lines shown from the log of a node that failed."""
LEAVE_MARGIN_S = 10.0
"""Time that a node has beyond `limits.drain_s` to close what it has open, seconds."""
KILL_UNSTEPPED_S = 0.5
"""Time that nodes have to end before they are killed if none has taken a step: they have nothing to lose, seconds."""

StartTracking = Callable[[Path, Mapping[str, Any]], AbstractContextManager[None]]
"""Makes a context that is entered while the swarm runs, from the run's directory and its manifest."""


class LocalSwarm:
    """The processes of one run, from start to end. `run` starts and ends them all; no process outlives it."""

    def __init__(
        self,
        plan: SwarmPlan,
        run_dir: Path,
        resumed: ResumePoint | None,
        display: Display,
        signals: list[int],
        link: str | None,
    ) -> None:
        """`signals`: the requests to stop so far, a list that may grow; `link` as in `--link`. Raises ConfigError."""
        self._plan = plan
        self._arguments = plan.arguments(run_dir)
        self._resumed = resumed
        self._display = display
        self._signals = signals
        self._nodes = [NodeProcess(run_dir, stage, replica) for stage, replica in plan.nodes]
        self._server = ForkServerProcess()
        self._relay = None if link is None else RelayProcess(link, [n.name for n in self._nodes], plan.manifest.seed)
        self._failed: NodeProcess | None = None
        self._cut_off = False
        """The relay has died, so no node can reach another."""
        self._saved = False
        """Whether the run has ended early, or its last weights have been written."""
        self._shown_at = 0.0
        self._has_stepped = False
        """Whether any node has taken an inner step."""
        self._path = run_dir / node_probe.SUMMARY

    def run(self) -> int:
        """Start, watch, end, write the summary. Returns the exit code."""
        began = time.monotonic()
        try:
            if self._start():
                self._watch()
            self._leave()
            self._display.show(list(map(current_row, self._nodes)), [])
            traffic = self._link_traffic()
        finally:
            end_all(self._nodes, None if self._has_stepped else KILL_UNSTEPPED_S)
            self._server.close()
            if self._relay is not None:
                self._relay.close()
            self._display.close()
        step = None if self._resumed is None else self._resumed.step
        summary = summarise(self._nodes, self._plan.manifest, step, time.monotonic() - began)
        try:
            self._saved = not summary["completed"] or planning.is_saved(self._plan, self._path.parent)
        except LocalError as error:
            self._display.say(f"whether the last weights were saved is unknown: {error}")
        summary["completed"] = summary["completed"] and self._saved and not self._signals
        summary |= {"link": traffic, "command": run_files.command("noloco")}
        for line in summary_lines(summary):
            self._display.say(line)
        code = self._exit_code(summary)
        stored = run_files.store_unless_less(self._path, summary)  # raises if the disk is full
        self._display.say(f"summary: {self._path}" if stored else "keeping the earlier summary, which is more complete")
        return code

    def _start(self) -> bool:
        """Start all nodes at once, and tell the others where the first one is once it can be reached.

        False if it never could be, because something failed or somebody asked to stop.
        """
        self._server.start(self._plan.environment(max(1, cores() // len(self._nodes))))
        if self._relay is not None:
            self._relay.start(self._nodes)
        first, *others = self._nodes
        while not self._server.ready:
            if self._must_end():
                return False
            self._show()
            time.sleep(TICK_S)
        address_file = self._path.parent / ADDRESS
        join_file.remove(address_file)
        # With the key of a members-only run, the first node admits the others.
        key = [] if self._plan.manifest.security.root_key is None else ["--key", str(self._path.parent / ROOT_KEY)]
        first.start(self._server, [*self._arguments, *key])
        for node in others:
            node.start(self._server, [*self._arguments, "--join", f"{join_file.AT}{address_file}"])
        while (reached := first.endpoints) is None:
            if self._must_end() or not first.running:
                return False
            self._show()
            time.sleep(TICK_S)
        join_file.write(address_file, [self._plan.join_address(first.dir, reached.join[0])])
        return True

    def _watch(self) -> None:
        """Show the state of the nodes until all have ended, one has failed, or somebody asks to stop."""
        with ThreadPoolExecutor(len(self._nodes)) as pool:
            while any(node.running for node in self._nodes) and not self._must_end():
                self._show(pool)
                time.sleep(TICK_S)
        self._must_end()  # records a node that failed last

    def _show(self, pool: Executor | None = None) -> None:
        """Update the display if it is due. With a `pool`, the nodes' metrics are read first."""
        now = time.monotonic()
        if now - self._shown_at >= (self._display.interval_s if self._has_stepped else START_INTERVAL_S):
            self._shown_at = now
            notes = self._read(pool) if pool is not None else []
            doing = self._pauses() or ("" if self._has_stepped else self._waits_for())
            self._display.show(list(map(current_row, self._nodes)), notes, doing)

    def _read(self, pool: Executor) -> list[str]:
        """Read the nodes' metrics. Returns a line for each thing that is wrong."""
        readings = list(pool.map(NodeProcess.read_metrics, self._nodes))
        self._has_stepped = self._has_stepped or any(row(node).get("inner step") for node in self._nodes)
        return warnings(readings)

    def _pauses(self) -> str:
        """A line that says until when all nodes pause, outside the hours they share; empty if they do not all pause."""
        until = hours.closed_until(self._plan.local.limits.hours, local_time())
        if until is None or {row(node).get("state") for node in self._nodes} - {None, "starting", "paused", "silent"}:
            return ""
        return f"outside limits.hours: all nodes pause until {until}"

    def _waits_for(self) -> str:
        """A line that says what is still missing before the first inner step."""
        if not self._server.ready:
            return "importing torch"
        there = [node for node in self._nodes if node.endpoints is not None]
        if len(there) < len(self._nodes):
            return f"starting {plural(len(self._nodes), 'node')}: {len(there)} of {len(self._nodes)}"
        ready = {node.stage for node in self._nodes if row(node).get("state") not in (None, "starting", "silent")}
        missing = [str(stage) for stage in range(self._plan.manifest.stages) if stage not in ready]
        return f"waiting for stage {', '.join(missing)}" if missing else "waiting for the first inner step"

    def _must_end(self) -> bool:
        """Whether somebody asked to stop, or a node or the relay has failed, which is recorded for the exit code."""
        self._failed = self._failed or next((c for c in self._nodes if c.exit_code not in (None, 0)), None)
        self._cut_off = self._cut_off or not (self._relay is None or self._relay.running)
        return self._failed is not None or bool(self._signals) or self._cut_off

    def _link_traffic(self) -> dict[str, Any] | None:
        """The value of `--link`, and the bytes carried by each node's line if they are known; None without `--link`."""
        if self._relay is None:
            return None
        line = {"line": self._relay.link}
        try:
            return line | self._relay.counts()
        except LocalError as error:
            self._display.say(f"the traffic of each line is unknown: {error}")
            return line

    def _leave(self) -> None:
        """If the run ends early, let the nodes finish what they hold; another signal stops them at once.

        The stages leave one after the other, so that microbatches of an earlier stage still find the later ones.
        """
        if self._cut_off or not any(node.running for node in self._nodes):
            return
        heard, nodes = len(self._signals), self._nodes
        self._display.say("leaving in order; a second signal stops at once" if heard else "stopping the other nodes")
        with ThreadPoolExecutor(len(nodes)) as pool:
            self._read(pool)
        if not self._has_stepped:
            return
        give_up_at = time.monotonic() + self._plan.local.limits.drain_s + LEAVE_MARGIN_S
        for stage in range(self._plan.manifest.stages):
            leaving = [node for node in nodes if node.stage == stage]
            for node in leaving:
                node.terminate()
            while any(node.running for node in leaving):
                self._show_leaving()
                if time.monotonic() >= give_up_at or len(self._signals) > heard:
                    return
                time.sleep(TICK_S)
        self._show_leaving()

    def _show_leaving(self) -> None:
        left = sum(not node.running for node in self._nodes)
        self._display.show(list(map(row, self._nodes)), [], f"{left} of {len(self._nodes)} nodes have left")

    def _exit_code(self, summary: Mapping[str, Any]) -> int:
        """The exit code; standard error says what went wrong. A signal after the end of a completed run is too late."""
        if self._failed is not None:
            log = (f"  {line}" for line in self._failed.last_lines(LOG_LINES))
            complain(f"error: node {self._failed.name} {self._failed.ending}; the end of {self._failed.log}:", *log)
        if summary["completed"]:
            return 0
        if self._signals:
            return 128 + self._signals[0]
        if self._failed is not None:
            return 2 if self._failed.exit_code == 2 else 1
        if self._cut_off:
            complain("error: the relay of --link died, so no node could reach another")
        elif self._saved:
            complain("error: a node left before the end of the run; see the logs")
        elif summary["inner_steps"]:
            why = "the last weights of a stage could not be saved; the logs of its nodes say why"
            complain(f"error: {why}: fix that, then start again with this --dir")
        else:
            lost = "nobody has the weights of a stage any more: its checkpoints were deleted, or never saved"
            complain(f"error: the run has ended, but {lost}; start another run in another --dir")
        return 1


def run_swarm(
    overrides: Overrides,
    directory: Path | None,
    link: str | None,
    *,
    members: bool = False,
    plain: bool = False,
    sample: bool = True,
    start_tracking: StartTracking | None = None,
) -> int:
    """Run a swarm to its end. Returns the exit code.

    `link`: the emulated line that each node gets (`line_spec.FORM`). `members`: a members-only run, whose key is made
    in its directory. `sample`: the model writes a few lines at the end. `start_tracking` makes a context that is
    entered before the nodes start and left at the end. Raises ConfigError or LocalError before any node is started.
    """
    if link is not None:
        LineSpec.parse(link)
    plan = planning.make_plan(overrides, directory)
    planning.check_key(plan, directory)
    if members and overrides.says_who_may_join and plan.manifest.security.root_key is None:
        raise ConfigError("--members and security: open contradict each other: leave one of them out")
    foreseen.check_swarm(plan.manifest, plan.local, directory or node_probe.HOME, lambda line: print(line, flush=True))
    run_dir = planning.make_run_dir(plan.manifest.name, directory)
    with planning.held(run_dir):
        plan = planning.make_plan(overrides, directory)  # another launcher may have been here meanwhile
        planning.wait_for_old_nodes([run_dir / f"{stage}-{replica}" for stage, replica in plan.nodes])
        resumed = planning.resume_point(plan, run_dir) if plan.resumes else None
        plan = planning.for_members(plan, run_dir) if members else plan
        plan.write(run_dir)
        m = plan.manifest
        display = Display(m.steps, plain)
        size = f"{plural(m.stages, 'stage')} × {plural(m.start_replicas, 'replica')}, {plural(m.steps, 'step')}"
        display.say(f"{size}, in {run_dir}")
        if resumed is not None:
            display.say(f"resumes from its checkpoints, near step {resumed.step} (outer round {resumed.round})")
        elif plan.resumes:
            display.say("starting again at step 0: nothing was saved")
        watched = nullcontext() if start_tracking is None else start_tracking(run_dir, m.model_dump(mode="json"))
        with watched, stop_signals() as signals:
            code = LocalSwarm(plan, run_dir, resumed, display, signals, link).run()
        if signals and code != 0:
            display.say(f"continue with: noloco swarm --dir {shlex.quote(str(run_dir))}")
        elif code == 0:
            if sample and not signals:
                display.say("importing torch for a sample of the model (--no-sample skips it)")
                print("\n".join(swarm_end.sample_lines(run_dir)))
            swarm_end.say_what_next(run_dir, display.say)
        return code
