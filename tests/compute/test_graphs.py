"""The size of a graph, how many fit in memory, and graphs that are rebuilt from their input."""

import gc
import weakref
from typing import Any

import pytest
import torch
from soak import soak
from stages import (
    as_gradient,
    gradients,
    make_batch,
    make_label,
    make_manifest,
    make_stages,
    microbatch,
    run_microbatch,
    weights,
)
from torch import nn

from noloco_p2p.compute import graphs, host_tensor
from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.graphs import LOOK_S, ROUND_COPIES, SHARE, STEP_COPIES, GraphMemory, SavedTensors
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import ModelSettings, RunManifest
from noloco_p2p.core.messages import HostTensor
from noloco_p2p.io.telemetry.node_figures import rss_bytes

WEIGHT_BYTES, BODY_BYTES = 400, 1_000


def test_each_storage_counts_once_and_parameters_do_not() -> None:
    weight = nn.Parameter(torch.ones(8, 16))
    x = torch.ones(4, 8, requires_grad=True)
    saved = SavedTensors([weight])
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        y = (x @ weight).exp()  # saves x, the weight, and its own output
        z = y * y.view(64).view(4, 16)  # saves y twice
    assert saved.nbytes == x.nbytes + y.nbytes
    [grad] = torch.autograd.grad(z.sum(), [x])
    assert torch.allclose(grad, (2 * y * y).detach() @ weight.detach().T)


def test_a_graph_that_was_measured_is_freed_with_its_output() -> None:
    """The garbage collector does not see the references of autograd, so a cycle of them would stay."""
    with torch.autograd.graph.saved_tensors_hooks(SavedTensors([]).add, lambda tensor: tensor):
        y = torch.ones(4, requires_grad=True).exp()  # saves its own output
    output = weakref.ref(y)
    del y
    assert output() is None


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(graphs, "time", clock)
    return clock


def memory_of(device: str, *, keeps: bool = True, body_bytes: int = BODY_BYTES) -> GraphMemory:
    """The memory of a stage with 400 bytes of weights, after a graph of 3,200 bytes."""
    weight = nn.Parameter(torch.ones(100))
    memory = GraphMemory(torch.device(device), [weight], body_bytes, keeps=keeps)
    assert memory.places == (1 if keeps or body_bytes else None)
    with memory.measured():
        torch.ones(800, requires_grad=True).exp()
    with memory.measured():
        torch.ones(10, requires_grad=True).exp()
    assert memory.graph_bytes == 3_200, "only the first one is measured"
    return memory


def test_half_of_what_is_free_is_for_further_microbatches(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of("cpu")
    spare = 3_200 + (STEP_COPIES + ROUND_COPIES) * WEIGHT_BYTES
    free = spare + 10 * int((3_200 + BODY_BYTES) / SHARE)
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: free)
    memory.look(2)
    assert memory.places == 2 + 10
    free -= 2
    clock.now += LOOK_S
    memory.look(2)
    assert memory.places == 2 + 9, "a byte is missing for the tenth"
    free = 0
    clock.now += LOOK_S / 2
    memory.look(2)
    assert memory.places == 11, "it has only just checked"
    clock.now += LOOK_S
    memory.look(2)
    assert memory.places == 1, "fewer than are open: no further one begins until there is memory again"
    free = spare - 1
    clock.now += LOOK_S
    memory.look(0)
    assert memory.places == 1, "a node that may do nothing would be useless"


def test_on_cuda_graphs_and_messages_lie_in_different_memories(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = ROUND_COPIES * 512 + 40 * int(BODY_BYTES / SHARE)
    on_device = 3_200 + STEP_COPIES * WEIGHT_BYTES + 5 * int(3_200 / SHARE)
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: on_host)
    monkeypatch.setattr(graphs, "free_bytes", lambda device: on_device)
    kept, again = memory_of("cuda"), memory_of("cuda", keeps=False)
    kept.look(3)
    again.look(3)
    assert (kept.places, again.places) == (3 + 5, 3 + 40)


def test_if_microbatches_hold_no_memory_there_is_no_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: 0)
    memory = memory_of("cpu", keeps=False, body_bytes=0)
    memory.look(0)
    assert memory.places is None


def test_if_free_memory_is_unknown_there_is_one_place(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: None)
    memory = memory_of("cpu")
    for open in (0, 1):
        memory.look(open)
        clock.now += LOOK_S
        assert memory.places == 1


# --- the measured size, against the memory of the process -------------------------------------------------------------


