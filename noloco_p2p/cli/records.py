"""What a node leaves in its directory for its launcher and its owner: `endpoints.json` and `summary.json`."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_p2p.errors import LocalError

if TYPE_CHECKING:
    from noloco_p2p.core.messages import Advert
    from noloco_p2p.io.libp2p import Libp2p
    from noloco_p2p.io.telemetry import PrometheusTelemetry
    from noloco_p2p.node import Node


def introduce(directory: Path, advert: "Advert", libp2p: "Libp2p") -> None:
    """Say who this node is, where its metrics are and how to join it; the same in `endpoints.json`."""
    try:
        print(f"peer id  {advert.peer_id}")
        print(f"run      {advert.run_id}")
        print(f"metrics  {advert.metrics}")
        print("join     " + " ".join(["noloco-node", *(f"--join {a}" for a in libp2p.join_addresses)]), flush=True)
    except OSError as error:
        raise LocalError(f"standard output cannot be written: {error.strerror or error}") from error
    write_json(
        directory / "endpoints.json",
        {
            "peer_id": advert.peer_id,
            "run_id": advert.run_id,
            "pid": os.getpid(),
            "join": libp2p.join_addresses,
            "metrics": advert.metrics,
            "grpc": advert.addresses[0],
        },
    )


def summary(node: "Node", telemetry: "PrometheusTelemetry") -> dict[str, object]:
    """What the launcher and the user learn of this node at its end. Losses are those of stage 0, nats per token."""
    advert, totals = node.seat.advert, telemetry.totals()
    rounds, done, idle = totals["outer_rounds"], totals["microbatches"], totals["idle_s"]
    assert isinstance(rounds, dict)
    assert isinstance(done, dict)
    assert isinstance(idle, dict)
    first = advert.stage == 0
    return totals | {
        "peer_id": advert.peer_id,
        "run_id": advert.run_id,
        "stage": advert.stage,
        "state": "finished" if node.finished else advert.state,
        "step": advert.step,
        "outer_rounds": sum(rounds.values()),
        "results": rounds,
        "microbatches": done.get("done", 0),
        "microbatch_results": done,
        "first_loss": totals["first_loss"] if first else None,
        "final_loss": totals["final_loss"] if first else None,
        "first_step_at": totals["training_at"],
        "evaluation_s": node.evaluated_s,
    }


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Atomically: a reader sees the old file or the whole new one. Raises LocalError (a full disk)."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        fresh.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise LocalError(f"{path} cannot be written: {error.strerror or error}") from error
