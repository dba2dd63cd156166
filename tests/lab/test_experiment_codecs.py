"""The experiment on codecs: a short run of each kind, and the verdicts of the report."""

from collections.abc import Mapping, Sequence

import pytest
from experiment_answer import answer
from soak import soak

from noloco_p2p.lab.experiments import codecs, outer_codecs
from noloco_p2p.lab.experiments.codecs import WireCase
from noloco_p2p.lab.experiments.outer_codecs import OuterCase
from noloco_p2p.lab.experiments.results import markdown
from noloco_p2p.lab.experiments.spec import Case, Figures, Result


def case(one: WireCase | OuterCase, seed: int = 0) -> Case:
    name, steps = (
        ("{family} {stages} {forward} {backward} s{seed}", 4)
        if isinstance(one, WireCase)
        else ("outer {pairing} {outer_codec} s{seed}", 20)
    )
    return Case.named(name, **one._asdict(), hidden_size=32, steps=steps, seed=seed)


def results(figures: Mapping[WireCase, Sequence[Figures]] | Mapping[OuterCase, Sequence[Figures]]) -> list[Result]:
    """Results from the figures of each case, by seed."""
    return [Result(case(one, seed), found, 1.0) for one, runs in figures.items() for seed, found in enumerate(runs)]


@pytest.mark.parametrize("family", codecs.FAMILIES)
def test_a_short_run_counts_its_bytes_and_applies_the_codecs(family: str) -> None:
    base = codecs.measure(case(WireCase(family, 2, "float32", "float32")))
    assert base["bytes_per_token"] == 32 * 4 * 2 + 4
    assert set(base["put_in"]) == {"bfloat16", "int8", "int4"}
    assert base["put_in"]["int8"] == pytest.approx(base["validation_loss"], abs=1e-3)
    assert base["put_in"]["int4"] != base["validation_loss"]
    narrow = codecs.measure(case(WireCase(family, 2, "int4", "int8")))
    means = 2 * 32 / (8 * 64)
    assert narrow["bytes_per_token"] == (2 + 16 + means) + (2 + 64) + 4, "half of int8's block of 64 is padding"
    assert narrow["put_in"] == {}
    assert narrow["validation_loss"] == pytest.approx(base["validation_loss"], abs=0.05)


def figures(loss: float | None, put_in: dict[str, float | None], bytes: float = 100.0) -> Figures:
    return {"validation_loss": loss, "parameters": [1, 2], "bytes_per_token": bytes, "put_in": put_in}


def test_the_report_says_which_goals_are_missed() -> None:
    base, eight, four = (WireCase("llama", 2, codec, codec) for codec in ("float32", "int8", "int4"))
    losses = {base: (2.0, 2.02), eight: (2.001, 2.021), four: (2.05, 2.07)}
    put_in: dict[str, float | None] = {"int8": 2.03, "int4": 2.021}
    found = {
        wire: [figures(loss, put_in if wire == base else {}, 50.0 if wire == four else 200.0) for loss in both]
        for wire, both in losses.items()
    }
    blocks = codecs.report(results(found))
    assert answer(blocks) == (
        "Compared with float32, perplexity changes by 0.1 % with int8 and by 5.13 % with int4 in both directions."
    )
    text = markdown(blocks)
    assert "int8, llama, 2 stages, against the seed noise (0.0141 nats): trained with it 0.001 ± " in text
    assert "; swapped in 0.02 ± 0.014, above it." in text
    assert "int4, llama, 2 stages, against 2% of perplexity (0.0198 nats): trained with it 0.05 ± " in text
    assert ", above it; swapped in 0.011 ± 0.014." in text
    assert "| +5.13% |" in text
    assert "| 25% |" in text


def test_runs_that_are_not_finite_are_reported() -> None:
    wires = [WireCase("gpt2", 4, codec, codec) for codec in ("float32", "int4")]
    blocks = codecs.report(results({wire: [figures(None, {"int4": None})] for wire in wires}))
    assert "by – % with int4" in answer(blocks)
    assert "gpt2" in markdown(blocks)


@pytest.mark.parametrize(("codec", "least"), soak([("int4", 0.5), ("int8", 1.0), ("bfloat16", 2.0)]))
def test_a_short_run_of_an_outer_codec_counts_its_bytes(codec: str, least: float) -> None:
    full, found = (codecs.measure(case(OuterCase("matched", one))) for one in ("full", codec))
    (parameters,) = full["parameters"]
    whole = found["bytes_per_parameter"] - 4 * 1024 / parameters  # without the sample
    assert full["bytes_per_parameter"] - 4 * 1024 / parameters == pytest.approx(4.0)
    assert 0.999 * least < whole < (1.02 + found["wrong"]) * least + 4 * found["wrong"]
    assert found["validation_loss"] == pytest.approx(full["validation_loss"], abs=0.05)
    assert found["validation_loss"] != full["validation_loss"]
    assert full["wrong"] == 0


def test_the_report_says_which_outer_codecs_are_within_the_noise() -> None:
    losses = {"full": (2.0, 2.02), "int8": (2.001, 2.021), "int4": (2.05, 2.07)}
    found = {
        OuterCase("matched", codec): [
            {
                "validation_loss": loss,
                "merged_loss": loss,
                "parameters": [1000],
                "spread": 2.0 if codec == "int4" else 1.0,
                "bytes_per_parameter": 0.5,
                "wrong": 0.04,
            }
            for loss in both
        ]
        for codec, both in losses.items()
    }
    text = markdown(outer_codecs.report(results(found)))
    assert "int8, matched pairs: 0.001 ± " in text
    assert "nats above full, within the seed noise of 0.0141." in text
    assert "int4, matched pairs: 0.05 ± " in text
    assert "nats above full, beyond the seed noise of 0.0141." in text
    assert "| 2.00 |" in text
    assert "| 4.0% |" in text
    for one in found[OuterCase("matched", "int4")]:
        one |= {"validation_loss": None, "merged_loss": None, "spread": None}
    assert "| matched | int4 | – | – | – | – | " in markdown(outer_codecs.report(results(found))), "it diverged"
