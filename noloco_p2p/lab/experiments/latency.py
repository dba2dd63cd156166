"""How long does a replica wait for an outer round: with pair pulls, with all-reduces of N replicas?

One stage, N replicas, computing takes no time. Every link has a log-normal one-way latency of mean {LATENCY_MS:g} ms
and the given std/mean. *Latency-bound*: the vectors weigh nothing. *Bandwidth-bound*: a vector of {VECTOR_MB:g} MB,
{MBIT_PER_S:g} Mbit/s up and down for each node, shared by its transfers. The pair pull is the node's own code in the
simulator (request, answer with φ and Δ), matched pairs unless said otherwise; the all-reduces are models on the same
links (`experiments/allreduce.py` has the formulas): the paper's tree, a binomial tree, a ring, and a butterfly as in
hivemind.

Limits: No real network: no congestion, no slow start, no loss, no processing in the hosts. The all-reduces are models
in which all nodes are ready at the same moment, none fails, and groups form in no time; real ones wait for the last
replica (see the experiment `blocking`) and for their matchmaking. How much a round is worth is another question: an
all-reduce makes all replicas equal, a pull brings two nearer to each other (see `convergence`).
"""

from collections.abc import Callable

import numpy as np

from noloco_p2p.lab.experiments import allreduce
from noloco_p2p.lab.experiments.allreduce import Wire
from noloco_p2p.lab.experiments.markdown_page import Block, Cell, Table, table
from noloco_p2p.lab.experiments.pull_latency import (
    BYTES_PER_S,
    LATENCY_S,
    VECTOR_BYTES,
    figures_of,
    pull_round,
    summary,
    wire_of,
)
from noloco_p2p.lab.experiments.results import published
from noloco_p2p.lab.experiments.spec import Case, Experiment, Figures, Result, Results, describe
from noloco_p2p.observe.plotting.plots import Curve, Plot

LATENCY_MS, VECTOR_MB, MBIT_PER_S = 1e3 * LATENCY_S, VECTOR_BYTES / 1e6, 8 * BYTES_PER_S / 1e6
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


