"""A simulated swarm with real stages and real data, from its plan to the summary of its results."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean

import torch

from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.hardware import set_threads
from noloco_p2p.compute.stage import TorchStage
from noloco_p2p.config import AuditSettings, RunManifest
from noloco_p2p.core.messages import ITEM_BYTES, Batch, HostTensor, LossSum, PeerId
from noloco_p2p.core.seeds import generator
from noloco_p2p.io.data.corpora import Corpus, stdlib_corpus
from noloco_p2p.io.data.samples import SampleStream, StreamPosition
from noloco_p2p.io.data.tokenizers import load_tokenizer
from noloco_p2p.lab.experiments.instrumented_stage import InstrumentedStage, TrainingMonitor
from noloco_p2p.lab.experiments.training import TrainingPlan, TrainingSummary
from noloco_p2p.launch import export
from noloco_p2p.launch.collection import CollectedReplica, CollectedWeights
from noloco_p2p.sim.process import Outcome, SimProcess
from noloco_p2p.sim.world import SimSwarm, peer_id

STEP_LIMIT_S = 100.0
"""Virtual seconds per step of the clock after which a run counts as hanging."""


class StreamBatches:
    """The Batches port without a thread: `source` returns the microbatch at each position, from 0."""

    def __init__(self, source: Callable[[int], Batch], validation: Sequence[Batch]) -> None:
        self._source = source
        self._validation = validation
        self._position = 0

    async def next(self) -> Batch:
        """See `ports.Batches`."""
        self._position += 1
        return self._source(self._position - 1)

    def validation(self) -> Iterator[Batch]:
        """See `ports.Batches`."""
        return iter(self._validation)

    @property
    def cursor(self) -> dict[str, object]:
        """See `ports.Batches`. For information only: no run continues from it."""
        return {"position": self._position}

    def close(self) -> None:
        """See `ports.Batches`."""


class DealtStreams:
    """The microbatches of all data streams, and which of them a stage-0 replica reads."""

    def __init__(self, plan: TrainingPlan, streams: Sequence[SampleStream]) -> None:
        self._plan = plan
        self._sources = [stream.batches(StreamPosition()) for stream in streams]
        self._read: list[list[Batch]] = [[] for _ in streams]

    def at(self, replica: int, position: int) -> Batch:
        """The microbatch that a replica reads at this position, from 0: it reads from its streams in turn."""
        replicas, order = self._plan.replicas[0], list(range(len(self._sources)))
        turn, part = divmod(position, len(order[replica::replicas]))
        if self._plan.mixed:
            generator(self._plan.seed, "dealt streams", turn).shuffle(order)
        stream = order[replica + part * replicas]
        read = self._read[stream]
        while len(read) <= turn:
            read.append(next(self._sources[stream])[0])
        return read[turn]


@cache
def corpus(tokenizer: str, vocabulary: int) -> Corpus:
    """The standard library's text, loaded once per process."""
    return stdlib_corpus(load_tokenizer(tokenizer, None, vocabulary))


def train(plan: TrainingPlan) -> TrainingSummary:
    """Run a swarm to its end. Deterministic on one machine.

    Raises ConfigError if the model or data do not fit, LocalError if a node stops because ten results in a row were not
    finite, and Deadlock if the run hangs.
    """
    return _run(plan).summary()


