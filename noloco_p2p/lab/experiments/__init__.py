"""Experiments that a user can repeat: each asks one question, runs its cases, and writes a report with its own figures.

`spec` says what an experiment is, `runner` measures its cases, `page` and `charts` write what was found. The others
are the experiments themselves, one file each, and what several of them share.
"""

import importlib
from types import MappingProxyType

from noloco_p2p.errors import ConfigError
from noloco_p2p.lab.experiments.spec import Experiment

NAMES = MappingProxyType(
    {
        "latency": "time of a synchronisation: pair pull against tree, ring and butterfly all-reduce",
        "blocking": "idle share: pair pulls against a global barrier",
        "stability": "where the replicas part: γ and α against two bounds",
        "routing": "fixed, random and balanced routes, with and without outer rounds",
        "spread": "does the weights' spread follow the learning rate?",
        "staleness": "pairing, stale snapshots and lost partners",
        "convergence": "loss at equal tokens: one process, data parallel, NoLoCo, nothing",
    }
)
"""Every experiment by its name, with what it is about."""
MODULES = MappingProxyType({"routing": "routing_policies"})
"""Where the module of an experiment has another name."""


def find(name: str) -> Experiment:
    """The experiment of a name. Raises ConfigError when there is none."""
    if name not in NAMES:
        raise ConfigError(f"no experiment {name!r}; there are {', '.join(NAMES)}")
    found = importlib.import_module(f"{__name__}.{MODULES.get(name, name)}").EXPERIMENT
    if not isinstance(found, Experiment):
        raise TypeError(f"{name}.EXPERIMENT is a {type(found).__name__}")
    return found
