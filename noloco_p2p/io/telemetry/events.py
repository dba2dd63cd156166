"""What each event of a node does: its metrics, its totals, its lines in the log.

`peers` has one series for each stage and state, other label values are bounded in metrics.py.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping

from noloco_p2p.core.members import STATES
from noloco_p2p.io.telemetry.log import Limiter
from noloco_p2p.io.telemetry.metrics import Deserted, Metrics
from noloco_p2p.io.telemetry.recent_rates import Recent
from noloco_p2p.io.telemetry.totals import Totals

QUIET_S = 5.0
"""Seconds between two log lines about the same trouble."""

Fields = dict[str, object]

logger = logging.getLogger("noloco_p2p")


class Events:
    """The handlers of all events, by kind. Whoever calls one holds a lock, and catches what it raises."""

    def __init__(self, metrics: Metrics, stages: int) -> None:
        self.totals = Totals()
        self.recent = Recent()
        self._metrics = metrics
        self._stages = stages
        self._limiter = Limiter(QUIET_S)
        self._deserted = Deserted(metrics.deserted, stages)
        self._guards: set[int] = set()
        self.handlers: dict[str, Callable[[Fields], None]] = {
            "state": self._state,
            "inner_step": self._inner_step,
            "microbatch": self._microbatch,
            "reroute": self._reroute,
            "busy": self._busy,
            "outer_round": self._outer_round,
            "evaluation": self._evaluation,
            "membership": self._membership,
            "replica_std": self._replica_std,
            "idle": self._idle,
            "bytes": self._bytes,
            "gauge": self._gauge,
            "lag": self._lag,
            "warning": self._warning,
            "info": self._info,
            "stuck": self._stuck,
            "deserted": self._deserted_stages,
            "checkpoint": self._checkpoint,
            "guarded": self._guarded,
            "resumed": self._resumed,
            "moved": self._moved,
        }

    def _state(self, fields: Fields) -> None:
        totals = self.totals
        totals.state = str(fields["state"])
        if totals.state == "training" and totals.training_at is None:
            totals.training_at = time.time()
        self._metrics.show_state(totals.state)
        _log(logging.INFO, f"{totals.state}: {fields['reason']}", "state", fields)

    def _inner_step(self, fields: Fields) -> None:
        metrics, totals, recent = self._metrics, self.totals, self.recent
        tokens, busy_s = _number(fields["tokens"]), _number(fields["busy_s"])
        loss_sum, loss_tokens = _number(fields["loss_sum"]), _number(fields["loss_tokens"])
        totals.inner_steps += 1
        totals.tokens += int(tokens)
        totals.step = _number(fields["step"])
        totals.device_s += busy_s
        totals.last_step_at = time.time()
        metrics.inner_steps.inc()
        metrics.tokens.inc(tokens)
        metrics.device_seconds.inc(busy_s)
        metrics.step.set(totals.step)
        recent.tokens.add(time.monotonic(), tokens)
        recent.learning_rate, recent.grad_norm = _number(fields["learning_rate"]), _number(fields["grad_norm"])
        metrics.learning_rate.set(recent.learning_rate)
        metrics.grad_norm.set(recent.grad_norm)
        if loss_tokens and math.isfinite(loss_sum):
            metrics.loss.set(loss_sum / loss_tokens)
            self.totals.last_losses.append((loss_sum, loss_tokens))
            if totals.first_loss is None:
                totals.first_loss = loss_sum / loss_tokens

    def _microbatch(self, fields: Fields) -> None:
        result = str(fields["result"])
        self.totals.microbatches[result] += 1
        self._metrics.microbatches.add(1, result)
        text = f"microbatch {result}"
        if result == "dropped":
            reason = str(fields.get("reason", "other"))
            self.totals.dropped[reason] += 1
            self._metrics.dropped.add(1, reason)
            text += f" ({reason})"
        if result not in ("done", "repeat"):
            self._trouble(text, "microbatch", fields)

    def _reroute(self, fields: Fields) -> None:
        reason = str(fields["reason"])
        self.totals.reroutes[reason] += 1
        self._metrics.rerouted.add(1, reason)
        self._trouble(f"microbatch routed again: {reason}", "reroute", fields)

    def _busy(self, fields: Fields) -> None:
        direction = str(fields["direction"])
        self.totals.busy_replies[direction] += 1
        self._metrics.busy_replies.add(1, direction)

    def _outer_round(self, fields: Fields) -> None:
        result = str(fields["result"])
        self.totals.outer_rounds[result] += 1
        self._metrics.outer_rounds.add(1, result)
        self._metrics.pulled_bytes.inc(_number(fields["bytes"]))
        if result == "alone":
            self._metrics.rounds_alone.inc()
        else:
            self._metrics.rounds_alone.set(0)
        partner = f" of {fields['partner']}" if fields.get("partner") else ""
        cost = f"{_number(fields['seconds']):.2f} s, {int(_number(fields['bytes'])):,} bytes"
        text = f"outer round {fields['round']}: {result}{partner} ({fields['reason']}), {cost}"
        if self.totals.last_losses:
            loss, tokens = self.totals.last_losses[-1]
            text += f"; inner step {self.totals.inner_steps}, loss {loss / tokens:.3f}"
        _log(logging.INFO, text, "outer_round", fields)

    def _evaluation(self, fields: Fields) -> None:
        loss = _number(fields["loss"])
        self.totals.validation_loss = loss
        self.totals.evaluations += 1
        self._metrics.validation_loss.set(loss)
        text = f"validation at step {fields['step']}: {loss:.4f} nats per token over {fields['tokens']} tokens"
        _log(logging.INFO, text, "evaluation", fields)

    def _membership(self, fields: Fields) -> None:
        counts = fields["counts"]
        if not isinstance(counts, Mapping):
            raise TypeError(f"counts is {counts!r}")
        for stage in range(self._stages):
            for state in STATES:
                self._metrics.peers.labels(stage, state).set(counts.get((stage, state), 0))
        self._metrics.joined.inc(_number(fields.get("joined", 0)))
        self._metrics.departed.inc(_number(fields.get("departed", 0)))

    def _replica_std(self, fields: Fields) -> None:
        self.totals.replica_std = _number(fields["value"])
        self._metrics.replica_std.set(self.totals.replica_std)

    def _idle(self, fields: Fields) -> None:
        cause, seconds = str(fields["cause"]), _number(fields["seconds"])
        self.totals.idle_s[cause] = self.totals.idle_s.get(cause, 0.0) + seconds
        self._metrics.idle_seconds.add(seconds, cause)

    def _bytes(self, fields: Fields) -> None:
        direction, size = str(fields["direction"]), _number(fields["bytes"])
        self.totals.bytes[direction] += int(size)
        self.recent.bytes.add(time.monotonic(), size)
        self._metrics.bytes.add(size, direction, str(fields["kind"]))

    def _gauge(self, fields: Fields) -> None:
        metrics = self._metrics
        gauges = {"in_flight": metrics.in_flight, "waiting": metrics.waiting, "parameters": metrics.parameters}
        gauges[str(fields["name"])].set(_number(fields["value"]))

    def _lag(self, fields: Fields) -> None:
        seconds = _number(fields["seconds"])
        self.totals.largest_lag_s = max(seconds, self.totals.largest_lag_s)
        self.recent.beat_at = time.monotonic()
        self._metrics.lag.set(seconds)

    def _deserted_stages(self, fields: Fields) -> None:
        """A line when a stage comes or goes, none while it stays away."""
        stages = fields["stages"]
        if not isinstance(stages, Mapping):
            raise TypeError(f"stages is {stages!r}")
        gone, back = self._deserted.update({stage: _number(seconds) for stage, seconds in stages.items()})
        for stage, seconds in gone.items():
            text = f"stage {stage} has no replica since {seconds:.0f} s: the run waits for one"
            _log(logging.WARNING, text, "deserted", {"stage": stage, "seconds": seconds})
        for stage, seconds in back.items():
            text = f"stage {stage} has a replica again, after {seconds:.0f} s"
            _log(logging.INFO, text, "deserted", {"stage": stage, "seconds": 0.0})

    def _checkpoint(self, fields: Fields) -> None:
        """The first one is told at info level: the node does write them."""
        self.totals.checkpoints += 1
        seconds, size = _number(fields["seconds"]), _number(fields["bytes"])
        self._metrics.checkpoint_round.set(_number(fields["round"]))
        self._metrics.checkpoint_duration.set(seconds)
        self._metrics.checkpoint_size.set(size)
        self._metrics.checkpoint_timestamp.set(time.time())
        text = f"checkpoint of outer round {fields['round']}: {seconds:.2f} s, {int(size):,} bytes"
        _log(logging.INFO if self.totals.checkpoints == 1 else logging.DEBUG, text, "checkpoint", fields)

    def _guarded(self, fields: Fields) -> None:
        stage, size = int(_number(fields["stage"])), int(_number(fields["bytes"]))
        if not 0 <= stage < self._stages:
            raise ValueError(f"there is no stage {stage}")
        first = stage not in self._guards
        self._guards.add(stage)
        self._metrics.guarded_round.labels(stage).set(_number(fields["round"]))
        text = f"guards stage {stage}: holds its outer round {fields['round']}, {size:,} bytes"
        _log(logging.INFO if first else logging.DEBUG, text, "guarded", fields)

    def _resumed(self, fields: Fields) -> None:
        source, step = str(fields["source"]), _number(fields["step"])
        found = {"source": source, "round": fields["round"], "step": step, "peer": fields.get("peer")}
        self.totals.resumed = found
        of = f" of {fields['peer']}" if fields.get("peer") else ""
        text = f"goes on from step {step:g} (outer round {fields['round']}), weights from: {source}{of}"
        _log(logging.INFO, text, "resumed", fields)

    def _moved(self, fields: Fields) -> None:
        self.totals.moves += 1
        _log(logging.INFO, f"moves to stage {fields['stage']}: {fields['reason']}", "moved", fields)

    def _warning(self, fields: Fields) -> None:
        text = str(fields["message"])
        held = self._limiter.admit(text)
        if held is not None:
            _log(logging.WARNING, text + _more(held), "warning", {})

    def _stuck(self, fields: Fields) -> None:
        """The watchdog tells each of its lines once."""
        _log(logging.INFO if fields["well"] else logging.WARNING, f"watchdog: {fields['message']}", "stuck", fields)

    def _info(self, fields: Fields) -> None:
        _log(logging.INFO, str(fields["message"]), "info", {})

    def _trouble(self, text: str, kind: str, fields: Fields) -> None:
        """A warning, at most one of its text in QUIET_S; who and why come from the fields."""
        held = self._limiter.admit(text)
        if held is not None:
            peer = f", {fields['peer']}" if "peer" in fields else ""
            reason = f": {fields['message']}" if "message" in fields else ""
            _log(logging.WARNING, text + peer + reason + _more(held), kind, fields)


def _log(level: int, text: str, kind: str, fields: Fields) -> None:
    """`fields` go into JSON lines beside the message, which they may not replace."""
    named = {name: value for name, value in fields.items() if name != "message"}
    logger.log(level, "%s", text, extra={"fields": {"event": kind, **named}})


def _more(held: int) -> str:
    return f" (and {held} more)" if held else ""


def _number(value: object) -> float:
    if isinstance(value, int | float):
        return float(value)
    raise TypeError(f"{value!r} is not a number")
