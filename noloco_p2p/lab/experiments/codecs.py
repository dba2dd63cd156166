"""What do narrow codecs of hidden states, gradients and outer rounds cost in loss, and how many bytes remain?

A byte-level Llama and a GPT-2 of {LAYERS} layers on the standard library's text, split into 2 and into 4 stages of one
replica each, with the node's own code in the simulator and no outer rounds. Every codec (METHOD.md, "Codecs") trains on
the same tokens with the same settings and seeds. If only one direction is named, the other travels as float32. Peak
learning rate {PEAK_LEARNING_RATE:g}.

- *Above float32*: validation loss minus that of the float32 run with the same seed.
- *Swapped in*: the loss of the weights trained in float32, evaluated with hidden states in the codec, minus their loss
  without it. Nothing is trained in between, so this is free of the noise of training.
- *Seed noise*: the standard deviation of float32's loss over the seeds. Two runs with one seed that differ only
  by rounding also drift apart; bfloat16 shows how far.
- *Outer rounds*: eight replicas of one stage (a Llama of two layers), rounds that are waited for, peak learning rate
  0.005. Every codec of `outer.codec` is compared with `full`, with the same seeds. In random pairs mostly only one of
  the two merges, so the codec's noise at one replica is not the opposite of that at the other.

Limits: Models of a million parameters or less after a few hundred steps. Their channels have means of their own, which
the codecs remove, but not yet the few huge values that large models have after long training. Errors add up over three
borders at most. The loss still falls fast, so a run that is a few steps behind looks worse than one that will end
higher. What is trained in int4 is evaluated in int4; exported weights run without any codec.
"""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from noloco_p2p.lab.experiments import outer_codecs
from noloco_p2p.lab.experiments.results import Columns, above, group, known, mean_std, table, value_range
from noloco_p2p.lab.experiments.spec import Block, Case, Figures, Result, Results, Table, seeded
from noloco_p2p.lab.experiments.training import BYTE_VOCABULARY, TrainingPlan, small_manifest

LAYERS, PEAK_LEARNING_RATE, SEEDS = 4, 3e-3, 3
FAMILIES, STAGES, BASE = ("llama", "gpt2"), (2, 4), "float32"
PUT_IN = ("bfloat16", "int8", "int4")
GOAL_INT4 = 0.02
"""Allowed increase in perplexity."""


class WireCase(NamedTuple):
    """A model, its number of stages, and the codecs between them."""

    family: str
    stages: int
    forward: str
    backward: str

    @property
    def base(self) -> "WireCase":
        """The same case in float32."""
        return self._replace(forward=BASE, backward=BASE)

    @property
    def codec(self) -> str:
        """The codec's name in reports."""
        if self.forward == self.backward:
            return self.forward
        return f"{self.forward} forward" if self.backward == BASE else f"{self.backward} backward"


def cases(quick: bool) -> list[Case]:
    """Every codec with every model, number of stages and seed; then those of outer rounds."""
    codecs = [(BASE, BASE), ("int8", "int8"), ("int4", "int4")]
    codecs += [] if quick else [("bfloat16", "bfloat16"), ("int4", BASE), (BASE, "int4")]
    sizes = {"hidden_size": 64, "steps": 100} if quick else {"hidden_size": 128, "steps": 400}
    wires = [WireCase(family, stages, *codec) for stages in STAGES for family in FAMILIES for codec in codecs]
    own = seeded("{family} {stages} {forward} {backward} s{seed}", wires, range(SEEDS), **sizes)
    return own + outer_codecs.cases(quick)


def measure(case: Case) -> Figures:
    """Train one case: its loss, the bytes at each border, and for float32 the loss with every codec swapped in."""
    from noloco_p2p.lab.experiments.real_swarm import train_and_recode

    if "outer_codec" in case.settings:
        return outer_codecs.measure(case)
    wire, settings = WireCase(*(case.settings[name] for name in WireCase._fields)), case.settings
    hidden_size = settings["hidden_size"]
    changes: dict[str, object] = {} if wire.family == "llama" else {"model": _gpt2(hidden_size)}
    manifest = small_manifest(
        hidden_size,
        LAYERS,
        steps=settings["steps"],
        inner={"peak_learning_rate": PEAK_LEARNING_RATE},
        outer={"pairing": "none"},
        wire={"forward": wire.forward, "backward": wire.backward},
        **changes,
    )
    plan = TrainingPlan(manifest, (1,) * wire.stages, settings["seed"])
    trained, put_in = train_and_recode(plan, PUT_IN if wire == wire.base else ())
    moved = sum(trained.bytes_per_token[kind] for kind in ("activation", "gradient")) / (wire.stages - 1)
    return trained.figures("validation_loss", "parameters") | {"bytes_per_token": moved, "put_in": put_in}


