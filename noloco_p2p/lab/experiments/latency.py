"""Experiment 1: how long a synchronisation takes, pair pulls by the node's own code beside models of all-reduces."""

from collections.abc import Callable, Sequence

import numpy as np

from noloco_p2p.lab.experiments import allreduce
from noloco_p2p.lab.experiments.allreduce import Wire
from noloco_p2p.lab.experiments.markdown_page import Block, Table
from noloco_p2p.lab.experiments.paper import published
from noloco_p2p.lab.experiments.pull_latency import (
    BYTES_PER_S,
    LATENCY_S,
    VECTOR_BYTES,
    figures_of,
    pull_round,
    summary,
    wire_of,
)
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results
from noloco_p2p.observe.plotting.plots import Curve, Plot

EXCHANGES = 20_000
"""Draws of the paper's pair."""
MODELS: dict[str, Callable[[Wire, int, np.random.Generator], float]] = {
    "tree": allreduce.tree_s,
    "binomial": allreduce.binomial_tree_s,
    "ring": allreduce.ring_s,
    "butterfly": allreduce.butterfly_s,
}
TREES = ("tree", "binomial")
"""Cheap to draw, and with the longest tails where the paper's ratios are."""
TITLES = {"tree": "tree (paper)", "binomial": "binomial tree", "ring": "ring", "butterfly": "butterfly"}
REGIMES = {"latency": "latency-bound", "bandwidth": "bandwidth-bound"}
NODES, QUICK_NODES = (4, 8, 16, 32, 64, 128, 256, 512, 1024), (4, 16, 64, 256)
SPREADS, QUICK_SPREADS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5), (0.0, 1.0, 2.5)


