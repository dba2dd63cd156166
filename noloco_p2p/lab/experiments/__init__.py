"""Experiments that a user can repeat. Each asks one question, runs its cases, and writes a report with its own figures.

`spec` defines what an experiment is, `runner` measures its cases, and `results` contains what the reports share.
`training`, `real_swarm` and `instrumented_stage` train real weights in the simulator. `allreduce` and `bounds` are
models that the measurements are compared with. The other modules are the experiments.
"""

import importlib

from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.experiments.spec import Experiment

EXPERIMENTS = {
    "latency": ("latency", "time of a synchronisation: pair pull against tree, ring and butterfly all-reduce"),
    "blocking": ("blocking", "idle share: pair pulls against a global barrier"),
    "stability": ("stability", "where the replicas diverge: γ and α against two bounds"),
    "routing": ("routing_policies", "fixed, random, weighted and balanced routes, with and without outer rounds"),
    "spread": ("spread", "does the weights' spread follow the learning rate?"),
    "staleness": ("staleness", "pairing, stale snapshots and lost partners"),
    "overlap": ("overlap", "outer rounds that are merged inner steps after they were frozen"),
    "codecs": ("codecs", "loss and bytes: hidden states, gradients and outer rounds in fewer bits"),
    "convergence": ("convergence", "loss at equal tokens, and bytes: data parallel, the outer rules, nothing"),
    "shards": ("shards", "every replica reads its own kind of data, against a share of all of it"),
    "regularisation": ("regularisation", "is the spread between replicas a regulariser? noise of the same size"),
    "tuning": ("tuning", "m, α, β, γ and the learning rate, with 4, 8 and 16 replicas"),
    "downstream": ("downstream", "fine-tuning and tasks after pre-training: data parallel, NoLoCo, gossip, nothing"),
}
"""Every experiment by name: its module and its subject."""


def find(name: str) -> Experiment:
    """The experiment with this name. Raises ConfigError if there is none."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"there is no experiment {name!r}; choose from {', '.join(EXPERIMENTS)}")
    return Experiment.of(name, vars(importlib.import_module(f"{__name__}.{EXPERIMENTS[name][0]}")))
