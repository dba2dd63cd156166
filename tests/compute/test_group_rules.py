"""Rules that take from all replicas of a stage, on real tensors: `diloco` is torch's SGD, `sync` one large batch."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from stages import make_batch, make_label, make_manifest, make_stages, microbatch, run_microbatch, vector_of, weights

from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.core.messages import ReplicaState
from noloco_p2p.core.snapshots import SnapshotRequest
from noloco_p2p.errors import Violation

PEERS = ("a", "b", "c")
Replicas = dict[str, list[TorchStage]]


def replicas_of(**outer: object) -> Replicas:
    manifest = make_manifest(outer=outer, dtype="float32")
    return {peer: make_stages(manifest, peer) for peer in PEERS}


def train(stages: list[TorchStage], seed: int) -> None:
    for step in range(2):
        run_microbatch(stages, make_batch(100 * seed + step), microbatch(step, f"origin-{seed}"))
        for stage in stages:
            stage.inner_step(make_label(step + 1))


def meet(replicas: Replicas, round: int, without: tuple[str, ...] = ()) -> None:
    """A round of all replicas. Those in `without` do not count, but merge what the others offer."""
    for same in zip(*replicas.values(), strict=True):
        frozen = [stage.snapshot(round, round) for stage in same]
        vectors = [vector_of(stage, one) for stage, one in zip(same, frozen, strict=True)]
        for stage, mine in zip(same, frozen, strict=True):
            theirs = [one for one in reversed(vectors) if one.peer not in (mine.peer, *without)]
            stage.merge(mine, theirs, mine.peer not in without)


def states(replicas: Replicas) -> dict[str, list[ReplicaState]]:
    return {peer: [stage.capture(0, 0.0, 0) for stage in stages] for peer, stages in replicas.items()}


def common(replicas: Replicas, *kinds: str) -> list[dict[str, bytes]]:
    return [
        {
            f"{at} {tensor.name}": bytes(tensor.data)
            for at, state in enumerate(of_peer)
            for tensor in state.tensors
            if tensor.name.split("/")[0] in kinds
        }
        for of_peer in states(replicas).values()
    ]


@pytest.mark.parametrize("codec", ["full", "bfloat16"])
def test_diloco_is_sgd_with_nesterov_momentum_on_the_mean_of_all(codec: str) -> None:
    replicas = replicas_of(rule="diloco", alpha=0.9, beta=0.7, codec=codec)
    start = weights(replicas["a"])
    phi = {name: theta.double().requires_grad_() for name, theta in start.items()}
    sgd = torch.optim.SGD(phi.values(), lr=0.7, momentum=0.9, nesterov=True)
    for round in (1, 2, 3):
        for number, stages in enumerate(replicas.values()):
            train(stages, 10 * round + number)
        thetas = [weights(stages) for stages in replicas.values()]
        meet(replicas, round, without=("c",) if round == 2 else ())
        counted = thetas[:2] if round == 2 else thetas
        for name, value in phi.items():
            value.grad = -sum(theta[name].double() - value.detach() for theta in counted) / len(counted)  # type: ignore[assignment]
        sgd.step()
        found = [weights(stages) for stages in replicas.values()]
        for name, value in phi.items():
            assert all(torch.equal(one[name], found[0][name]) for one in found), "bit for bit"
            scale = 1e-6 if codec == "full" else 5e-3 * round
            assert torch.allclose(found[0][name].double(), value.detach(), rtol=1e-6, atol=scale * 0.05)
        for one, other in pairwise(common(replicas, "slow", "momentum")):
            assert one == other


def test_sync_is_one_step_on_all_microbatches() -> None:
    """One replica served two microbatches, one served one, and one none: they take the step of a batch of three."""
    replicas = replicas_of(rule="sync")
    alone = make_stages(make_manifest(dtype="float32"), "alone")
    for step in range(3):
        for number, peer in enumerate(("a", "a", "b")):
            identity = microbatch(3 * step + number)
            batch = make_batch(7 * step + number, ignored=number)
            run_microbatch(replicas[peer], batch, identity)
            run_microbatch(alone, batch, identity)
        meet(replicas, step + 1)
        norms = [stage.inner_step(make_label(step + 1)).grad_norm for stages in replicas.values() for stage in stages]
        expected = [stage.inner_step(make_label(step + 1)).grad_norm for stage in alone]
        assert norms == pytest.approx(expected * len(PEERS), rel=1e-5)
        theirs = weights(alone)
        for one, other in pairwise(common(replicas, "fast", "adam_mean", "adam_square")):
            assert one == other
        for name, theta in weights(replicas["c"]).items():
            assert torch.allclose(theta, theirs[name], rtol=1e-4, atol=1e-6)


def test_a_difference_shows_in_the_digest() -> None:
    for rule, kind in (("diloco", "slow"), ("sync", "fast")):
        stages = [of_peer[0] for of_peer in replicas_of(rule=rule).values()]
        snapshots = [stage.snapshot(1, 1) for stage in stages]
        digests = [frozen.view.digest for frozen in snapshots if frozen.view is not None]
        assert stages[0].encode(snapshots[0], SnapshotRequest(0), "b").view == snapshots[0].view
        assert len(digests) == 3
        assert len(set(digests)) == 1
        changed = stages[1]._outer.kinds["slow"] if kind == "slow" else stages[1].parameters
        with torch.no_grad():
            next(iter(changed.values())).view(-1)[0] += 1e-6
        view = stages[1].snapshot(1, 1).view
        assert view is not None
        assert view.digest != digests[0]


@pytest.mark.parametrize("tokens", [-1.0, 0.5])
def test_gradients_that_are_too_large_or_of_an_invalid_number_of_tokens_are_refused(tokens: float) -> None:
    stages = [of_peer[0] for of_peer in replicas_of(rule="sync").values()]
    mine, theirs = (stage.snapshot(1, 1) for stage in stages[:2])
    request = SnapshotRequest(0)
    sent = stages[1].encode(theirs, request, "a")
    assert stages[0].decode(mine, request, sent).peer == "b"
    run = stages[0]._manifest
    most = 1024.0 * run.microbatches_per_step * run.microbatch_size * run.sequence_length
    for value in (most, -1.001 * most):
        sent.tensors[0].data.cast("f")[0] = value
        with nullcontext() if value == most else pytest.raises(Violation, match="the limit is"):
            stages[0].decode(mine, request, sent)
    sent.tensors[0].data.cast("f")[-1] = tokens
    with pytest.raises(Violation, match="tokens"):
        stages[0].decode(mine, request, sent)


def test_a_replica_without_tokens_of_its_own_accepts_the_gradients_of_many() -> None:
    stages, others = (of_peer for of_peer in list(replicas_of(rule="sync").values())[:2])
    for number in range(65):
        run_microbatch(others, make_batch(number, ignored=0), microbatch(number))
    for stage, other in zip(stages, others, strict=True):
        request = SnapshotRequest(stage.state.index)
        theirs = stage.decode(stage.snapshot(1, 1), request, other.encode(other.snapshot(1, 1), request, "a"))
        stage.merge(stage.snapshot(1, 1), [theirs])
        assert stage.inner_step(make_label(1)).grad_norm == other.inner_step(make_label(1)).grad_norm > 0
