"""What a simulated run was like over time: pure functions of its outcome, for plots. Seconds are virtual ones."""

from noloco_p2p.sim.process import Outcome

Points = list[tuple[float, float]]
"""(x, y), x not falling."""


def tokens_per_s(outcome: Outcome, tokens_per_microbatch: int, bins: int) -> Points:
    """(middle, tokens per second) of as many equal spans of time, from the start to the end."""
    width_s = outcome.ended_at_s / bins
    done = [0] * bins
    for period in outcome.periods():
        if period.stage != 0:
            continue
        for event in period.events:
            if event.kind == "microbatch" and event.get("result") == "done":
                done[min(bins - 1, int(event.at_s / width_s))] += 1
    return [((number + 0.5) * width_s, count * tokens_per_microbatch / width_s) for number, count in enumerate(done)]


def nodes_training(outcome: Outcome) -> dict[int, Points]:
    """By stage: (when, how many train from then on)."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for period in outcome.periods():
        for begin, end in period.training:
            changes.setdefault(period.stage, []).extend(((begin, 1), (end, -1)))
    found: dict[int, Points] = {}
    for stage, steps in sorted(changes.items()):
        points, count = [(0.0, 0.0)], 0
        for at_s, change in sorted(steps):
            count += change
            points.append((at_s, float(count)))
        found[stage] = points
    return found


def round_seconds(outcome: Outcome) -> dict[str, list[float]]:
    """Seconds of the outer rounds, rising, by result."""
    found: dict[str, list[float]] = {}
    for one in outcome.trace.of("outer_round"):
        found.setdefault(str(one.get("result")), []).append(one.number("seconds"))
    return {result: sorted(seconds) for result, seconds in sorted(found.items())}


def replica_stds(outcome: Outcome) -> dict[int, Points]:
    """By stage: (when, standard deviation between a replica and its partner)."""
    found: dict[int, Points] = {}
    for period in outcome.periods():
        measured = [(event.at_s, event.number("value")) for event in period.events if event.kind == "replica_std"]
        if measured:
            found.setdefault(period.stage, []).extend(measured)
    return {stage: sorted(points) for stage, points in sorted(found.items())}
