"""Reads the audit files of a run, and checks that its routes and pairs are those that the policies promise.

Only the names of tensors are checked here; `reference` recomputes their values. Nothing of the package may be imported.
"""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import safe_open

Manifest = dict[str, Any]
Route = tuple[str, ...]
LASTING = ("gossip",)
"""Rules under which a round stays open until the partner's vector arrives, even when others fall due meanwhile."""
ALL = ("diloco", "dct")
"""Rules under which a replica merges the vectors of all others of its stage after inner steps of its own."""


def require(condition: bool, message: str) -> None:
    """Raises AssertionError with `message` unless `condition` holds."""
    if not condition:
        raise AssertionError(message)


@dataclass(frozen=True)
class Serving:
    """One microbatch as one replica counted it; `previous` and `next` are its neighbours on the route."""

    microbatch: str
    previous: str | None
    next: str | None
    tokens: int
    loss_sum: float
    clip: float = 1.0
    """The factor by which the returned gradient was clipped."""


@dataclass(frozen=True)
class InnerStep:
    """One line of a steps file; servings in the order in which their gradients were added."""

    inner_step: int
    step: int
    learning_rate: float
    servings: tuple[Serving, ...]


@dataclass(frozen=True)
class Round:
    """What one replica did in one outer round."""

    partner: str | None
    frozen_after: int
    """Inner steps that it had taken when it froze θ_f."""
    merged_after: int
    """The same when it merged; more if it trained on while the partner's snapshot was in transit."""
    partner_round: int = 0
    """The partner's round that was merged."""
    factors: dict[str, float] = field(default_factory=dict)
    """Name in the file → factor by which the tensor's difference to the partner's was clipped; empty: not clipped."""
    limits: dict[str, float] = field(default_factory=dict)
    """Name in the file → largest magnitude to which differences were reduced before that; empty: none was."""


@dataclass(frozen=True)
class Record:
    """What a run wrote, without the tensors."""

    audit: Path
    stages: dict[str, int]
    steps: dict[str, list[InnerStep]]

    def replicas(self, stage: int) -> list[str]:
        """Peer ids of a stage; the position in this list is the rank."""
        return sorted(peer for peer, held in self.stages.items() if held == stage)

    @property
    def depth(self) -> int:
        """How many stages there are."""
        return max(self.stages.values()) + 1


