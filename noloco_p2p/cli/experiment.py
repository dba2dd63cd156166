"""`noloco experiment`: the list of the experiments, and a run of one."""

from pathlib import Path

from noloco_p2p.lab.experiments import NAMES, find
from noloco_p2p.lab.experiments.runner import Order, run


def list_experiments() -> list[str]:
    """A line for each."""
    width = max(map(len, NAMES))
    return [f"{name:<{width}}  {about}" for name, about in NAMES.items()]


def run_experiment(name: str, out: Path | None, *, quick: bool, jobs: int) -> None:
    """Run one to its report. Raises ConfigError when there is none of that name, and as `runner.run`."""
    experiment = find(name)
    place = out or Path("noloco-experiments") / f"{name}{'-quick' if quick else ''}"
    report = run(experiment, Order(place, quick, jobs), lambda line: print(line, flush=True))
    print(report)
