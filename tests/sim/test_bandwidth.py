"""Transfers that share bandwidth have max-min fair rates at every moment, and end at the times that follow."""

import asyncio
import random
from collections.abc import Callable

import pytest

from noloco_p2p.sim import bandwidth
from noloco_p2p.sim.bandwidth import Flow, Segment
from noloco_p2p.sim.virtual_time import run


def now() -> float:
    return asyncio.get_running_loop().time()


class Moved:
    """Transfers by name, and the end of each."""

    def __init__(self) -> None:
        self.ends: dict[str, float] = {}
        self.flows: dict[str, Flow] = {}

    def begin(self, name: str, nbytes: float, *path: Segment) -> None:
        flow = self.flows[name] = Flow(nbytes, lambda: self.ends.update({name: now()}))
        bandwidth.start(flow, path)

    def stop(self, name: str) -> None:
        bandwidth.stop(self.flows[name])

    def rates(self) -> dict[str, float]:
        return {name: flow.rate for name, flow in self.flows.items() if flow.path}


def at(*script: tuple[float, Callable[[Moved], None]]) -> Moved:
    """Run each action at its time, then wait until all transfers have ended."""
    moved = Moved()

    async def main() -> None:
        for at_s, action in script:
            await asyncio.sleep(at_s - now())
            action(moved)
        await asyncio.sleep(1000.0)

    run(main())
    return moved


def test_a_single_transfer_gets_all_of_its_narrowest_segment() -> None:
    moved = at((0.0, lambda m: m.begin("a", 100.0, Segment(50.0), Segment(10.0), Segment(20.0))))
    assert moved.ends == {"a": pytest.approx(10.0)}


def test_two_transfers_share_and_the_remaining_one_gets_all() -> None:
    segment = Segment(10.0)
    moved = at((0.0, lambda m: m.begin("a", 100.0, segment)), (5.0, lambda m: m.begin("b", 100.0, segment)))
    assert moved.ends == {"a": pytest.approx(15.0), "b": pytest.approx(20.0)}


def test_a_stopped_transfer_frees_its_share_at_once_and_resumes_where_it_was() -> None:
    segment = Segment(10.0)
    moved = at(
        (0.0, lambda m: m.begin("a", 100.0, segment)),
        (5.0, lambda m: m.begin("b", 100.0, segment)),
        (9.0, lambda m: m.stop("b")),
        (30.0, lambda m: bandwidth.start(m.flows["b"], (segment,))),
    )
    assert moved.ends == {"a": pytest.approx(12.0), "b": pytest.approx(38.0)}


def test_a_textbook_case_of_max_min_fairness() -> None:
    """The share that a transfer cannot use, because of a bottleneck elsewhere, goes to the others, and so on."""
    moved = Moved()
    one, two, three = Segment(9.0), Segment(10.0), Segment(30.0)

    async def main() -> None:
        for name, path in {"a": (one,), "b": (one,), "c": (one, two), "d": (two, three), "e": (three,)}.items():
            moved.begin(name, 1e6, *path)
        assert moved.rates() == pytest.approx({"a": 3.0, "b": 3.0, "c": 3.0, "d": 7.0, "e": 23.0})
        moved.stop("a")
        assert moved.rates() == pytest.approx({"b": 4.5, "c": 4.5, "d": 5.5, "e": 24.5})
        moved.stop("d")
        assert moved.rates() == pytest.approx({"b": 4.5, "c": 4.5, "e": 30.0})

    run(main())


def is_fair(moved: Moved) -> None:
    """Check max-min fairness: no segment is overfull, and each transfer has a full one on which no other is faster."""
    moving = [flow for flow in moved.flows.values() if flow.path]
    used = {segment: sum(one.rate for one in segment.flows) for flow in moving for segment in flow.path}
    for segment, total in used.items():
        assert total <= segment.bytes_per_s * (1 + 1e-6)
    for flow in moving:
        assert any(
            used[segment] >= segment.bytes_per_s * (1 - 1e-6)
            and flow.rate >= max(one.rate for one in segment.flows) * (1 - 1e-6)
            for segment in flow.path
        ), f"{flow.rate:g} bytes/s without a bottleneck"


