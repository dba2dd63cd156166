"""What the nodes of a run say together: its figures, under the definitions of `summary.json`."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_p2p.errors import ConfigError
from noloco_p2p.launch.node_probe import SUMMARY, read_json
from noloco_p2p.observe.report.journals import node_dirs, number
from noloco_p2p.observe.report.node_history import Note, Story, tell

MANIFEST = "manifest.json"
MOST_NOTES = 100
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class Run:
    """The nodes, sorted by stage and name, and what lies beside their journals."""

    stories: list[Story]
    manifest: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """What `noloco swarm` wrote at the end, when it counts the whole run; else empty."""

    @property
    def name(self) -> str:
        """What people call the run."""
        return next((story.run_name for story in self.stories if story.run_name), "run")

    @property
    def run_ids(self) -> list[str]:
        """One, unless directories of several runs were named."""
        return sorted({story.run_id for story in self.stories if story.run_id})

    @property
    def began_at(self) -> float:
        """Unix seconds of the first line of all."""
        return min(story.began_at for story in self.stories)

    @property
    def ended_at(self) -> float:
        """Unix seconds of the last line of all."""
        return max(story.ended_at for story in self.stories)

    @property
    def wall_s(self) -> float:
        """From the launcher's start to its end where it told; else from the first line to the last."""
        told = number(self.summary.get("wall_s"))
        return self.ended_at - self.began_at if told is None else told

    def of_stage(self, stage: int) -> list[Story]:
        """Those that held it last."""
        return [story for story in self.stories if story.stage == stage]

    @property
    def stages(self) -> list[int]:
        """Those that somebody held."""
        return sorted({story.stage for story in self.stories if story.stage is not None})

    @property
    def step(self) -> float:
        """How far the clock came."""
        return max(story.step for story in self.stories)

    @property
    def tokens(self) -> int:
        """Trained on, by all replicas of stage 0."""
        return sum(story.tokens for story in self.stories)

    @property
    def tokens_per_s(self) -> float | None:
        """While training. Evaluations are not counted where the launcher told."""
        told = number(self.summary.get("tokens_per_s"))
        if told is not None:
            return told
        began = [story.training_at for story in self.of_stage(0) if story.training_at is not None]
        ended = [story.stepped_at for story in self.of_stage(0) if story.stepped_at is not None]
        return self.tokens / (max(ended) - min(began)) if began and ended and max(ended) > min(began) else None

    @property
    def final_loss(self) -> float | None:
        """Of the last ten inner steps, mean over the replicas of stage 0, nats per token."""
        return _mean(story.final_loss for story in self.of_stage(0))

    @property
    def validation_loss(self) -> float | None:
        """Of the last evaluation, mean over the replicas of stage 0, nats per token."""
        return _mean(story.validation_loss for story in self.of_stage(0))

    @property
    def validation_perplexity(self) -> float | None:
        """exp of it, where that is a number."""
        loss = self.validation_loss
        return None if loss is None or not loss < LARGEST_EXPONENT else exp(loss)

    def replica_std(self, stage: int) -> float | None:
        """Of the last outer round, mean over the replicas of the stage."""
        return _mean(story.replica_std for story in self.of_stage(stage))

    def total(self, tally: str, stage: int | None = None) -> Counter[str]:
        """A tally over all nodes, or those of a stage."""
        found: Counter[str] = Counter()
        for story in self.stories:
            if stage is None or story.stage == stage:
                found.update(story.tallies[tally])
        return found

    def notes(self) -> list[Note]:
        """The newest of all nodes, newest first."""
        everything = sorted((note for story in self.stories for note in story.notes), reverse=True)
        return everything[:MOST_NOTES]


def read(asked: Sequence[Path]) -> Run:
    """The run whose directories these are. Raises ConfigError when there is no journal."""
    directories = node_dirs(asked)
    names = Counter(directory.resolve().name for directory in directories)
    stories: list[Story] = []
    manifest: dict[str, Any] = {}
    for directory in directories:
        place = directory.resolve()
        name = place.name if names[place.name] == 1 else f"{place.parent.name}/{place.name}"
        story = tell(directory, name)
        if story is not None:
            stories.append(story)
            manifest = manifest or read_json(directory / MANIFEST) or {}
    if not stories:
        raise ConfigError(f"no line of the journals in {', '.join(map(str, asked))} can be read; was the run started?")
    stories.sort(key=lambda story: (story.stage is None, story.stage or 0, story.name))
    return Run(stories, manifest, _summary(asked, stories))


def _summary(asked: Sequence[Path], stories: Sequence[Story]) -> dict[str, Any]:
    """The launcher's, when it is of this run and of nothing but it."""
    found = read_json(asked[0] / SUMMARY) if len(asked) == 1 else None
    if found is None or "nodes" not in found or found.get("resumed_from_step") is not None:
        return {}
    return found if all(len(story.processes) == 1 for story in stories) else {}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
