"""A small experiment whose cases leave a trace when they are measured, for the tests of the runner."""

from dataclasses import replace
from pathlib import Path

from noloco_p2p.lab.experiments.spec import Block, Case, Experiment, Figures, Results, Table
from noloco_p2p.observe.plotting.plots import Curve, Plot

MARKS = Path("marks")
"""A file in the working directory with one line per measurement."""


def cases(quick: bool) -> list[Case]:
    return [Case(f"case-{n}", {"n": n, "seed": n}) for n in ([1] if quick else [3, 1, 2])]


def measure(case: Case) -> Figures:
    with MARKS.open("a") as file:
        file.write(case.name + "\n")
    return {"square": case.settings["n"] ** 2, "both": (1, 2)}


def fails_at_two(case: Case) -> Figures:
    figures = measure(case)
    if case.settings["n"] == 2:
        raise ArithmeticError("two is not to be had")
    return figures


def not_finite(case: Case) -> Figures:
    return {"square": 1, "both": (float("nan"), float("inf"))}


def further(quick: bool, results: Results) -> list[Case]:
    best = max(results, key=lambda one: int(one["square"]))
    return [Case("again", {"n": best["n"] + 10, "seed": 0})] if best.case.name != "again" else []


def report(results: Results) -> list[Block]:
    squares = [(one["n"], one["square"]) for one in results]
    return [
        "It is n times n.",
        Table(("n", "square"), squares),
        Plot("squares", "Squares", ("n", "n²"), [Curve("found", squares)]),
    ]


TOY = Experiment("toy", "What is n²?", "Small numbers.", "Large numbers.", cases, measure, report)
FOLLOWED = replace(TOY, further=further)
FAILING = replace(TOY, measure=fails_at_two)
NOT_FINITE = replace(TOY, measure=not_finite)