def large_middle_stage(*, recompute: bool) -> tuple[TorchStage, HostTensor]:
    """A middle stage whose graphs of 4 × 256 tokens are larger than everything else, and an input for it."""
    config = {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 768, "num_attention_heads": 4}
    settings = ModelSettings(config={**config, "vocab_size": 61, "max_position_embeddings": 256})
    manifest = RunManifest(model=settings, stages=3, microbatch_size=4, sequence_length=256)
    stage = make_torch_stage(manifest, 1, "me", self_test=False, recompute=recompute)
    return stage, host_tensor.from_torch("hidden", torch.randn(4, 256, 256))


def growth_bytes(stage: TorchStage, hidden: HostTensor, count: int) -> int:
    """By how much the process grows over `count` forward passes; a few earlier ones warm up the allocator."""
    for _ in range(2):
        stage.discard(stage.forward(hidden, None)[0])
    gc.collect()
    before = rss_bytes()
    for _ in range(count):
        stage.forward(hidden, None)
    return rss_bytes() - before


def test_a_graph_is_as_large_as_the_growth_of_the_process_and_next_to_nothing_if_it_is_rebuilt() -> None:
    count = 12
    kept, hidden = large_middle_stage(recompute=False)
    grown = growth_bytes(kept, hidden, count)
    measured = kept.memory.graph_bytes
    assert measured is not None
    assert measured > 20 * hidden.spec.nbytes, "some tensors of the size of the hidden states for each layer"
    # Memory that earlier passes left in the allocator is used first; gaps between blocks come on top.
    assert (count - 3) * measured < grown < 1.4 * count * measured
    again, hidden = large_middle_stage(recompute=True)
    assert growth_bytes(again, hidden, count) < 0.15 * count * measured


def test_a_node_that_rebuilds_graphs_has_more_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: 1 << 30)
    places = []
    for recompute in (False, True):
        stage, hidden = large_middle_stage(recompute=recompute)
        assert stage.memory.places == 1
        graph, sent = stage.forward(hidden, None)
        if recompute:
            assert stage.memory.places == 1, "no graph has been made yet"
            stage._graphs.take(stage._pass, graph)
        assert sent.spec == stage.state.hidden
        places.append(stage.memory.places)
    kept, again = places
    assert kept is not None
    assert again is not None
    assert again > 10 * kept > 10


@pytest.mark.parametrize(("index", "bodies"), [(0, 1), (1, 2), (2, 1)])
def test_a_microbatch_holds_its_bodies_and_before_the_last_stage_its_graph(
    monkeypatch: pytest.MonkeyPatch, index: int, bodies: int
) -> None:
    monkeypatch.setattr(graphs, "free_host_bytes", lambda: 1 << 30)
    stages, is_open = make_stages(make_manifest(stages=3)), index < 2
    run_microbatch(stages, make_batch(0), microbatch(0))
    stage = stages[index]
    graph_bytes, weight_bytes = stage.memory.graph_bytes, sum(one.nbytes for one in stage.parameters.values())
    assert graph_bytes is not None
    each = graph_bytes * is_open + stage.state.hidden.nbytes * bodies
    free = (1 << 30) - graph_bytes - (STEP_COPIES + ROUND_COPIES) * weight_bytes
    assert stage.places == is_open + int(SHARE * free) // each


# --- graphs that are rebuilt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["float32", "int4", *soak(["bfloat16"])])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rebuilt_graphs_change_no_bit(family: str, wire: Any) -> None:
    manifest = make_manifest(family, 3, dtype="float32", wire={"forward": wire, "backward": wire})
    kept, again = make_stages(manifest), make_stages(manifest, recompute=True)
    for step in range(2):
        for number in range(3):
            batch, identity = make_batch(number, padded=number), microbatch(10 * step + number)
            one, other = (run_microbatch(stages, batch, identity) for stages in (kept, again))
            assert [c.loss_sum for c in one] == [c.loss_sum for c in other]
            assert [c.grad and bytes(c.grad.data) for c in one] == [c.grad and bytes(c.grad.data) for c in other]
        found, expected = gradients(again), gradients(kept)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for stages in (kept, again):
            for stage in stages:
                stage.inner_step(make_label(step + 1))
        found, expected = weights(again), weights(kept)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("change", ["inner step", "merge"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_graph_of_other_weights_is_never_used(recompute: bool, change: str) -> None:
    """A node takes no step while a graph is open (`Intake.seal`). If it did, it would fail, not train wrongly."""
    stages = make_stages(make_manifest(stages=2), recompute=recompute)
    run_microbatch(stages, make_batch(0), microbatch(0))
    graph, sent = stages[0].forward(make_batch(1).inputs, None)
    gradient = stages[1].loss_backward(microbatch(1), sent, make_batch(1).targets, None)
    if change == "inner step":
        stages[0].inner_step(make_label())
    else:
        stages[0].merge(stages[0].snapshot(1, 1))
    with pytest.raises(AssertionError, match="weights changed between forward and backward"):
        stages[0].backward(graph, microbatch(1), as_gradient(gradient, microbatch(1)))
