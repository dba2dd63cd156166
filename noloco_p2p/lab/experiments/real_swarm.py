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
from noloco_p2p.lab.experiments.instrumented_stage import Observed, Watch
from noloco_p2p.lab.experiments.run_summary import merged_loss, told, torch_stage
from noloco_p2p.lab.experiments.training import CONFIG, Trained, Training
from noloco_p2p.sim.process import Outcome
from noloco_p2p.sim.world import SimPlan, SimSwarm, peer_id

STEP_LIMIT_S = 100.0
"""Virtual seconds for each step of the clock after which a run is taken to hang."""


class Streams:
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
        """See `ports.Batches`; for information only, nobody goes on from it."""
        return {"position": self._position}

    def close(self) -> None:
        """See `ports.Batches`."""


@cache
def corpus(tokenizer: str, vocabulary: int) -> Corpus:
    """The standard library's text; looked up once in a process."""
    return stdlib_corpus(load_tokenizer(tokenizer, None, vocabulary))


@dataclass(frozen=True, slots=True)
class Lived:
    """A run that has ended."""

    plan: Training
    """With the manifest as the nodes had it."""
    watch: Watch
    outcome: Outcome
    held_out: Sequence[Batch]

    def told(self) -> Trained:
        """What is reported of it."""
        return told(self.plan, self.watch, self.outcome, self.held_out)


def live(plan: Training) -> Lived:
    """Run a swarm to its end; errors as `training.train`."""
    set_threads(1)
    changes = {"seed": plan.seed, "stages": len(plan.replicas), "start_replicas": min(plan.replicas)}
    manifest = RunManifest.model_validate(plan.manifest.model_dump() | changes)
    plan = replace(plan, manifest=manifest)
    watch = Watch(plan)
    text = corpus(manifest.data.tokenizer, int(str(manifest.model.config["vocab_size"])))
    held_out = SampleStream(text, manifest, "").validation()
    first = [peer_id(0, replica) for replica in range(plan.replicas[0])]
    streams = range(len(first)) if plan.streams is None else plan.streams

    def make_stage(manifest: RunManifest, index: int, peer: PeerId) -> Observed:
        return Observed(make_torch_stage(manifest, index, peer, audit_dir=plan.audit_dir, self_test=False), watch, peer)

    def make_batches(manifest: RunManifest, peer: PeerId, cursor: Mapping[str, object] | None) -> Streams:
        mine = streams[first.index(peer) :: len(first)]
        return Streams([SampleStream(text, manifest, peer_id(0, stream)) for stream in mine], held_out)

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
    return Lived(plan, watch, SimSwarm(swarm).run(STEP_LIMIT_S * (10 + manifest.steps)), held_out)


def live_apart(plan: Training, streams: Sequence[int]) -> tuple[list[Trained], float]:
    """Every data stream in a swarm of its own, of one replica of each stage: what is told of each, and the held-out
    loss of the one model whose weights are their mean."""
    one_each = (1,) * len(plan.replicas)
    lived = [live(replace(plan, replicas=one_each, streams=(stream,))) for stream in streams]
    every = [one.told() for one in lived]
    stages = [[torch_stage(node) for one in lived for node in one.outcome.of_stage(s)] for s in range(len(one_each))]
    return every, merged_loss(stages, lived[0].held_out)
