"""The words and numbers of the page: how the run stands, its main figures, and what was trained with what."""

from collections import Counter

from noloco_p2p import humanize
from noloco_p2p.launch.model_card import DATA
from noloco_p2p.launch.swarm_summary import perplexity
from noloco_p2p.observe.report.journals import clean, number
from noloco_p2p.observe.report.recorded_run import RecordedRun


def standing(run: RecordedRun) -> str:
    """Whether the run is completed, running or interrupted, as a sentence.

    It is completed when every stage has a replica whose last process reached `finished`.
    """
    last = [[node.processes[-1].spans for node in run.of_stage(stage)] for stage in run.stages]
    if last and all(any(span.state == "finished" for spans in mine for span in spans) for mine in last):
        return f"Completed, in {humanize.duration(run.wall_s)}."
    if run.running:
        return f"Running since {humanize.clock(run.began_at)} UTC."
    return f"Interrupted at step {_steps(run)}."


def headline(run: RecordedRun) -> dict[str, str]:
    """The main figures of the run, by name."""
    validation = run.validation_loss
    return {
        "nodes": f"{len(run.nodes)} in {humanize.plural(len(run.stages), 'stage')}",
        "steps": _steps(run),
        "tokens": humanize.count(run.tokens),
        "tokens/s": humanize.figure(run.tokens_per_s),
        "final loss": humanize.loss(run.last("final_loss")),
        "validation loss": humanize.loss(validation),
        "validation perplexity": humanize.figure(perplexity(validation)),
        "wall time": humanize.duration(run.wall_s),
    }


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """Model, data, hardware, software and command; facts that were not recorded are left out."""

    def said(*place: str) -> str:
        found: object = run.manifest
        for name in place:
            found = found.get(name) if isinstance(found, dict) else None
        return "" if found is None else clean(found)

    sizes = {"hidden size": "hidden_size", "layers": "num_hidden_layers", "vocabulary": "vocab_size"}
    model = [said("model", "family"), *(f"{word} {said('model', 'config', name)}" for word, name in sizes.items())]
    data = said("data", "dataset") or DATA.get(said("data", "kind"), said("data", "kind"))
    machines = Counter(node.machine for node in run.nodes if node.machine)
    found = {
        "model": ", ".join(model) if model[0] else "",
        "data": f"{data}, tokenizer {said('data', 'tokenizer')}" if data else "",
        "hardware": "; ".join(f"{humanize.plural(n, 'node')} on {machine}" for machine, n in machines.most_common(5)),
        "software": ", ".join(sorted({f"noloco_p2p {node.version}" for node in run.nodes if node.version})[:5]),
        "command": clean(run.summary.get("command") or next((one.command for one in run.nodes if one.command), "")),
    }
    return [(what, words) for what, words in found.items() if words]


def _steps(run: RecordedRun) -> str:
    steps = number(run.manifest.get("steps"))
    done = humanize.count(int(max(node.step for node in run.nodes)))
    return done if steps is None else f"{done} of {humanize.count(steps)}"