def train_and_export(plan: TrainingPlan, directory: Path) -> TrainingSummary:
    """`train`, and export the mean over the replicas and every single replica, as `noloco export` does."""
    done = _run(plan)
    manifest, last = done.plan.manifest, -(-plan.manifest.steps // plan.manifest.outer.inner_steps)
    stages = tuple(
        tuple(CollectedReplica(node.peer, stage, last, manifest.steps, _torch_stage(node).parameters) for node in nodes)
        for stage, nodes in enumerate(done.stages)
    )
    directory.mkdir(parents=True)
    export.write(CollectedWeights(manifest.run_id, manifest, last, stages), directory, "mean", None, True)
    return done.summary()


def train_apart(plan: TrainingPlan, streams: Sequence[int]) -> tuple[list[TrainingSummary], float]:
    """Train on every data stream in a separate swarm with one replica per stage. Returns their summaries, and the
    held-out loss of the model whose weights are their mean."""
    runs = [_run(replace(plan, replicas=(1,) * len(plan.replicas), streams=(stream,))) for stream in streams]
    summaries = [one.summary() for one in runs]
    together = zip(*(one.stages for one in runs), strict=True)
    return summaries, _merged_loss([[node for nodes in same for node in nodes] for same in together], runs[0].held_out)


def train_and_recode(plan: TrainingPlan, codecs: Sequence[str]) -> tuple[TrainingSummary, dict[str, float]]:
    """A run with one replica per stage, and the held-out loss of its weights with hidden states in other codecs."""
    done = _run(plan)
    losses: dict[str, float] = {}
    for codec in codecs:
        fields = done.plan.manifest.model_dump() | {"wire": {"forward": codec, "backward": codec}}
        manifest = RunManifest.model_validate(fields)
        stages = [make_torch_stage(manifest, index, codec, self_test=False) for index in range(manifest.stages)]
        for stage, (node,) in zip(stages, done.stages, strict=True):
            _set_mean(stage, [_torch_stage(node)])
        losses[codec] = _held_out_loss(stages, done.held_out)
    return done.summary(), losses


def train_by_kind(plan: TrainingPlan) -> tuple[TrainingSummary, list[list[float]]]:
    """`train`, and for each of the plan's corpora the final held-out loss of every replica, together with the replicas
    of the same number in later stages."""
    done = _run(plan)
    part = len(done.held_out) // len(plan.corpora)
    parts = [done.held_out[at : at + part] for at in range(0, len(done.held_out), part)]
    replicas = [[_torch_stage(node) for node in nodes] for nodes in zip(*done.stages, strict=True)]
    losses = [[_held_out_loss(stages, kind) for kind in parts] for stages in replicas]
    return done.summary(), losses  # in this order: the summary replaces the weights of the first replicas by the mean


def _run(plan: TrainingPlan) -> "FinishedTraining":
    set_threads(1)
    changes = {"seed": plan.seed, "stages": len(plan.replicas), "start_replicas": min(plan.replicas)}
    manifest = RunManifest.model_validate(plan.manifest.model_dump() | changes)
    plan = replace(plan, manifest=manifest)
    monitor = TrainingMonitor(plan)
    texts = plan.corpora or (corpus(manifest.data.tokenizer, int(str(manifest.model.config["vocab_size"]))),)
    part = manifest.evaluation.microbatches // len(texts)
    held_out = [batch for text in texts for batch in SampleStream(text, manifest, "").validation()[:part]]
    first = [peer_id(0, replica) for replica in range(plan.replicas[0])]
    streams = range(len(first)) if plan.streams is None else plan.streams
    read = [SampleStream(texts[stream % len(texts)], manifest, peer_id(0, stream)) for stream in streams]
    dealt = DealtStreams(plan, read)

    def make_stage(manifest: RunManifest, index: int, peer: PeerId) -> InstrumentedStage:
        stage = make_torch_stage(manifest, index, peer, audit=AuditSettings(dir=plan.audit_dir), self_test=False)
        return InstrumentedStage(stage, monitor, peer)

    def make_batches(manifest: RunManifest, peer: PeerId, cursor: Mapping[str, object] | None) -> StreamBatches:
        return StreamBatches(partial(dealt.at, first.index(peer)), held_out)

    swarm = SimSwarm(replace(plan, stage_factory=make_stage, batches_factory=make_batches))
    return FinishedTraining(plan, monitor, swarm.run(STEP_LIMIT_S * (10 + manifest.steps)), held_out)


@dataclass(frozen=True, slots=True)
class FinishedTraining:
    """A training run that has ended."""

    plan: TrainingPlan
    """The plan, with the manifest that the nodes used."""
    monitor: TrainingMonitor
    outcome: Outcome
    held_out: Sequence[Batch]

    @property
    def stages(self) -> list[list[SimProcess]]:
        """The nodes of each stage, sorted by peer."""
        return [self.outcome.of_stage(stage) for stage in range(len(self.plan.replicas))]

    def summary(self) -> TrainingSummary:
        """The summary for reports."""
        monitor, trace, stages, ended_at_s = self.monitor, self.outcome.trace, self.stages, self.outcome.ended_at_s
        loads = {node.peer: monitor.served[node.peer] for nodes in stages for node in nodes}
        rounds = [(one, (one.peer, int(one.number("round"))) in monitor.lost) for one in trace.of("outer_round")]
        results = Counter("lost" if lost else str(event.get("result")) for event, lost in rounds)
        evaluations = [trace.of("evaluation", node.peer) for node in stages[0]]
        steps = self._inner_steps()
        return TrainingSummary(
            final_losses=tuple(found[-1].number("loss") for found in evaluations),
            merged_loss=_merged_loss(stages, self.held_out),
            training=tuple((step, loss_sum / tokens) for step, (loss_sum, tokens) in sorted(steps.items()) if tokens),
            spreads=tuple(spread for _, spread in sorted(monitor.spreads.items())),
            parameters=tuple(_torch_stage(nodes[0]).state.parameters for nodes in stages),
            tokens=int(sum(tokens for _, tokens in steps.values())),
            bytes={
                **self._bytes_between_stages(loads),
                "snapshot": sum(int(event.number("bytes")) for event, lost in rounds if not lost),
            },
            rounds=dict(sorted(results.items())),
            asked_again=sum(int(str(event.get("asked_again") or 0)) for event, _ in rounds),
            delays=tuple(sorted(Counter(int(str(event.get("trained") or 0)) for event, _ in rounds).items())),
            load=loads,
            uneven=tuple(
                max(load) / fmean(load) for load in ([loads[node.peer] for node in nodes] for nodes in stages)
            ),
            waiting=tuple(fmean(_waiting(node, ended_at_s) for node in nodes) for nodes in stages),
        )

    def _inner_steps(self) -> dict[int, tuple[float, float]]:
        """Summed loss and tokens of all stage-0 replicas, by number of the inner step."""
        sums: dict[int, tuple[float, float]] = {}
        first = {node.peer for node in self.stages[0]}
        for event in self.outcome.trace.of("inner_step"):
            if event.peer in first:
                step = int(event.number("inner_step"))
                loss_sum, tokens = sums.get(step, (0.0, 0.0))
                sums[step] = loss_sum + event.number("loss_sum"), tokens + event.number("tokens")
        return sums

    def _bytes_between_stages(self, loads: Mapping[PeerId, int]) -> dict[str, int]:
        state = _torch_stage(self.stages[0][0]).state
        targets = ITEM_BYTES["int32"] * self.plan.manifest.microbatch_size * self.plan.manifest.sequence_length
        hops = sum(loads[node.peer] for nodes in self.stages[1:] for node in nodes)
        return {"activation": hops * (state.hidden.nbytes + targets), "gradient": hops * state.gradient.nbytes}


def _waiting(node: SimProcess, ended_at_s: float) -> float:
    """Number of microbatches waiting for admission, averaged over the time of the run."""
    total, since_s, value = 0.0, 0.0, 0.0
    for event in node.trace.of("gauge"):
        if event.get("name") == "waiting":
            total += value * (event.at_s - since_s)
            since_s, value = event.at_s, event.number("value")
    return (total + value * (ended_at_s - since_s)) / ended_at_s


def _merged_loss(stages: Sequence[Sequence[SimProcess]], held_out: Sequence[Batch]) -> float:
    """Held-out loss with the mean over each stage's replicas, which replaces the weights of the first replica."""
    replicas = [[_torch_stage(node) for node in nodes] for nodes in stages]
    for same in replicas:
        _set_mean(same[0], same)
    return _held_out_loss([same[0] for same in replicas], held_out)


@torch.no_grad()
def _set_mean(stage: TorchStage, replicas: Sequence[TorchStage]) -> None:
    for name, theta in stage.parameters.items():
        theta.copy_(torch.stack([replica.parameters[name].double() for replica in replicas]).mean(0))


def _held_out_loss(stages: Sequence[TorchStage], held_out: Sequence[Batch]) -> float:
    loss_sum, tokens = 0.0, 0
    for batch in held_out:
        value: HostTensor | LossSum = batch.inputs
        for stage in stages:
            assert isinstance(value, HostTensor), "only the last stage has a loss"
            value = stage.evaluate(value, batch.targets, batch.mask)
        assert isinstance(value, LossSum), "the last stage has the loss"
        loss_sum, tokens = loss_sum + value.loss_sum, tokens + value.tokens
    return loss_sum / tokens


def _torch_stage(node: SimProcess) -> TorchStage:
    """The real stage of a node in its final state."""
    assert isinstance(node.model, InstrumentedStage), "every stage of the run is instrumented"
    return node.model.stage
