"""`noloco bench stage` measures what it says, on a small run."""

from typing import Any

import pytest
from stages import make_manifest

from noloco_p2p.bench import stage as bench
from noloco_p2p.errors import LocalError

PHASES = ("forward_s", "loss_backward_s", "backward_s", "step_s", "plain_s")


def test_the_cpu_agrees_with_itself_and_everything_takes_time() -> None:
    manifest = make_manifest("llama", 3, dtype="float32")
    found: dict[str, Any] = bench.run("cpu", manifest=manifest, repeats=2)
    assert (found["device"], found["stages"], found["tokens"]) == ("cpu", 3, 16)
    assert all(0 < found[phase] < 60 for phase in PHASES)
    assert found["loss_deviation"] <= 1e-6
    assert found["gradient_deviation"] <= 1e-5
    assert found["peak_bytes"] > 2**20
    parts = found["forward_s"] + found["loss_backward_s"] + found["backward_s"]
    assert found["ratio"] == pytest.approx(found["plain_s"] / parts)


def test_a_narrow_wire_shows_in_the_deviation() -> None:
    manifest = make_manifest("llama", 3, dtype="float32", wire_dtype="bfloat16")
    found: dict[str, Any] = bench.run("cpu", manifest=manifest, repeats=1)
    assert 1e-4 < found["gradient_deviation"] < 0.2


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(LocalError, match="cuda:63 is not here"):
        bench.run("cuda:63")
