"""The Telemetry port: metrics on /metrics, totals for the node's summary, and lines for its log.

What an event does is in the table of handlers; an event of another kind is only logged, at debug level. `peers` has
one series for each stage and state, other label values are bounded in metrics.py.
"""

import json
import logging
import math
import threading
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from noloco_p2p.core.members import STATES
from noloco_p2p.errors import LocalError
from noloco_p2p.io.log import Limiter
from noloco_p2p.io.metrics import Metrics

QUIET_S = 5.0
"""Seconds between two log lines about the same trouble."""

FINAL_STEPS = 10
"""Inner steps whose loss is the run's final loss."""

Fields = dict[str, object]

logger = logging.getLogger("noloco_p2p")


@dataclass(slots=True)
class Totals:
    """A node's whole run in figures. Losses are nats per token; points in time are Unix seconds."""

    state: str = ""
    step: float = 0.0
    inner_steps: int = 0
    tokens: int = 0
    evaluations: int = 0
    outer_rounds: Tally[str] = field(default_factory=Tally)
    microbatches: Tally[str] = field(default_factory=Tally)
    reroutes: Tally[str] = field(default_factory=Tally)
    busy_replies: Tally[str] = field(default_factory=Tally)
    bytes: Tally[str] = field(default_factory=Tally)
    idle_s: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    largest_lag_s: float = 0.0
    first_loss: float | None = None
    """Of the first inner step that had tokens."""
    validation_loss: float | None = None
    """Of the last evaluation."""
    replica_std: float | None = None
    training_at: float | None = None
    """When the state became `training` for the first time."""
    last_step_at: float | None = None
    """When the last inner step ended."""


