"""`noloco finetune`: supervised fine-tuning of an exported model on this machine.

It uses AdamW with the settings of the run (`inner`) except for the peak learning rate: warm-up and cosine, clipped
gradients. The loss of a step is the mean over the tokens of its completions. The result is determined by the model, the
data and the seed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noloco_p2p import __version__
from noloco_p2p.config import InnerSettings, RunManifest
from noloco_p2p.core.messages import Batch
from noloco_p2p.core.schedule import learning_rate
from noloco_p2p.core.seeds import generator
from noloco_p2p.errors import ConfigError, LocalError
from noloco_p2p.humanize import figure, plural
from noloco_p2p.launch import export, homes, run_files
from noloco_p2p.launch.examples import Example, padded, read_examples
from noloco_p2p.launch.progress_line import ProgressLine

if TYPE_CHECKING:
    from noloco_p2p.compute.exported_model import ExportedModel

RATE_SHARE = 0.1
"""Default peak learning rate, as a share of that of the run: a trained model needs small changes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a fine-tuning."""

    learning_rate: float | None = None
    """Peak learning rate; None: RATE_SHARE of the run's."""
    batch_size: int = 32
    """Examples per optimizer step."""
    epochs: int = 3
    """Passes over the examples."""
    steps: int | None = None
    """Number of optimizer steps; replaces `epochs`."""
    held_out: float = 0.05
    """Share of the examples that are not trained on."""
    seed: int = 0
    """Determines which examples are held out, and the order of the others in each pass."""


def run_finetune(
    model: Path, data: Sequence[str], out: Path, recipe: Recipe, *, device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Train the exported directory `model` on files of JSON lines, write the result to `out`, and return its figures.

    Figures: `steps`, `examples`, `too_long` (examples left out), `held_out_before` and `held_out_loss` (nats per token
    of the completions; None if no examples are held out). Raises ConfigError, LocalError.
    """
    homes.refuse_existing(out, sum(path.stat().st_size for path in model.glob("*.safetensors") if path.is_file()))
    manifest, _ = export.read_record(model)
    record = json.loads((model / export.RECORD).read_text(encoding="utf-8"))
    trained, held, too_long = _split(read_examples(data, export.exported_tokenizer(manifest, model)), manifest, recipe)
    if too_long:
        say(f"skipped, longer than the run's {manifest.sequence_length} tokens: {plural(too_long, 'example')}")
    steps = recipe.steps or recipe.epochs * math.ceil(len(trained) / recipe.batch_size)
    say(f"{plural(len(trained), 'example')}, {len(held):,} held out; {plural(steps, 'step')} of {recipe.batch_size}")
    peak = recipe.learning_rate
    if peak is None:
        adamw = manifest.inner if manifest.inner.optimizer == "adamw" else InnerSettings(optimizer="adamw")
        peak = RATE_SHARE * adamw.peak_learning_rate
    inner = manifest.inner.model_copy(update={"optimizer": "adamw", "peak_learning_rate": peak})

    from noloco_p2p.compute import exported_model

    exported_model.silence_transformers()
    loaded, tokenizer = exported_model.ExportedModel.load(model, device), exported_model.tokenizer_in(model)
    before = _held_out_loss(loaded, held, recipe.batch_size)
    _train(loaded, _batches(trained, recipe), steps, inner, say)
    figures: dict[str, Any] = {"steps": steps, "examples": len(trained), "too_long": too_long}
    figures |= {"held_out_before": before, "held_out_loss": _held_out_loss(loaded, held, recipe.batch_size)}
    with export.replaced(out) as fresh:
        exported_model.save(loaded.causal, fresh)
        exported_model.save(tokenizer, fresh)
        record |= {"replicas": 0, "version": __version__, "finetuned": {**asdict(recipe), **figures}}
        run_files.write_json(fresh / export.RECORD, record)
    return figures


def _split(
    examples: Sequence[Example], manifest: RunManifest, recipe: Recipe
) -> tuple[list[Example], list[Example], int]:
    """(examples to train on, examples held out, number of examples too long for the run's sequences)."""
    fitting = [one for one in examples if len(one.ids) - 1 <= manifest.sequence_length]
    generator(recipe.seed, "finetune", "held out").shuffle(fitting)
    held = round(recipe.held_out * len(fitting))
    if held == len(fitting):
        raise ConfigError(
            f"nothing to train on: of {plural(len(examples), 'example')} {len(fitting):,} fit into the run's"
            f" {manifest.sequence_length} tokens, and {held:,} are held out"
        )
    return fitting[held:], fitting[:held], len(examples) - len(fitting)


def _batches(examples: list[Example], recipe: Recipe) -> Iterator[Batch]:
    """Batches without end, pass after pass, each pass in a different order; its last batch may be smaller."""
    for number in count():
        order = list(examples)
        generator(recipe.seed, "finetune", "pass", number).shuffle(order)
        yield from _in_order(order, recipe.batch_size)


def _in_order(examples: Sequence[Example], size: int) -> Iterator[Batch]:
    return (padded(examples[at : at + size]) for at in range(0, len(examples), size))


def _train(
    model: "ExportedModel", batches: Iterator[Batch], steps: int, inner: InnerSettings, say: Callable[[str], None]
) -> None:
    """Take one optimizer step for each of the first `steps` batches.

    Raises LocalError if a loss is not finite; that of the last batch is also checked after its step.
    """
    from torch.autograd import backward
    from torch.nn.utils import clip_grad_norm_

    from noloco_p2p.compute.inner_optimizer import InnerOptimizer

    parameters = dict(model.causal.named_parameters())
    optimizer, step, mean, rate = InnerOptimizer(parameters, inner), 0, math.nan, 0.0
    with ProgressLine() as line:
        for step, batch in zip(range(1, steps + 1), batches, strict=False):
            loss, tokens = model.nats(batch)
            mean = float(loss.detach()) / tokens
            line.tell(f"step {step:,} of {steps:,}, loss {mean:.4f}", (step - 1) / steps)
            if not math.isfinite(mean):
                raise LocalError(f"the loss is not finite at step {step}: try a lower --learning-rate")
            backward(loss / tokens)
            clip_grad_norm_(parameters.values(), inner.clip_norm)
            rate = learning_rate(step, steps, inner.peak_learning_rate, inner.warmup_steps, inner.final_fraction)
            optimizer.step(rate)
            model.causal.zero_grad()
        if not math.isfinite(model.loss(batch).loss_sum):
            raise LocalError(f"the loss is not finite after step {step}: try a lower --learning-rate")
    say(f"step {steps:,}/{steps:,}  loss {mean:.4f}  rate {figure(rate)}")


def _held_out_loss(model: "ExportedModel", examples: Sequence[Example], size: int) -> float | None:
    sums = [model.loss(batch) for batch in _in_order(examples, size)]
    return sum(one.loss_sum for one in sums) / sum(one.tokens for one in sums) if sums else None