def _gpt2(hidden_size: int) -> dict[str, object]:
    sizes = {"n_embd": hidden_size, "n_layer": LAYERS, "n_head": hidden_size // 32, "n_positions": 128}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    config = {**sizes, **dropout, "vocab_size": BYTE_VOCABULARY, "tie_word_embeddings": False}
    return {"family": "gpt2", "config": config}


# --- the report -----------------------------------------------------------------------------------------------------

Groups = Mapping[WireCase, Results]
"""The runs of each case, by seed."""


def report(results: Results) -> list[Block]:
    """The answer, whether the goals are met, and a table of all codecs."""
    outer = [one for one in results if "outer_codec" in one.case.settings]
    results = [one for one in results if one not in outer]
    groups = {WireCase(*key): runs for key, runs in group(results, *WireCase._fields).items()}
    parameters = [sum(one["parameters"]) for one in results]
    sizes = f"Models of {min(parameters):,} to {max(parameters):,} parameters, {results[0]['steps']} steps."
    return [_answer(groups), sizes, _verdict(groups), _table(groups), *(outer_codecs.report(outer) if outer else ())]


def put_in(groups: Groups, wire: WireCase) -> list[float]:
    """What the codec of the hidden states adds to the loss of weights trained in float32, by seed."""

    def added(base: Result) -> float | None:
        loss: float | None = base["put_in"].get(wire.forward)
        return None if loss is None or base["validation_loss"] is None else loss - base["validation_loss"]

    return known(groups[wire.base], added)


def _answer(groups: Groups) -> str:
    """The range of perplexity over families and numbers of stages, for each codec in both directions."""
    parts = []
    for codec in ("int8", "int4"):
        found = [above(groups[wire], groups[wire.base], "validation_loss") for wire in groups if wire.codec == codec]
        changes = [100 * math.expm1(statistics.fmean(values)) for values in found if values]
        parts.append(f"by {value_range(changes)} % with {codec}")
    return f"Compared with float32, perplexity changes {' and '.join(parts)} in both directions."


def _verdict(groups: Groups) -> str:
    """One line per goal, number of stages and family."""
    lines: list[str] = []
    for wire in groups:
        found, added = above(groups[wire], groups[wire.base], "validation_loss"), put_in(groups, wire)
        if wire.codec not in ("int8", "int4") or not found or not added:
            continue
        limit = outer_codecs.seed_noise(groups[wire.base]) if wire.codec == "int8" else math.log1p(GOAL_INT4)
        goal = "the seed noise" if wire.codec == "int8" else f"{GOAL_INT4:.0%} of perplexity"
        met = [
            f"{what} {mean_std(values, 2)}{'' if statistics.fmean(values) <= limit else ', above it'}"
            for what, values in (("trained with it", found), ("swapped in", added))
        ]
        where = f"{wire.codec}, {wire.family}, {wire.stages} stages"
        lines.append(f"- {where}, against {goal} ({limit:.4f} nats): {'; '.join(met)}.")
    return "\n".join(lines)


def _table(groups: Groups) -> Table:
    def perplexity(wire: WireCase) -> str:
        found = above(groups[wire], groups[wire.base], "validation_loss")
        return "–" if not found or wire == wire.base else f"{math.expm1(statistics.fmean(found)):+.2%}"

    def bytes_per_token(wire: WireCase) -> float:
        return float(groups[wire][0]["bytes_per_token"])

    columns: Columns = {
        "model": lambda wire: wire.family,
        "stages": lambda wire: wire.stages,
        "codec": lambda wire: wire.codec,
        "validation loss": lambda wire: mean_std(known(groups[wire], "validation_loss")),
        "above float32": lambda wire: mean_std(above(groups[wire], groups[wire.base], "validation_loss"), 2),
        "of perplexity": perplexity,
        "swapped in": lambda wire: mean_std(put_in(groups, wire), 2),
        "bytes per token and border": bytes_per_token,
        "of float32's": lambda wire: f"{bytes_per_token(wire) / bytes_per_token(wire.base):.0%}",
    }
    return table(columns, groups, "Losses in nats per token, mean ± standard deviation over the seeds.")
