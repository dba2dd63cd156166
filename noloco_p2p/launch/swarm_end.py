"""The last output of `noloco swarm`: a few lines written by the model, and the commands to try next."""

import shlex
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

from noloco_p2p.errors import NolocoError
from noloco_p2p.humanize import plain
from noloco_p2p.launch.export import TOKENIZER, run_export

LINES, WIDTH = 4, 76
SAMPLE_TOKENS = 240
MAX_BYTES = 2 << 30
"""Upper limit on the size of the checkpoints read for a sample; larger models are only loaded on request."""
TENSORS = "*/checkpoints/*/*.safetensors"
"""The tensor files of all checkpoints in a run's directory."""


def sample_lines(run_dir: Path) -> list[str]:
    """The first lines that the model of a run's newest checkpoints writes, or one line that says why there are none."""
    # One of each stage is read, and all of a stage are equally large.
    sizes = {path.name.partition("-round-")[0]: path.stat().st_size for path in run_dir.glob(TENSORS)}
    if not sizes:
        return ["no sample: the run has no checkpoints (checkpoint.every_steps)"]
    if sum(sizes.values()) > MAX_BYTES:
        return ["no sample: the model is large; noloco generate loads it"]
    try:
        with tempfile.TemporaryDirectory(prefix="noloco-sample-") as home:
            model = Path(home) / "model"
            run_export((), [run_dir], model, merge="one", replicas=False, tokenizer_dir=None, say=lambda _: None)
            if not (model / TOKENIZER).exists():
                return ["no sample: the run read token ids: noloco export --tokenizer-dir DIR adds their tokenizer"]
            from noloco_p2p.launch.evaluation import run_generate

            text = "".join(run_generate(model, "", tokens=SAMPLE_TOKENS, temperature=0.8, seed=0, device="cpu"))
    except (NolocoError, OSError, KeyboardInterrupt) as error:
        return [f"no sample: {str(error) or 'interrupted'}"]
    wrapped = (line for long in text.splitlines() for line in textwrap.wrap(long, WIDTH, drop_whitespace=False))
    shown = (plain(line).rstrip() for line in wrapped)  # a model that has learnt little may write control characters
    return ["the model writes:", *[f"    {line}" for line in shown if line][:LINES]]


def say_what_next(run_dir: Path, say: Callable[[str], None]) -> None:
    """Print the commands for a completed run, with its directory filled in; its model needs checkpoints."""
    home = f"./{run_dir}" if str(run_dir).startswith("-") else str(run_dir)  # not to be taken for an option
    run, model, page = map(shlex.quote, (home, f"{home}/model", f"{home}/report.html"))
    say(f"report    noloco report {run} --out {page}")
    if not any(run_dir.glob(TENSORS)):
        return
    say(f"export    noloco export --from {run} --out {model}")
    say(f"generate  noloco generate {model} --prompt 'def main('")
