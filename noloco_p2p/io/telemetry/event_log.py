"""What the log says of a node's events. An event of which nobody says or counts anything is logged at debug level."""

import logging
import time

from noloco_p2p.io.telemetry.counters import EVENTS, Fields, RunCounters
from noloco_p2p.io.telemetry.log import RepeatLimiter

LINES = {
    "state": "{state}: {reason}",
    "outer_round": "outer round {round}: {result}{from_peer} ({reason}), {seconds:.2f} s, {bytes:,} bytes{progress}",
    "evaluation": "validation at step {step}: {loss:.4f} nats per token over {tokens} tokens",
    "checkpoint": "checkpoint of outer round {round}: {seconds:.2f} s, {bytes:,} bytes",
    "guarded": "guards stage {stage}: holds its outer round {round}, {bytes:,} bytes",
    "resumed": "goes on from step {step:g} (outer round {round}), weights from: {source}{from_peer}",
    "moved": "moves to stage {stage}: {reason}",
    "stuck": "watchdog: {message}",
    "info": "{message}",
}
"""Kind of event → its line. `from_peer` and `progress` are made here, all else are fields of the event."""

logger = logging.getLogger("noloco_p2p")


class EventLog:
    """Writes the lines of events that `counters` has counted already; whoever calls it holds their lock."""

    def __init__(self, counters: RunCounters) -> None:
        self._counters = counters
        self._limiter = RepeatLimiter()
        self._deserted: dict[int, float] = {}
        """Stages that are known to be without a replica, and since when."""
        self._guarded: set[int] = set()
        """Stages whose snapshot has been held before."""

    def write(self, kind: str, fields: Fields) -> None:
        """Say what happened. Raises for malformed fields."""
        match kind:
            case "warning":
                self._warn(str(fields["message"]), "", kind, fields)
            case "reroute":
                self._trouble(f"microbatch routed again: {fields['reason']}", kind, fields)
            case "microbatch" if fields["result"] not in ("done", "repeat"):
                dropped = f" ({fields.get('reason', 'other')})" if fields["result"] == "dropped" else ""
                self._trouble(f"microbatch {fields['result']}{dropped}", kind, fields)
            case "deserted":
                self._deserted_stages()
            case _ if kind in LINES:
                text = LINES[kind].format_map({**fields, "from_peer": _from_peer(fields), "progress": self._progress()})
                _log(self._level(kind, fields), text, kind, fields)
            case _ if kind not in EVENTS:
                logger.debug("%s %s", kind, fields)

    def _level(self, kind: str, fields: Fields) -> int:
        """INFO, but DEBUG for what goes on as it began: the first checkpoint says that the node writes them."""
        match kind:
            case "checkpoint" if self._counters.total("checkpoints") > 1:
                return logging.DEBUG
            case "guarded" if fields["stage"] in self._guarded:
                return logging.DEBUG
            case "guarded":
                self._guarded.add(fields["stage"])
            case "stuck" if not fields["well"]:
                return logging.WARNING
        return logging.INFO

    def _progress(self) -> str:
        if not self._counters.last_losses:
            return ""
        loss, tokens = self._counters.last_losses[-1]
        return f"; inner step {self._counters.total('inner_steps')}, loss {loss / tokens:.3f}"

    def _deserted_stages(self) -> None:
        """A line when a stage loses its last replica or has one again, none in between."""
        before, self._deserted = self._deserted, self._counters.deserted_since
        now = time.monotonic()
        for stage in self._deserted.keys() - before.keys():
            seconds = now - self._deserted[stage]
            text = f"stage {stage} has had no replica for {seconds:.0f} s: the run waits for one"
            _log(logging.WARNING, text, "deserted", {"stage": stage, "seconds": seconds})
        for stage in before.keys() - self._deserted.keys():
            text = f"stage {stage} has a replica again, after {now - before[stage]:.0f} s"
            _log(logging.INFO, text, "deserted", {"stage": stage, "seconds": 0.0})

    def _trouble(self, text: str, kind: str, fields: Fields) -> None:
        peer = f", {fields['peer']}" if "peer" in fields else ""
        reason = f": {fields['message']}" if "message" in fields else ""
        self._warn(text, peer + reason, kind, fields)

    def _warn(self, text: str, details: str, kind: str, fields: Fields) -> None:
        """A warning, at most one with this text in QUIET_S, whatever its details."""
        held = self._limiter.admit(text)
        if held is not None:
            more = f" (and {held} more)" if held else ""
            _log(logging.WARNING, text + details + more, kind, fields)


def _from_peer(fields: Fields) -> str:
    peer = fields.get("partner") or fields.get("peer")
    return f" of {peer}" if peer else ""


def _log(level: int, text: str, kind: str, fields: Fields) -> None:
    """`fields` go into JSON lines beside the message, which they may not replace."""
    named = {name: value for name, value in fields.items() if name != "message"}
    logger.log(level, "%s", text, extra={"fields": {"event": kind, **named}})
