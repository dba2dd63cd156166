"""What `noloco swarm` ends with: a few lines that the model writes, and the commands to continue with."""

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
MOST_BYTES = 2 << 30
"""Of the checkpoints that are read: a larger model is not loaded without being asked for."""
TENSORS = "*/checkpoints/*/*.safetensors"
"""Of the checkpoints in a run's directory."""


def sample_lines(run_dir: Path) -> list[str]:
    """The first lines that a run's model writes, from its newest checkpoints, or one that says why there are none."""
    sizes = [path.stat().st_size for path in run_dir.glob(TENSORS)]
    if not sizes:
        return ["no sample: the run has no checkpoints (checkpoint.every_steps)"]
    if sum(sizes) > MOST_BYTES:
        return ["no sample: the model is large; noloco generate loads it"]
    try:
        with tempfile.TemporaryDirectory(prefix="noloco-sample-") as home:
            model = Path(home) / "model"
            run_export((), [run_dir], model, merge="one", replicas=False, tokenizer_dir=None, say=lambda _: None)
            if not (model / TOKENIZER).exists():
                return ["no sample: the run read token ids: noloco export --tokenizer-dir DIR adds their tokenizer"]
            from noloco_p2p.launch.evaluation import run_generate

            text = run_generate(model, "", tokens=SAMPLE_TOKENS, temperature=0.8, seed=0, device="cpu")
    except (NolocoError, OSError) as error:
        return [f"no sample: {error}"]
    wrapped = (line for long in text.splitlines() for line in textwrap.wrap(long, WIDTH, drop_whitespace=False))
    shown = (plain(line).rstrip() for line in wrapped)  # a model that has learnt little writes control characters
    return ["the model writes:", *[f"    {line}" for line in shown if line][:LINES]]


def say_what_next(run_dir: Path, say: Callable[[str], None]) -> None:
    """The commands for a run that is complete, with its directory filled in; without checkpoints there is no model."""
    run, model, page = (shlex.quote(str(path)) for path in (run_dir, run_dir / "model", run_dir / "report.html"))
    say(f"report    noloco report {run} --out {page}")
    if not any(run_dir.glob(TENSORS)):
        return
    say(f"export    noloco export --from {run} --out {model}")
    say(f"generate  noloco generate {model} --prompt 'def main('")