Step = tuple[float, str, str]
"""Time, `begin` or `stop`, and the name of the transfer."""


def filled(ways_of: dict[str, tuple[Segment, ...]]) -> dict[str, float]:
    """Textbook progressive filling, from scratch."""
    rates: dict[str, float] = {}
    room = {segment: segment.bytes_per_s for path in ways_of.values() for segment in path}
    while len(rates) < len(ways_of):
        takers = {segment: [n for n, path in ways_of.items() if segment in path and n not in rates] for segment in room}
        full = min(
            (segment for segment in room if takers[segment]), key=lambda segment: room[segment] / len(takers[segment])
        )
        share = room[full] / len(takers[full])
        for name in takers[full]:
            rates[name] = share
            for segment in ways_of[name]:
                room[segment] -= share
    return rates


def ends_by_the_book(
    script: list[Step], sizes: dict[str, float], path: dict[str, tuple[Segment, ...]]
) -> dict[str, float]:
    """When each transfer ends, if all rates are recomputed whenever one begins, stops or ends."""
    left, moving, ends, now_s = dict(sizes), dict[str, tuple[Segment, ...]](), dict[str, float](), 0.0
    todo = list(script)
    while todo or moving:
        rates = filled(moving)
        last = min(((now_s + left[name] / rate, name) for name, rate in rates.items()), default=(float("inf"), ""))
        at_s = min(last[0], todo[0][0] if todo else float("inf"))
        for name, rate in rates.items():
            left[name] -= rate * (at_s - now_s)
        now_s = at_s
        if at_s == last[0]:
            del moving[last[1]]
            ends[last[1]] = at_s
            continue
        _, what, name = todo.pop(0)
        if what == "begin" and name not in ends:
            moving[name] = path[name]
        else:
            moving.pop(name, None)
    return ends


@pytest.mark.parametrize("seed", range(10))
def test_random_transfers_have_fair_rates_and_end_as_in_textbook_filling(seed: int) -> None:
    rng = random.Random(seed)
    nodes = rng.choice([2, 5, 12])
    up, down = ([Segment(rng.choice([5.0, rng.uniform(1, 50)])) for _ in range(nodes)] for _ in range(2))
    links = [[Segment(rng.uniform(1, 30)) if rng.random() < 0.3 else None for _ in range(nodes)] for _ in range(nodes)]
    path, sizes, script, most = dict[str, tuple[Segment, ...]](), dict[str, float](), list[Step](), 0
    for number in range(60):
        name, sender, receiver, at_s = f"t{number}", rng.randrange(nodes), rng.randrange(nodes), rng.uniform(0, 40)
        link = links[sender][receiver]
        path[name] = (up[sender], down[receiver]) if link is None else (up[sender], link, down[receiver])
        sizes[name] = rng.uniform(1, 60)
        script.append((at_s, "begin", name))
        if rng.random() < 0.3:
            script += [(at_s + rng.uniform(0, 5), "stop", name), (at_s + rng.uniform(6, 20), "begin", name)]
    script.sort()
    moved = Moved()

    async def main() -> None:
        nonlocal most
        for at_s, what, name in script:
            await asyncio.sleep(at_s - now())
            if what == "stop":
                moved.stop(name)
            elif name not in moved.flows:
                moved.begin(name, sizes[name], *path[name])
            elif name not in moved.ends:
                bandwidth.start(moved.flows[name], path[name])
            is_fair(moved)
            most = max(most, len(moved.rates()))
        await asyncio.sleep(10_000.0)

    run(main())
    assert moved.ends == pytest.approx(ends_by_the_book(script, sizes, path), rel=1e-6)
    assert len(moved.ends) == 60
    assert most >= 5, "otherwise too few transfers have shared a segment"
