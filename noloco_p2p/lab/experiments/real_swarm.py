"""A simulated swarm with real stages and real data, from its plan to what came of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle

from noloco_p2p.compute.factory import make_torch_stage
from noloco_p2p.compute.hardware import set_threads
from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, PeerId
from noloco_p2p.io.data.corpora import Corpus, stdlib_corpus
from noloco_p2p.io.data.samples import SampleStream, StreamPosition
from noloco_p2p.io.data.tokenizers import load_tokenizer
from noloco_p2p.lab.experiments.instrumented_stage import InstrumentedStage, TrainingMonitor
from noloco_p2p.lab.experiments.run_summary import merged_loss, summarise, torch_stage
from noloco_p2p.lab.experiments.training import CONFIG, TrainingPlan, TrainingSummary
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

STEP_LIMIT_S = 100.0
"""Virtual seconds for each step of the clock after which a run is taken to hang."""


class StreamBatches:
    """The Batches port without a thread: microbatches of several streams in turn."""

    def __init__(self, streams: Sequence[SampleStream], validation: Sequence[Batch]) -> None:
        self._streams = cycle([stream.batches(StreamPosition()) for stream in streams])
        self._validation = validation
        self._position = 0

    async def next(self) -> Batch:
        """See `ports.Batches`."""
        self._position += 1
        return next(next(self._streams))[0]

    def validation(self) -> Iterator[Batch]:
        """See `ports.Batches`."""
        return iter(self._validation)

    @property
    def cursor(self) -> dict[str, object]:
        """See `ports.Batches`; for information only, no run continues from it."""
        return {"position": self._position}

    def close(self) -> None:
        """See `ports.Batches`."""


@cache
def corpus(tokenizer: str, vocabulary: int) -> Corpus:
    """The standard library's text; looked up once in a process."""
    return stdlib_corpus(load_tokenizer(tokenizer, None, vocabulary))


@dataclass(frozen=True, slots=True)
class FinishedTraining:
    """A run that has ended."""

    plan: TrainingPlan
    """With the manifest as the nodes had it."""
    monitor: TrainingMonitor
    outcome: Outcome
    held_out: Sequence[Batch]

    def summary(self) -> TrainingSummary:
        """What is reported of it."""
        return summarise(self.plan, self.monitor, self.outcome, self.held_out)


def train(plan: TrainingPlan) -> TrainingSummary:
    """Run a swarm to its end. Deterministic on one machine.

    Raises ConfigError for a model or data that do not fit, LocalError when a node stops because ten results in a row
    were not finite, Deadlock when the run hangs.
    """
    return _run(plan).summary()


def train_apart(plan: TrainingPlan, streams: Sequence[int]) -> tuple[list[TrainingSummary], float]:
    """Every data stream in a swarm of its own, of one replica of each stage: their summaries, and the held-out loss of
    the one model whose weights are their mean."""
    one_each = (1,) * len(plan.replicas)
    runs = [_run(replace(plan, replicas=one_each, streams=(stream,))) for stream in streams]
    summaries = [one.summary() for one in runs]
    stages = [[torch_stage(node) for one in runs for node in one.outcome.of_stage(s)] for s in range(len(one_each))]
    return summaries, merged_loss(stages, runs[0].held_out)


def _run(plan: TrainingPlan) -> FinishedTraining:
    set_threads(1)
    changes = {"seed": plan.seed, "stages": len(plan.replicas), "start_replicas": min(plan.replicas)}
    manifest = RunManifest.model_validate(plan.manifest.model_dump() | changes)
    plan = replace(plan, manifest=manifest)
    monitor = TrainingMonitor(plan)
    text = corpus(manifest.data.tokenizer, int(str(manifest.model.config["vocab_size"])))
    held_out = SampleStream(text, manifest, "").validation()
    first = [peer_id(0, replica) for replica in range(plan.replicas[0])]
    streams = range(len(first)) if plan.streams is None else plan.streams

    def make_stage(manifest: RunManifest, index: int, peer: PeerId) -> InstrumentedStage:
        return InstrumentedStage(
            make_torch_stage(manifest, index, peer, audit_dir=plan.audit_dir, self_test=False), monitor, peer
        )

    def make_batches(manifest: RunManifest, peer: PeerId, cursor: Mapping[str, object] | None) -> StreamBatches:
        mine = streams[first.index(peer) :: len(first)]
        return StreamBatches([SampleStream(text, manifest, peer_id(0, stream)) for stream in mine], held_out)

    swarm = SimPlan(
        manifest,
        plan.replicas,
        plan.seed,
        CONFIG,
        plan.link,
        costs=plan.costs,
        slowness=plan.slowness,
        stage_factory=make_stage,
        batches_factory=make_batches,
    )
    return FinishedTraining(plan, monitor, SimSwarm(swarm).run(STEP_LIMIT_S * (10 + manifest.steps)), held_out)
