"""`noloco experiment`: the list of the experiments, and a run of one."""

from pathlib import Path

from noloco_p2p.lab.experiments import EXPERIMENTS, find
from noloco_p2p.lab.experiments.runner import run


def list_experiments() -> list[str]:
    """A line for each."""
    width = max(map(len, EXPERIMENTS))
    return [f"{name:<{width}}  {about}" for name, (_, about) in EXPERIMENTS.items()]


def run_experiment(name: str, out: Path | None, *, quick: bool, jobs: int) -> None:
    """Run one to its report. Raises ConfigError when there is none of that name, and as `runner.run`."""
    experiment = find(name)
    place = out or Path("noloco-experiments") / f"{name}{'-quick' if quick else ''}"
    print(run(experiment, place, lambda line: print(line, flush=True), quick=quick, jobs=jobs))
