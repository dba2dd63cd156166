"""A node's whole life in figures, for its summary.json. What counts them is in telemetry.py."""

import json
from collections import Counter as Tally
from collections import deque
from dataclasses import dataclass, field, fields

FINAL_STEPS = 10
"""Inner steps whose loss is the run's final loss."""


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
    dropped: Tally[str] = field(default_factory=Tally)
    """Microbatches given up, by reason."""
    busy_replies: Tally[str] = field(default_factory=Tally)
    bytes: Tally[str] = field(default_factory=Tally)
    idle_s: dict[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    largest_lag_s: float = 0.0
    checkpoints: int = 0
    moves: int = 0
    resumed: dict[str, object] | None = None
    """Where this process last had its weights from: source, round, step and peer."""
    first_loss: float | None = None
    """Of the first inner step that had tokens."""
    validation_loss: float | None = None
    """Of the last evaluation."""
    replica_std: float | None = None
    training_at: float | None = None
    """When the state became `training` for the first time."""
    last_step_at: float | None = None
    """When the last inner step ended."""
    last_losses: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=FINAL_STEPS))
    """(loss sum, tokens) of the last inner steps."""

    def told(self) -> dict[str, object]:
        """The fields, JSON-ready, and what follows from them under the names of `summary.json`.

        `final_loss` is that of the last ten inner steps, None before the first.
        """
        names = [each.name for each in fields(self) if each.name != "last_losses"]
        found: dict[str, object] = json.loads(json.dumps({name: getattr(self, name) for name in names}))
        tokens = sum(tokens for _, tokens in self.last_losses)
        return found | {
            "final_loss": sum(loss for loss, _ in self.last_losses) / tokens if tokens else None,
            "pulled": sum(self.outer_rounds.values()) - self.outer_rounds["alone"],
            "alone": self.outer_rounds["alone"],
            "rerouted": sum(self.reroutes.values()),
            "bytes_sent": self.bytes["out"],
            "bytes_received": self.bytes["in"],
        }