def runs(quick: bool) -> list[Case]:
    """Every regime, number of nodes and spread; large ones first. Random pairing where pulls can meet at one node."""
    nodes, spreads = (QUICK_NODES, QUICK_SPREADS) if quick else (NODES, SPREADS)
    pulls, draws = (500, 50) if quick else (1000, 200)
    grid = [
        (n, spread, regime, pairing)
        for n in sorted(nodes, reverse=True)
        for spread in spreads
        for regime, pairing in (("latency", "matched"), ("bandwidth", "matched"), ("bandwidth", "random"))
        if pairing == "matched" or spread == 0
    ]
    if quick:
        grid += [(NODES[-1], spread, "latency", "matched") for spread in spreads]
    return [
        Case(
            f"{regime}-{pairing}-{n}-{spread:g}",
            {
                "regime": regime,
                "pairing": pairing,
                "nodes": n,
                "std_over_mean": spread,
                "worlds": max(1, pulls // n),
                "tree_draws": 1000,
                "draws": draws if n <= 64 else max(10, 64 * draws // n),
                "seed": 0,
            },
        )
        for n, spread, regime, pairing in grid
    ]


# --- one case ---------------------------------------------------------------------------------------------------------


def measure(case: Case) -> Figures:
    """Pulls of `worlds` swarms, worlds `seed`, `seed` + 1, …; the models over `tree_draws` or `draws` all-reduces."""
    given = case.settings
    nodes, wire = int(given["nodes"]), wire_of(given["regime"], given["std_over_mean"])
    models = {}
    for name, model in MODELS.items():
        rng = allreduce.dice(given["seed"], "model", name, nodes)
        draws = given["tree_draws" if name in TREES else "draws"]
        models[name] = summary([model(wire, nodes, rng) for _ in range(draws)])
    rng = allreduce.dice(given["seed"], "model", "exchange")
    models["exchange"] = summary([allreduce.exchange_s(wire, rng) for _ in range(EXCHANGES)])
    worlds = [pull_round(given, given["seed"] + world) for world in range(given["worlds"])]
    return {"pull": figures_of(worlds), "models": models}


# --- the report -------------------------------------------------------------------------------------------------------


def tell(results: Results) -> list[Block]:
    """Tables by regime and spread, the comparison with the paper, the plots, and what they say in a few sentences."""
    matched = [one for one in results if one["pairing"] == "matched"]
    spreads = sorted({float(one["std_over_mean"]) for one in results})
    blocks: list[Block] = [_headline(matched), _no_spread(matched), *_beside_paper(matched)]
    for regime, title in REGIMES.items():
        blocks += [f"### {title.capitalize()}: milliseconds for one synchronisation", _EXPLAINED]
        shown = [c for c in spreads if c in QUICK_SPREADS]
        blocks += [_table(_those(matched, regime, c), f"Latency with std/mean {c:g}:") for c in shown]
        blocks += [_times(matched, regime, c) for c in shown if c in (0.0, 1.0)]
    blocks += [_ratios(matched), _quicker(matched), _random_pairs(results)]
    return blocks


_EXPLAINED = (
    "*replica*: mean over replicas of the time from its snapshot to its merge. *pair*: the later of two partners, mean."
    " *all N*: the last pull of the swarm, for which nobody waits. The all-reduces: until the last node has the mean."
    " All replicas begin together."
)


def _those(results: Results, regime: str, std_over_mean: float) -> list[Result]:
    found = [one for one in results if (one["regime"], one["std_over_mean"]) == (regime, std_over_mean)]
    return sorted(found, key=lambda one: int(one["nodes"]))


def ratio(result: Result) -> float:
    """Of the paper's tree to the pull, the later one of a pair."""
    return float(result["models"]["tree"]["mean_s"] / result["pull"]["pair"]["mean_s"])


def _headline(results: Results) -> str:
    """The largest swarm of each regime in a line for each spread: the all-reduces as multiples of the pull."""
    lines = []
    for regime, title in REGIMES.items():
        largest = max((int(one["nodes"]) for one in results if one["regime"] == regime), default=0)
        for one in (one for one in results if (one["regime"], one["nodes"]) == (regime, largest)):
            pair_s = one["pull"]["pair"]["mean_s"]
            multiples = ", ".join(f"{TITLES[name]} {one['models'][name]['mean_s'] / pair_s:.3g}" for name in MODELS)
            lines.append(
                f"- {title}, N = {largest}, std/mean {one['std_over_mean']:g}: the later pull of a pair takes"
                f" {1e3 * pair_s:.4g} ms; the all-reduces that many times as long: {multiples}."
            )
    return "\n".join(lines)


def _no_spread(results: Results) -> Block:
    rows = []
    for one in _those(results, "latency", 0.0):
        expected = allreduce.levels(one["nodes"])
        rows.append((one["nodes"], expected, ratio(one), f"{abs(ratio(one) / expected - 1):.2%}"))
    return Table(
        ("N", "log2 N", "tree / pull", "deviation"),
        rows,
        "### Without spread, latency-bound\n\nA tree needs 2·log2 N messages one after the other, a pull two:",
    )


def _beside_paper(results: Results) -> list[Block]:
    """Our Monte Carlo of the paper's model, and the node's pull, beside the paper's ratios at its 1,024 nodes."""
    theirs = published()["sync_time_ratio_tree_allreduce_over_pair_n1024"]
    by_spread = {float(key.rsplit("_", 1)[-1]): value for key, value in theirs.items() if key != "note"}
    largest = max(int(one["nodes"]) for one in results)
    rows = []
    for one in (one for one in results if one["regime"] == "latency" and one["nodes"] == largest):
        models = one["models"]
        again = models["tree"]["mean_s"] / (2 * models["exchange"]["mean_s"])
        rows.append((f"{one['std_over_mean']:g}", by_spread.get(one["std_over_mean"]), again, ratio(one)))
    return [
        Table(
            ("std/mean", "paper, N = 1024", f"its model here, N = {largest}", f"tree / node's pull, N = {largest}"),
            sorted(rows),
            "### Beside the paper (arXiv 2506.10911, figure 5; the ratios are its model, recomputed)",
        ),
        "The paper's pair is an exchange in which each sends at once: one message's time, the later of two; its ratio"
        " sets one way through the tree beside it (or both ways beside two exchanges, which is the same). The node's"
        " pull is a request and an answer, two messages one after the other, and we set the whole all-reduce, up and"
        " down, beside it. Without spread the two ratios are equal.",
    ]


def _table(results: Sequence[Result], caption: str) -> Table:
    rows = []
    for one in results:
        pull = one["pull"]
        pulls = [f"{1e3 * pull[kind]['mean_s']:.4g}" for kind in ("pair", "last")]
        replica = f"{1e3 * pull['replica']['mean_s']:.4g} ± {1e3 * pull['replica']['std_s']:.2g}"
        models = [
            f"{1e3 * one['models'][name]['mean_s']:.4g} ± {1e3 * one['models'][name]['std_s']:.2g}" for name in MODELS
        ]
        rows.append([one["nodes"], replica, *pulls, *models])
    return Table(("N", "pull: replica", "pair", "all N", *(TITLES[name] for name in MODELS)), rows, caption)


def _times(results: Results, regime: str, std_over_mean: float) -> Plot:
    shown = _those(results, regime, std_over_mean)
    nodes = [float(one["nodes"]) for one in shown]
    pulls = [
        Curve(f"pair pull ({title})", nodes, [float(one["pull"][kind]["mean_s"]) for one in shown])
        for kind, title in (("pair", "later of a pair"), ("last", "last of all N"))
    ]
    models = [
        Curve(TITLES[name], nodes, [float(one["models"][name]["mean_s"]) for one in shown], style="dashed")
        for name in MODELS
    ]
    return Plot(
        f"time-{regime}-{std_over_mean:g}",
        f"One synchronisation, {REGIMES[regime]}, latency std/mean {std_over_mean:g}",
        ("replicas", "seconds"),
        [*pulls, *models],
        ("log2", "log"),
    )


def _ratios(results: Results) -> Plot:
    shown = sorted({int(one["nodes"]) for one in results})
    curves = []
    for nodes in [n for n in shown if n in QUICK_NODES or n == shown[-1]]:
        those = [one for one in results if (one["regime"], one["nodes"]) == ("latency", nodes)]
        those.sort(key=lambda one: float(one["std_over_mean"]))
        curves.append(
            Curve(f"N = {nodes}", [float(one["std_over_mean"]) for one in those], [ratio(one) for one in those])
        )
    theirs = published()["sync_time_ratio_tree_allreduce_over_pair_n1024"]
    points = {float(key.rsplit("_", 1)[-1]): float(value) for key, value in theirs.items() if key != "note"}
    paper = Curve("paper, N = 1024", list(points), list(points.values()), style="points")
    return Plot("ratio", "Tree all-reduce / pair pull, latency-bound", ("latency std/mean", "ratio"), [*curves, paper])


def _quicker(results: Results) -> Table:
    """How the all-reduces stand to a replica's pull over all cases, and where each does best."""
    rows = []
    for regime, title in REGIMES.items():
        for name in MODELS:
            ratios = {
                (int(one["nodes"]), float(one["std_over_mean"])): one["models"][name]["mean_s"]
                / one["pull"]["replica"]["mean_s"]
                for one in results
                if one["regime"] == regime
            }
            if ratios:
                best = min(ratios, key=lambda at: (ratios[at], at))
                quicker = sum(1 for value in ratios.values() if value < 0.99)
                where = f"{quicker} of {len(ratios)} cases"
                rows.append([title, TITLES[name], where, ratios[best], f"N = {best[0]}, std/mean {best[1]:g}"])
    return Table(
        ("regime", "all-reduce", "quicker than a replica's pull in", "least ratio to it", "there"),
        rows,
        "### Where an all-reduce is quicker than a pull\n\n"
        "A snapshot is two vectors, φ and Δ, where an all-reduce of DiLoCo moves one, Δ. An all-reduce leaves every"
        " replica with the mean of all, a pull with the mean of two.",
    )


def _random_pairs(results: Results) -> Table:
    """Several pulls at one node share its access under random pairing; under a matching each serves one."""
    found = {
        (str(one["pairing"]), int(one["nodes"])): one["pull"]
        for one in results
        if (one["regime"], one["std_over_mean"]) == ("bandwidth", 0.0)
    }
    rows = []
    for nodes in sorted(n for pairing, n in found if pairing == "random" and ("matched", n) in found):
        even, drawn = found["matched", nodes], found["random", nodes]
        rows.append([nodes, *(one[kind]["mean_s"] for kind in ("replica", "last") for one in (even, drawn))])
    return Table(
        ("N", "replica, matched (s)", "replica, random (s)", "all N, matched (s)", "all N, random (s)"),
        rows,
        "### Matched against random pairing, bandwidth-bound, no spread\n\n"
        "A replica that several others chose shares its access among them:",
    )


EXPERIMENT = Experiment(
    name="latency",
    question="How long does a replica stand still for an outer round: with pair pulls, with all-reduces of N replicas?",
    setting=(
        f"One stage, N replicas, computing takes no time. Every link has a log-normal one-way latency of mean"
        f" {1e3 * LATENCY_S:g} ms and the given std/mean. *Latency-bound*: the vectors weigh nothing."
        f" *Bandwidth-bound*: a vector of {VECTOR_BYTES / 1e6:g} MB, {8 * BYTES_PER_S / 1e6:g} Mbit/s up and down"
        " for each node, shared by its transfers. The pair pull is the node's own code in the simulator (request,"
        " answer with φ and Δ), matched pairs unless said otherwise; the all-reduces are models on the same links"
        " (`experiments/allreduce.py` has the formulas): the paper's tree, a binomial tree, a ring, and a butterfly as"
        " in hivemind."
    ),
    limits=(
        "No real network: no congestion, no slow start, no loss, no processing in the hosts. The all-reduces are"
        " models in which everybody is there at the same moment, nobody fails, and groups form in no time; real ones"
        " wait for the last replica (see the experiment `blocking`) and for their matchmaking. How much a round is"
        " worth is another question: an all-reduce makes all replicas equal, a pull brings two nearer to each other"
        " (see `convergence`)."
    ),
    runs=runs,
    measure=measure,
    tell=tell,
)
