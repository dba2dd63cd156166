"""`noloco finetune` and `noloco tasks`. Heavy imports are inside the commands."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from noloco_p2p.cli.exits import say
from noloco_p2p.cli.options import Device, ExportDir


def finetune_model(
    model: ExportDir,
    data: Annotated[
        list[str], Option(metavar="FILE", help="JSON lines with a prompt and a completion; globs; repeatable.")
    ],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Directory to write; it must be new, or empty.")],
    learning_rate: Annotated[
        float | None,
        Option(metavar="X", min=0, help="Peak after the warm-up; default: a tenth of the run's, 1e-4 after muon."),
    ] = None,
    batch_size: Annotated[int, Option(metavar="N", min=1, help="Examples per optimizer step.")] = 32,
    epochs: Annotated[int, Option(metavar="N", min=1, help="Passes over the examples.")] = 3,
    steps: Annotated[int | None, Option(metavar="N", min=1, help="Optimizer steps, instead of --epochs.")] = None,
    held_out: Annotated[float, Option(metavar="X", min=0, max=0.9, help="Fraction of examples to hold out.")] = 0.05,
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of the order and of the held-out examples.")] = 0,
    device: Device = "auto",
) -> None:
    """Train an exported model on prompts and their completions.

    This runs on this machine, and writes the result as a new model. Only the completions count towards the loss. The
    optimizer's other settings are those of the run.
    """
    from noloco_p2p.launch.finetuning import Recipe, run_finetune

    recipe = Recipe(learning_rate, batch_size, epochs, steps, held_out, seed)
    found = run_finetune(model, data, out, recipe, device=device, say=say)
    if found["held_out_loss"] is not None:
        print(f"held out: {found['held_out_before']:.4f} nats per token before, {found['held_out_loss']:.4f} after")
    print(f"wrote {out}")


def make_tasks(
    out: Annotated[Path, Argument(metavar="DIR", help="Directory to write.")],
    seed: Annotated[int, Option(metavar="N", min=0, help="Seed of the items.")] = 0,
    train: Annotated[int, Option(metavar="N", min=1, max=5000, help="Items per task for noloco finetune.")] = 2000,
    test: Annotated[int, Option(metavar="N", min=1, max=1000, help="Items per task for noloco eval --tasks.")] = 200,
) -> None:
    """Make five small tasks for noloco finetune and noloco eval: addition, sorting, brackets, copying, recall."""
    from noloco_p2p.lab.made_tasks import TRAIN, write_tasks

    print(f"{out}: {TRAIN}, and for noloco eval the tasks {', '.join(write_tasks(out, seed, train, test))}, *_choice")
