"""How long does a replica wait for an outer round with pair pulls, and how long with all-reduces of N replicas?

One stage, N replicas, computing takes no time. Every link has a log-normal one-way latency of mean {LATENCY_MS:g} ms
and the given std/mean. *Latency-bound*: the vectors have no size. *Bandwidth-bound*: a vector of {VECTOR_MB:g} MB, and
{MBIT_PER_S:g} Mbit/s up and down for each node, shared by its transfers. The pair pull is the node's own code in the
simulator (request, answer with u), with matched pairs unless stated otherwise. The all-reduces are models on the same
links (formulas in `experiments/allreduce.py`): the paper's tree, a binomial tree, a ring, and a butterfly as in
hivemind.

*replica*: the time from a replica's snapshot to its merge, mean over replicas. *pair*: the later of two partners, mean.
*all N*: the last pull of the swarm, for which nobody waits. All-reduces: the time until the last node has the mean. All
replicas start together.

The paper's pair is an exchange in which both send at once: the time of one message, the later of two. The paper's ratio
compares one direction through the tree with it (or both with two exchanges, which is the same). The node's pull is a
request and an answer, two messages one after the other, and we compare the whole all-reduce, up and down, with it.
Without spread the two ratios are equal. A snapshot is one vector, like what an all-reduce of DiLoCo moves. An
all-reduce leaves every replica with the mean of all, a pull with the mean of two.

Limits: There is no real network: no congestion, no loss, no processing in the hosts. The connections of the pull start
slowly, as with TCP; those of the models do not, which favours the all-reduces. The all-reduces are models in which all
nodes are ready at the same moment, none fails, and groups form in no time; real ones wait for the last replica (see the
experiment `blocking`) and for their matchmaking. How much a round is worth is another question: an all-reduce makes all
replicas equal, a pull brings two closer together (see `convergence`).
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from noloco_p2p.lab.experiments import allreduce
from noloco_p2p.lab.experiments.allreduce import Wire
from noloco_p2p.lab.experiments.results import Columns, plus_minus, select, table, value_range
from noloco_p2p.lab.experiments.spec import Block, Case, Cell, Figures, Result, Results, Table, published
from noloco_p2p.lab.experiments.training import FOREVER_S, timing_swarm
from noloco_p2p.observe.plotting.plots import Curve, Plot
from noloco_p2p.observe.plotting.svg import LineStyle
from noloco_p2p.sim.device import Costs
from noloco_p2p.sim.links import Access, Geography, Link, MessageSizes
from noloco_p2p.sim.process import Outcome

LATENCY_MS, VECTOR_MB, MBIT_PER_S = 10.0, 12.5, 100.0
"""Mean one-way latency of a link; size of a vector; access each way if bandwidth-bound: 100 latencies per vector."""
BYTES_PER_S, VECTOR_BYTES = MBIT_PER_S * 1e6 / 8, int(VECTOR_MB * 1e6)
EXCHANGES = 20_000
"""Draws for the paper's pair."""
MODELS: dict[str, Callable[[Wire, int, np.random.Generator], float]] = {
    "tree": allreduce.tree_s,
    "binomial": allreduce.binomial_tree_s,
    "ring": allreduce.ring_s,
    "butterfly": allreduce.butterfly_s,
}
TREES = ("tree", "binomial")
"""Models that are cheap to draw, with the longest tails where the paper reports ratios."""
TITLES = {"tree": "tree (paper)", "binomial": "binomial tree", "ring": "ring", "butterfly": "butterfly"}
REGIMES = {"latency": "latency-bound", "bandwidth": "bandwidth-bound"}
NODES, QUICK_NODES = (4, 8, 16, 32, 64, 128, 256, 512, 1024), (4, 16, 64, 256)
SPREADS, QUICK_SPREADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5), (0.0, 1.0, 2.5)


