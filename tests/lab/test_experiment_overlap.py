"""Experiment overlap: what the report says of rounds that are merged late, and of rounds that are waited for."""

from experiment_answer import answer

from noloco_p2p.lab.experiments import overlap
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Result


def test_the_report_compares_every_variant_and_says_how_late_rounds_were_merged() -> None:
    results = []
    for case in overlap.cases(quick=True):
        kind, delay = case.settings["kind"], case.settings["delay"]
        loss = 2.0 + 0.01 * delay * (2 if kind == "waits" else 1) + 0.5 * (kind == "none")
        delays = [] if kind == "none" else [[delay, 29], [0, 1]] if delay else [[0, 30]]
        figures = {"loss": loss, "merged_loss": loss, "delays": delays, "steps_taken": 300}
        results.append(Result(case, figures, 1.0))
    blocks = overlap.report(results)
    late, waits = "0.01, 0.05, 0.1", "0.02, 0.1, 0.2"
    assert answer(blocks) == (
        f"Rounds that are merged 1, 5, 10 inner steps late cost {late} nats per token;"
        f" waiting for them costs {waits} in equal time."
    )
    page = markdown(blocks)
    assert "| overlap | 5 | 300 | 2.05 | 0.05 | 2.05 | 0: 3%, 5: 97% |" in page
    assert "| none | 0 | 300 | 2.5 | 0.5 | 2.5 | none |" in page