class PrometheusTelemetry:
    """Telemetry of ports.py. `stages` bounds the series of `peers`; `serve` opens the port."""

    def __init__(self, stages: int) -> None:
        self.registry = CollectorRegistry()
        self._metrics = Metrics(self.registry)
        self._stages = stages
        self._server: WSGIServer | None = None
        self._lock = threading.Lock()
        self._limiter = Limiter(QUIET_S)
        self._totals = Totals()
        self._last_losses: deque[tuple[float, float]] = deque(maxlen=FINAL_STEPS)
        self._handlers: dict[str, Callable[[Fields], None]] = {
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
        }

    def serve(self, host: str, port: int) -> int:
        """Answer scrapes from a thread of its own; returns the port (0 picks one). LocalError when it is in use."""
        try:
            self._server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise LocalError(
                f"metrics: {host} port {port} cannot be opened ({error.strerror or error}); set listen.metrics_port"
            ) from error
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop to answer scrapes (half a second at most)."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def identify(self, **labels: str) -> None:
        """Fill in node_info: peer id, run id, stage, version."""
        self._metrics.node.info(labels)

    def event(self, kind: str, /, **fields: object) -> None:
        """See `ports.Telemetry`."""
        try:
            handler = self._handlers.get(kind)
            if handler is None:
                logger.debug("%s %s", kind, fields)
                return
            with self._lock:
                handler(fields)
        except Exception:  # an instrument may never stop what it watches
            if self._limiter.admit(f"fault {kind[:40]}") is not None:
                logger.debug("telemetry: event %s failed", kind, exc_info=True)

    def span(self, name: str) -> AbstractContextManager[None]:
        """See `ports.Telemetry`."""
        return self._metrics.phases.span(name)

    def totals(self) -> dict[str, object]:
        """The fields of Totals, JSON-ready, and what follows from them under the names of `summary.json`.

        `final_loss` is that of the last ten inner steps, None before the first.
        """
        with self._lock:
            totals, losses = self._totals, list(self._last_losses)
            figures = {each.name: getattr(totals, each.name) for each in fields(totals)}
            found: dict[str, object] = json.loads(json.dumps(figures))
        tokens = sum(tokens for _, tokens in losses)
        return found | {
            "final_loss": sum(loss for loss, _ in losses) / tokens if tokens else None,
            "pulled": sum(totals.outer_rounds.values()) - totals.outer_rounds["alone"],
            "alone": totals.outer_rounds["alone"],
            "rerouted": sum(totals.reroutes.values()),
            "bytes_sent": totals.bytes["out"],
            "bytes_received": totals.bytes["in"],
        }

    def _state(self, fields: Fields) -> None:
        totals = self._totals
        totals.state = str(fields["state"])
        if totals.state == "training" and totals.training_at is None:
            totals.training_at = time.time()
        _log(logging.INFO, f"{totals.state}: {fields['reason']}", "state", fields)

    def _inner_step(self, fields: Fields) -> None:
        metrics, totals = self._metrics, self._totals
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
        metrics.learning_rate.set(_number(fields["learning_rate"]))
        metrics.grad_norm.set(_number(fields["grad_norm"]))
        if loss_tokens and math.isfinite(loss_sum):
            metrics.loss.set(loss_sum / loss_tokens)
            self._last_losses.append((loss_sum, loss_tokens))
            if totals.first_loss is None:
                totals.first_loss = loss_sum / loss_tokens

    def _microbatch(self, fields: Fields) -> None:
        result = str(fields["result"])
        self._totals.microbatches[result] += 1
        self._metrics.microbatches.add(1, result)
        if result not in ("done", "repeat"):
            self._trouble(f"microbatch {result}", "microbatch", fields)

    def _reroute(self, fields: Fields) -> None:
        reason = str(fields["reason"])
        self._totals.reroutes[reason] += 1
        self._metrics.rerouted.add(1, reason)
        self._trouble(f"microbatch routed again: {reason}", "reroute", fields)

    def _busy(self, fields: Fields) -> None:
        direction = str(fields["direction"])
        self._totals.busy_replies[direction] += 1
        self._metrics.busy_replies.add(1, direction)

    def _outer_round(self, fields: Fields) -> None:
        result = str(fields["result"])
        self._totals.outer_rounds[result] += 1
        self._metrics.outer_rounds.add(1, result)
        partner = f" of {fields['partner']}" if fields.get("partner") else ""
        cost = f"{_number(fields['seconds']):.2f} s, {int(_number(fields['bytes'])):,} bytes"
        text = f"outer round {fields['round']}: {result}{partner} ({fields['reason']}), {cost}"
        if self._last_losses:
            loss, tokens = self._last_losses[-1]
            text += f"; inner step {self._totals.inner_steps}, loss {loss / tokens:.3f}"
        _log(logging.INFO, text, "outer_round", fields)

    def _evaluation(self, fields: Fields) -> None:
        loss = _number(fields["loss"])
        self._totals.validation_loss = loss
        self._totals.evaluations += 1
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

    def _replica_std(self, fields: Fields) -> None:
        self._totals.replica_std = _number(fields["value"])
        self._metrics.replica_std.set(self._totals.replica_std)

    def _idle(self, fields: Fields) -> None:
        cause, seconds = str(fields["cause"]), _number(fields["seconds"])
        self._totals.idle_s[cause] = self._totals.idle_s.get(cause, 0.0) + seconds
        self._metrics.idle_seconds.add(seconds, cause)

    def _bytes(self, fields: Fields) -> None:
        direction, size = str(fields["direction"]), _number(fields["bytes"])
        self._totals.bytes[direction] += int(size)
        self._metrics.bytes.add(size, direction, str(fields["kind"]))

    def _gauge(self, fields: Fields) -> None:
        gauges = {"in_flight": self._metrics.in_flight, "waiting": self._metrics.waiting}
        gauges[str(fields["name"])].set(_number(fields["value"]))

    def _lag(self, fields: Fields) -> None:
        seconds = _number(fields["seconds"])
        self._totals.largest_lag_s = max(seconds, self._totals.largest_lag_s)
        self._metrics.lag.set(seconds)

    def _warning(self, fields: Fields) -> None:
        text = str(fields["message"])
        held = self._limiter.admit(text)
        if held is not None:
            _log(logging.WARNING, text + _more(held), "warning", {})

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