def cases(quick: bool) -> list[Case]:
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
            {"regime": regime, "pairing": pairing, "nodes": n, "std_over_mean": spread, "worlds": max(1, pulls // n)}
            | {"tree_draws": 1000, "draws": draws if n <= 64 else max(10, 64 * draws // n), "seed": 0},
        )
        for n, spread, regime, pairing in grid
    ]


def measure(case: Case) -> Figures:
    """Pulls of `worlds` swarms, worlds `seed`, `seed` + 1, …; the models over `tree_draws` or `draws` all-reduces."""
    settings = case.settings
    nodes, seed, wire = int(settings["nodes"]), settings["seed"], wire_of(settings["regime"], settings["std_over_mean"])
    models = {}
    for name, model in MODELS.items():
        rng = allreduce.dice(seed, "model", name, nodes)
        draws = settings["tree_draws" if name in TREES else "draws"]
        models[name] = summary([model(wire, nodes, rng) for _ in range(draws)])
    rng = allreduce.dice(seed, "model", "exchange")
    models["exchange"] = summary([allreduce.exchange_s(wire, rng) for _ in range(EXCHANGES)])
    worlds = [pull_round(settings, seed + world) for world in range(settings["worlds"])]
    return {"pull": figures_of(worlds), "models": models}


# --- the report -------------------------------------------------------------------------------------------------------


def report(results: Results) -> list[Block]:
    """Tables by regime and spread, the comparison with the paper, the plots, and what they say in a few sentences."""
    matched = [one for one in results if one["pairing"] == "matched"]
    shown = [spread for spread in sorted({float(one["std_over_mean"]) for one in results}) if spread in QUICK_SPREADS]
    blocks: list[Block] = [_headline(matched), _no_spread(matched), *_beside_paper(matched)]
    for regime, title in REGIMES.items():
        blocks += [f"### {title.capitalize()}: milliseconds for one synchronisation", _EXPLAINED]
        blocks += [_times_table(_of(matched, regime, c), f"Latency with std/mean {c:g}:") for c in shown]
        blocks += [_times_plot(matched, regime, c) for c in shown if c in (0.0, 1.0)]
    return [*blocks, _ratios(matched), _quicker(matched), _random_pairs(results)]


_EXPLAINED = (
    "*replica*: mean over replicas of the time from its snapshot to its merge. *pair*: the later of two partners, mean."
    " *all N*: the last pull of the swarm, for which nobody waits. The all-reduces: until the last node has the mean."
    " All replicas begin together."
)


def _of(results: Results, regime: str, std_over_mean: float) -> list[Result]:
    found = [one for one in results if (one["regime"], one["std_over_mean"]) == (regime, std_over_mean)]
    return sorted(found, key=lambda one: int(one["nodes"]))


def ratio(result: Result) -> float:
    """Of the paper's tree to the pull, the later one of a pair."""
    return float(result["models"]["tree"]["mean_s"] / result["pull"]["pair"]["mean_s"])


def _largest(results: Results, regime: str) -> tuple[int, list[Result]]:
    """The largest swarm of a regime, and its results."""
    nodes = max((int(one["nodes"]) for one in results if one["regime"] == regime), default=0)
    return nodes, [one for one in results if (one["regime"], one["nodes"]) == (regime, nodes)]


def _headline(results: Results) -> str:
    """The largest swarm of each regime in a line for each spread: the all-reduces as multiples of the pull."""
    lines = []
    for regime, title in REGIMES.items():
        nodes, found = _largest(results, regime)
        for one in found:
            pair_s = one["pull"]["pair"]["mean_s"]
            multiples = ", ".join(f"{TITLES[name]} {one['models'][name]['mean_s'] / pair_s:.3g}" for name in MODELS)
            lines.append(
                f"- {title}, N = {nodes}, std/mean {one['std_over_mean']:g}: the later pull of a pair takes"
                f" {1e3 * pair_s:.4g} ms; the all-reduces that many times as long: {multiples}."
            )
    return "\n".join(lines)


def _no_spread(results: Results) -> Table:
    columns: dict[str, Callable[[Result], Cell]] = {
        "N": lambda one: one["nodes"],
        "log2 N": lambda one: allreduce.levels(one["nodes"]),
        "tree / pull": ratio,
        "deviation": lambda one: f"{abs(ratio(one) / allreduce.levels(one['nodes']) - 1):.2%}",
    }
    caption = "### Without spread, latency-bound\n\nA tree needs 2·log2 N messages one after the other, a pull two:"
    return table(columns, _of(results, "latency", 0.0), caption)


def _paper_ratios() -> dict[float, float]:
    """Tree all-reduce over pair with 1,024 nodes, by std/mean of the latency."""
    ratios = published()["sync_time_ratio_tree_allreduce_over_pair_n1024"]
    return {float(key.rsplit("_", 1)[-1]): value for key, value in ratios.items() if key != "note"}


def _beside_paper(results: Results) -> list[Block]:
    """Our Monte Carlo of the paper's model, and the node's pull, beside the paper's ratios at its 1,024 nodes."""
    largest = max(int(one["nodes"]) for one in results)
    found = [one for one in results if one["regime"] == "latency" and one["nodes"] == largest]
    theirs = _paper_ratios()
    columns: dict[str, Callable[[Result], Cell]] = {
        "std/mean": lambda one: f"{one['std_over_mean']:g}",
        "paper, N = 1024": lambda one: theirs.get(one["std_over_mean"]),
        f"its model here, N = {largest}": lambda one: (
            one["models"]["tree"]["mean_s"] / (2 * one["models"]["exchange"]["mean_s"])
        ),
        f"tree / node's pull, N = {largest}": ratio,
    }
    caption = "### Beside the paper (arXiv 2506.10911, figure 5; the ratios are its model, recomputed)"
    return [
        table(columns, sorted(found, key=lambda one: f"{one['std_over_mean']:g}"), caption),
        "The paper's pair is an exchange in which each sends at once: one message's time, the later of two; its ratio"
        " sets one way through the tree beside it (or both ways beside two exchanges, which is the same). The node's"
        " pull is a request and an answer, two messages one after the other, and we set the whole all-reduce, up and"
        " down, beside it. Without spread the two ratios are equal.",
    ]


def _times_table(results: Results, caption: str) -> Table:
    def time(kind: str, name: str, *, std: bool) -> Callable[[Result], Cell]:
        def cell(one: Result) -> Cell:
            found = one[kind][name]
            return f"{1e3 * found['mean_s']:.4g}" + (f" ± {1e3 * found['std_s']:.2g}" if std else "")

        return cell

    columns: dict[str, Callable[[Result], Cell]] = {
        "N": lambda one: one["nodes"],
        "pull: replica": time("pull", "replica", std=True),
        "pair": time("pull", "pair", std=False),
        "all N": time("pull", "last", std=False),
    }
    return table(columns | {TITLES[name]: time("models", name, std=True) for name in MODELS}, results, caption)


def _times_plot(results: Results, regime: str, std_over_mean: float) -> Plot:
    shown = _of(results, regime, std_over_mean)
    nodes = [float(one["nodes"]) for one in shown]
    pulls = [
        Curve(f"pair pull ({title})", nodes, [float(one["pull"][kind]["mean_s"]) for one in shown])
        for kind, title in (("pair", "later of a pair"), ("last", "last of all N"))
    ]
    models = [
        Curve(TITLES[name], nodes, [float(one["models"][name]["mean_s"]) for one in shown], style="dashed")
        for name in MODELS
    ]
    title = f"One synchronisation, {REGIMES[regime]}, latency std/mean {std_over_mean:g}"
    name = f"time-{regime}-{std_over_mean:g}"
    return Plot(name, title, ("replicas", "seconds"), [*pulls, *models], ("log2", "log"))


def _ratios(results: Results) -> Plot:
    shown = sorted({int(one["nodes"]) for one in results})
    curves = []
    for nodes in [n for n in shown if n in QUICK_NODES or n == shown[-1]]:
        found = [one for one in results if (one["regime"], one["nodes"]) == ("latency", nodes)]
        points = sorted((float(one["std_over_mean"]), ratio(one)) for one in found)
        curves.append(Curve(f"N = {nodes}", [x for x, _ in points], [y for _, y in points]))
    theirs = _paper_ratios()
    paper = Curve("paper, N = 1024", list(theirs), list(theirs.values()), style="points")
    return Plot("ratio", "Tree all-reduce / pair pull, latency-bound", ("latency std/mean", "ratio"), [*curves, paper])


def _quicker(results: Results) -> Table:
    """How the all-reduces compare with a replica's pull over all cases, and where each does best."""
    rows: list[list[Cell]] = []
    for regime, title in REGIMES.items():
        found = [one for one in results if one["regime"] == regime]
        for name in MODELS if found else ():
            ratios = sorted(
                (one["models"][name]["mean_s"] / one["pull"]["replica"]["mean_s"], one["nodes"], one["std_over_mean"])
                for one in found
            )
            best, nodes, std_over_mean = ratios[0]
            quicker = f"{sum(value < 0.99 for value, _, _ in ratios)} of {len(ratios)} cases"
            rows.append([title, TITLES[name], quicker, best, f"N = {nodes}, std/mean {std_over_mean:g}"])
    return Table(
        ("regime", "all-reduce", "quicker than a replica's pull in", "least ratio to it", "there"),
        rows,
        "### Where an all-reduce is quicker than a pull\n\n"
        "A snapshot is two vectors, φ and Δ, where an all-reduce of DiLoCo moves one, Δ. An all-reduce leaves every"
        " replica with the mean of all, a pull with the mean of two.",
    )


def _random_pairs(results: Results) -> Table:
    """Several pulls at one node share its access under random pairing; under a matching each serves one."""
    found = {(one["pairing"], one["nodes"]): one["pull"] for one in _of(results, "bandwidth", 0.0)}

    def time(pairing: str, kind: str) -> Callable[[int], Cell]:
        return lambda nodes: found[pairing, nodes][kind]["mean_s"]

    columns: dict[str, Callable[[int], Cell]] = {
        "N": lambda nodes: nodes,
        "replica, matched (s)": time("matched", "replica"),
        "replica, random (s)": time("random", "replica"),
        "all N, matched (s)": time("matched", "last"),
        "all N, random (s)": time("random", "last"),
    }
    caption = (
        "### Matched against random pairing, bandwidth-bound, no spread\n\n"
        "A replica that several others chose shares its access among them:"
    )
    both = sorted(nodes for pairing, nodes in found if pairing == "random" and ("matched", nodes) in found)
    return table(columns, both, caption)


EXPERIMENT = Experiment("latency", describe(globals()), cases, measure, report)