def cases(quick: bool) -> list[Case]:
    """Every regime, number of nodes and spread; large ones first. Random pairing only where pulls can collide."""
    nodes, spreads = (QUICK_NODES, QUICK_SPREADS) if quick else (NODES, SPREADS)
    pulls, draws = (500, 50) if quick else (1000, 200)
    kinds = (("latency", "matched"), ("bandwidth", "matched"), ("bandwidth", "random"))
    grid = list(product(sorted(nodes, reverse=True), spreads, kinds))
    if quick:
        grid += [(NODES[-1], spread, kinds[0]) for spread in spreads]
    many = {
        n: {"worlds": max(1, pulls // n), "draws": draws if n <= 64 else max(10, 64 * draws // n)} for n, *_ in grid
    }
    name, fixed = "{regime}-{pairing}-{nodes}-{std_over_mean:g}", {"tree_draws": 1000, "seed": 0}
    return [
        Case.named(name, regime=regime, pairing=pairing, nodes=n, std_over_mean=spread, **many[n], **fixed)
        for n, spread, (regime, pairing) in grid
        if pairing == "matched" or spread == 0
    ]


def measure(case: Case) -> Figures:
    """Pulls in `worlds` swarms with seeds from `seed` on, and the models over `tree_draws` or `draws` all-reduces."""
    settings = case.settings
    nodes, seed, wire = int(settings["nodes"]), settings["seed"], wire_of(settings)
    models = {}
    for name, model in MODELS.items():
        rng = allreduce.dice(seed, "model", name, nodes)
        draws = settings["tree_draws" if name in TREES else "draws"]
        models[name] = summary([model(wire, nodes, rng) for _ in range(draws)])
    rng = allreduce.dice(seed, "model", "exchange")
    models["exchange"] = summary([allreduce.exchange_s(wire, rng) for _ in range(EXCHANGES)])
    worlds = [pull_round(settings, seed + world) for world in range(settings["worlds"])]
    return {"pull": figures_of(worlds), "models": models}


def wire_of(settings: Mapping[str, Any]) -> Wire:
    """The links of a case."""
    vector_s = VECTOR_BYTES / BYTES_PER_S if settings["regime"] == "bandwidth" else 0.0
    return Wire(LATENCY_MS / 1e3, settings["std_over_mean"], vector_s)


def pull_round(settings: Mapping[str, Any], seed: int) -> Outcome:
    """A swarm of one stage whose computing takes no time, over one outer round, which all replicas start together."""
    wire, bound = wire_of(settings), settings["regime"] == "bandwidth"
    outer = {"inner_steps": 1, "pairing": settings["pairing"], "partner_wait_s": FOREVER_S, "deadline_s": FOREVER_S}
    swarm = timing_swarm(
        (settings["nodes"],),
        seed,
        {"steps": 1, "outer": outer},
        geography=Geography(Link(wire.median_s, wire.sigma), Access(BYTES_PER_S, BYTES_PER_S) if bound else Access()),
        # In the latency-bound regime a snapshot has no size.
        sizes=MessageSizes(0, 0, (VECTOR_BYTES if bound else 0,), (0,), (0,)),
        costs=Costs(0.0, 0.0, 0.0, 0.0),
    )
    return swarm.run(limit_s=FOREVER_S)


def figures_of(worlds: Sequence[Outcome]) -> Figures:
    """How long a round took: by replica, by pair (the later of two that pulled from each other), for the last one."""
    took: dict[str, list[float]] = {"replica": [], "pair": [], "last": []}
    results: Counter[str] = Counter()
    apart: list[float] = []
    for world in worlds:
        rounds = world.trace.of("outer_round")
        results += world.trace.totals("outer_round", "result")
        mine = {event.peer: event.number("seconds") for event in rounds}
        partner = {event.peer: str(event.get("partner")) for event in rounds}
        began = [event.at_s - mine[event.peer] for event in rounds]
        apart.append(max(began) - min(began))
        took["replica"] += mine.values()
        took["pair"] += [max(mine[a], mine[b]) for a, b in partner.items() if a < b and partner.get(b) == a]
        took["last"].append(max(mine.values()))
    summaries = {name: summary(sample) if sample else None for name, sample in took.items()}
    return summaries | {"results": dict(sorted(results.items())), "begun_apart_s": max(apart)}


def summary(sample: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation, seconds; the latter is 0 for a single value."""
    std = statistics.stdev(sample) if len(sample) > 1 else 0.0
    return {"mean_s": statistics.fmean(sample), "std_s": std, "count": len(sample)}


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Results) -> list[Block]:
    """The answer, tables by regime and spread, the comparison with the paper, and the plots. Small swarms first."""
    results = sorted(results, key=lambda one: int(one["nodes"]))
    matched = select(results, pairing="matched")
    spreads = sorted({float(one["std_over_mean"]) for one in results} & set(QUICK_SPREADS))
    blocks: list[Block] = [_answer(matched), _beside_paper(matched)]
    for regime, title in REGIMES.items():
        shown = {spread: select(matched, regime=regime, std_over_mean=spread) for spread in spreads}
        blocks.append(f"### {title.capitalize()}: milliseconds for one synchronisation")
        blocks += [_times_table(found, f"Latency with std/mean {spread:g}:") for spread, found in shown.items()]
        blocks += [_times_plot(found, regime, spread) for spread, found in shown.items() if spread in (0.0, 1.0)]
    return [*blocks, _ratios(matched), _quicker(matched), _random_pairs(results)]


def ratio(result: Result) -> float:
    """Ratio of the paper's tree to the later pull of a pair."""
    return _times(result, "tree", "pair")


def _times(result: Result, model: str, kind: str) -> float:
    """Time of a model divided by the time of a pull."""
    return float(result["models"][model]["mean_s"] / result["pull"][kind]["mean_s"])


def _answer(results: Results) -> str:
    """How much longer the quickest all-reduce takes than a pull, in the largest swarm of each regime."""
    parts = []
    for regime, title in REGIMES.items():
        nodes = max(one["nodes"] for one in select(results, regime=regime))
        largest = select(results, regime=regime, nodes=nodes)
        ratios = [min(_times(one, name, "pair") for name in MODELS) for one in largest]
        parts.append(f"{value_range(ratios)} times as long with {nodes} replicas if {title}")
    words = " and ".join(parts)
    return f"Compared with the pull of a pair, the quickest all-reduce takes {words}, depending on the spread."


def _paper_ratios() -> dict[float, float]:
    """Ratio of the paper's tree all-reduce to a pair with 1,024 nodes, by std/mean of the latency."""
    ratios = published()["sync_time_ratio_tree_allreduce_over_pair_n1024"]
    return {float(key): value for key, value in ratios.items()}


def _beside_paper(results: Results) -> Table:
    """Our Monte Carlo of the paper's model, and the node's pull, next to the paper's ratios at its 1,024 nodes."""
    largest, theirs = max(int(one["nodes"]) for one in results), _paper_ratios()
    columns: Columns = {
        "std/mean": lambda one: f"{one['std_over_mean']:g}",
        "paper, N = 1024": lambda one: theirs.get(one["std_over_mean"]),
        f"its model here, N = {largest}": lambda one: (
            one["models"]["tree"]["mean_s"] / (2 * one["models"]["exchange"]["mean_s"])
        ),
        f"tree / node's pull, N = {largest}": ratio,
    }
    caption = "### Next to the paper (arXiv 2506.10911, figure 5; the ratios are its model, recomputed)"
    found = select(results, regime="latency", nodes=largest)
    return table(columns, sorted(found, key=lambda one: float(one["std_over_mean"])), caption)


def _times_table(results: Results, caption: str) -> Table:
    def time(kind: str, name: str) -> Callable[[Result], Cell]:
        return lambda one: plus_minus(1e3 * one[kind][name]["mean_s"], 1e3 * one[kind][name]["std_s"])

    columns: Columns = {
        "N": "nodes",
        "pull: replica": time("pull", "replica"),
        "pair": lambda one: 1e3 * one["pull"]["pair"]["mean_s"],
        "all N": lambda one: 1e3 * one["pull"]["last"]["mean_s"],
        **{TITLES[name]: time("models", name) for name in MODELS},
    }
    return table(columns, results, caption)


def _times_plot(results: Results, regime: str, std_over_mean: float) -> Plot:
    def curve(label: str, kind: str, name: str, style: LineStyle = "line") -> Curve:
        return Curve(label, [(one["nodes"], one[kind][name]["mean_s"]) for one in results], style)

    pulled = {"pair": "later of a pair", "last": "last of all N"}
    pulls = [curve(f"pair pull ({title})", "pull", kind) for kind, title in pulled.items()]
    models = [curve(TITLES[name], "models", name, "dashed") for name in MODELS]
    title = f"One synchronisation, {REGIMES[regime]}, latency std/mean {std_over_mean:g}"
    return Plot(f"time-{regime}-{std_over_mean:g}", title, ("replicas", "seconds"), [*pulls, *models], ("log2", "log"))


def _ratios(results: Results) -> Plot:
    latency, shown = select(results, regime="latency"), sorted({int(one["nodes"]) for one in results})
    curves = [
        Curve(f"N = {n}", sorted((one["std_over_mean"], ratio(one)) for one in select(latency, nodes=n)))
        for n in shown
        if n in QUICK_NODES or n == shown[-1]
    ]
    curves.append(Curve("paper, N = 1024", list(_paper_ratios().items()), "points"))
    return Plot("ratio", "Tree all-reduce / pair pull, latency-bound", ("latency std/mean", "ratio"), curves)


def _quicker(results: Results) -> Table:
    """How the all-reduces compare with a replica's pull over all cases, and where each does best."""
    rows: list[list[Cell]] = []
    for regime, title in REGIMES.items():
        found = select(results, regime=regime)
        for name in MODELS if found else ():
            ratios = [_times(one, name, "replica") for one in found]
            quicker = f"{sum(value < 0.99 for value in ratios)} of {len(ratios)} cases"
            best = found[ratios.index(min(ratios))]
            there = f"N = {best['nodes']}, std/mean {best['std_over_mean']:g}"
            rows.append([title, TITLES[name], quicker, min(ratios), there])
    columns = ("regime", "all-reduce", "quicker than a replica's pull in", "smallest ratio to it", "at")
    return Table(columns, rows, "### Where an all-reduce is quicker than a pull")


def _random_pairs(results: Results) -> Table:
    """Several pulls at one node share its access under random pairing; under a matching each node serves one."""
    even = select(results, regime="bandwidth", std_over_mean=0.0)
    found = {(one["pairing"], one["nodes"]): one["pull"] for one in even}
    caption = (
        "### Matched against random pairing, bandwidth-bound, no spread\n\n"
        "A replica chosen by several others shares its access among them:"
    )
    shown = [(kind, pairing) for kind in ("replica", "last") for pairing in ("matched", "random")]
    both = sorted(nodes for pairing, nodes in found if pairing == "random" and ("matched", nodes) in found)
    rows = [[n, *(found[pairing, n][kind]["mean_s"] for kind, pairing in shown)] for n in both]
    titles = (f"{'all N' if kind == 'last' else kind}, {pairing} (s)" for kind, pairing in shown)
    return Table(("N", *titles), rows, caption)