def read_record(audit: Path, manifest: Manifest, stages: dict[str, int]) -> Record:
    """Reads the steps files, and checks that exactly the files of a complete run exist."""
    steps, m = manifest["steps"], manifest["outer"]["inner_steps"]
    rounds = range(0) if manifest["outer"]["rule"] == "sync" else range(1, -(-steps // m) + 1)
    expected = {f"initial-{peer}.safetensors" for peer in stages} | {f"steps-{peer}.jsonl" for peer in stages}
    if manifest["outer"]["rule"] not in LASTING:  # otherwise `read_rounds` decides which must exist
        expected |= {f"round-{number:06}-{peer}.safetensors" for number in rounds for peer in stages}
    origins = [peer for peer, stage in stages.items() if stage == 0]
    expected |= {f"batches-{peer}-{k:06}.safetensors" for peer in origins for k in range(1, steps + 1)}
    found = {path.name for path in audit.iterdir() if path.is_file()}
    if manifest["outer"]["rule"] in LASTING:
        found = {name for name in found if not name.startswith("round-")}
    require(found == expected, f"missing files {sorted(expected - found)}, unexpected ones {sorted(found - expected)}")
    record = Record(audit, stages, {peer: read_steps(audit / f"steps-{peer}.jsonl") for peer in stages})
    for peer, lines in record.steps.items():
        numbers = [(line.inner_step, line.step) for line in lines]
        require(numbers == [(k, k - 1) for k in range(1, steps + 1)], f"{peer}: (inner step, clock) ran {numbers}")
    return record


def read_steps(path: Path) -> list[InnerStep]:
    """One entry per line."""
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines():
        e = json.loads(line)
        servings = tuple(
            Serving(s["id"], s["previous"], s["next"], s["tokens"], s["loss_sum"], s.get("clip", 1.0))
            for s in e["microbatches"]
        )
        entries.append(InnerStep(e["inner_step"], e["step"], e["learning_rate"], servings))
    return entries


def microbatch_origin(microbatch: str) -> tuple[str, int]:
    """(stage-0 peer, counter) of an id, which is peer, incarnation (16 hexadecimal digits), counter."""
    match = re.fullmatch(r"(.+)-[0-9a-f]{16}-(\d+)", microbatch)
    require(match is not None, f"{microbatch!r} is no microbatch id")
    assert match is not None
    return match[1], int(match[2])


def check_routes(record: Record, manifest: Manifest) -> list[dict[str, Route]]:
    """For each inner step, microbatch id → the peers that counted it, in the order of the stages.

    Raises AssertionError unless each microbatch was counted exactly once at each stage, all in one inner step,
    neighbours agree on each other, and the routes are those of `balanced` (METHOD.md, "Random routing"), whose
    permutations are drawn again here.
    """
    steps: list[dict[str, Route]] = []
    seen: set[str] = set()
    permutations: dict[int, list[Route]] = {stage: [] for stage in range(1, record.depth)}
    for number in range(1, manifest["steps"] + 1):
        routes = routes_of_step(record, number)
        again = sorted(seen & routes.keys())
        require(not again, f"inner step {number} counts again {again}")
        seen |= routes.keys()
        check_balanced(record, number, routes, manifest["microbatches_per_step"], permutations)
        steps.append(routes)
    for stage, blocks in permutations.items():
        replicas = len(record.replicas(stage))
        chance = math.factorial(replicas) ** (1 - len(blocks))
        require(len(set(blocks)) > 1 or chance > 1e-6, f"stage {stage}: the same permutation in {len(blocks)} blocks")
    return steps


def routes_of_step(record: Record, number: int) -> dict[str, Route]:
    """The routes of one inner step. Raises AssertionError unless each stage counted each microbatch exactly once."""
    counted: dict[str, dict[int, tuple[str, Serving]]] = {}
    for peer, stage in sorted(record.stages.items()):
        for serving in record.steps[peer][number - 1].servings:
            at = counted.setdefault(serving.microbatch, {})
            other = at[stage][0] if stage in at else None
            where = f"inner step {number}: {serving.microbatch} was counted twice at stage {stage}"
            require(other is None, f"{where}, by {other} and by {peer}")
            at[stage] = (peer, serving)
    routes: dict[str, Route] = {}
    for microbatch, at in counted.items():
        absent = sorted(set(range(record.depth)) - at.keys())
        require(not absent, f"inner step {number}: {microbatch} was lost, not counted at stages {absent}")
        route = tuple(at[stage][0] for stage in range(record.depth))
        for stage, (before, after) in enumerate(zip((None, *route[:-1]), (*route[1:], None), strict=True)):
            recorded = (at[stage][1].previous, at[stage][1].next)
            where = f"inner step {number}: {microbatch} at {route[stage]} (stage {stage})"
            require(recorded == (before, after), f"{where} has neighbours {recorded}, but {(before, after)} counted it")
        routes[microbatch] = route
    return routes


def check_balanced(
    record: Record, number: int, routes: dict[str, Route], each: int, permutations: dict[int, list[Route]]
) -> None:
    """Slot g = index·R0 + origin rank: each block of R slots meets each of the R replicas once.

    Appends the full blocks to `permutations`, stage by stage.
    """
    origins = record.replicas(0)
    slots: dict[int, Route] = {}
    for rank, origin in enumerate(origins):
        begun = [(microbatch_origin(name), name) for name in routes]
        own = [name for (peer, _), name in sorted(begun) if peer == origin]
        require(len(own) == each, f"inner step {number}: {origin} began {len(own)} microbatches, expected {each}")
        for index, name in enumerate(own):
            require(routes[name][0] == origin, f"inner step {number}: {name} was counted by {routes[name][0]}")
            slots[index * len(origins) + rank] = routes[name]
    require(len(slots) == len(routes), f"inner step {number}: a microbatch comes from no replica of stage 0")
    for stage, blocks in permutations.items():
        width = len(record.replicas(stage))
        for start in range(0, len(slots), width):
            block = tuple(slots[g][stage] for g in range(start, min(start + width, len(slots))))
            where = f"inner step {number}, stage {stage}, slots from {start}"
            require(len(set(block)) == len(block), f"{where}: not balanced, served by {block}")
            if len(block) == width > 1:
                blocks.append(block)


def read_rounds(record: Record, manifest: Manifest) -> dict[int, dict[str, Round]]:
    """Number → peer → what it did in that round.

    Raises AssertionError unless the partners of each stage are a perfect, symmetric matching, and each replica froze a
    round when it was due and merged it before it froze the next one; the last round at once. Under a lasting rule each
    replica must have done exactly the rounds that fell due while it had none open.
    """
    outer, steps, rounds = manifest["outer"], manifest["steps"], dict[int, dict[str, Round]]()
    m, lasting, merged_after = outer["inner_steps"], outer["rule"] in LASTING, dict.fromkeys(record.stages, 0)
    for number in range(1, -(-steps // m) + 1 if outer["rule"] != "sync" else 1):
        due, next_due = min(number * m, steps), min((number + 1) * m, steps)
        latest = next_due if outer.get("overlap") else due
        rounds[number] = read_round(record, number, outer)
        if not lasting and outer["rule"] not in ALL:
            check_matching(record, number, rounds[number])
        for peer in record.stages:
            where, one = f"round {number}, {peer} (stage {record.stages[peer]})", rounds[number].get(peer)
            # At the end of the run, an earlier round that is still open is waited for after the last one is frozen.
            either = lasting and due == merged_after[peer] == steps
            open_then = merged_after[peer] > due or (either and one is None)
            require((one is None) == open_then, f"{where}: an earlier one was merged after {merged_after[peer]}")
            if one is None:
                continue
            require(one.frozen_after == due, f"{where}: frozen after {one.frozen_after} inner steps, due after {due}")
            in_time = due <= one.merged_after <= (steps if lasting else latest)
            require(in_time, f"{where}: merged after {one.merged_after}, due after {due}")
            merged_after[peer] = one.merged_after
    return rounds


def read_round(record: Record, number: int, outer: Manifest) -> dict[str, Round]:
    """Peer → what it did in one round, for the peers that did that round.

    Raises AssertionError unless, under the rules in ALL, each took from all others of its stage.
    """
    rounds: dict[str, Round] = {}
    for peer in record.stages:
        where = f"round {number}, {peer} (stage {record.stages[peer]})"
        path = record.audit / f"round-{number:06}-{peer}.safetensors"
        if not path.exists():
            continue
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        require((metadata["round"], metadata["peer_id"]) == (str(number), peer), f"{where}: says it is {metadata}")
        for key in ("alpha", "beta", "gamma"):
            require(float(metadata[key]) == outer[key], f"{where}: {key} was {metadata[key]}, not {outer[key]}")
        frozen_after, merged_after = (int(metadata[f"{event}_after"]) for event in ("frozen", "merged"))
        partner, round = metadata["partner_id"] or None, metadata["partner_round"]
        if outer["rule"] in ALL:
            others = sorted(set(record.replicas(record.stages[peer])) - {peer})
            require(metadata["partner_id"] == ",".join(others), f"{where}: took from {partner}")
            rounds[peer] = Round(None, frozen_after, merged_after, 0)
            continue
        clips = (json.loads(metadata.get(key, "{}")) for key in ("clip", "limit"))
        rounds[peer] = Round(partner, frozen_after, merged_after, int(round or 0), *clips)
        if partner is not None:
            other = partner != peer and record.stages.get(partner) == record.stages[peer]
            require(other, f"{where}: {partner} is no other replica of its stage")
            same = int(round) == number or outer["rule"] in LASTING
            require(same, f"{where}: partner's snapshot is of {round}")
    return rounds


def check_matching(record: Record, number: int, rounds: dict[str, Round]) -> None:
    """Raises AssertionError unless the partners of a round are a matching in each stage."""
    for stage in range(record.depth):
        own = {peer: rounds[peer].partner for peer in record.replicas(stage)}
        for peer, partner in own.items():
            matched = partner is None or (partner != peer and own.get(partner) == peer)
            require(matched, f"round {number}, stage {stage}: {peer} took {partner}, which is no matching")
        alone = [peer for peer, partner in own.items() if partner is None]
        require(len(alone) == len(own) % 2, f"round {number}, stage {stage}: {len(alone)} of {len(own)} alone")
