"""Scores of exported models: results on the made tasks, and how far the replicas' predictions differ.

Shape legend: R replicas, B rows or items, C choices, T sequence, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from noloco_p2p.compute import host_tensor
from noloco_p2p.compute.exported_model import ExportedModel
from noloco_p2p.compute.stage import IGNORED
from noloco_p2p.core.messages import Batch
from noloco_p2p.io.data.tokenizers import Tokenizer
from noloco_p2p.lab.made_tasks import CHOICES, TaskItem
from noloco_p2p.launch import export
from noloco_p2p.launch.examples import example, padded

ITEMS = 16
"""Number of items scored at once, with all their choices."""


def task_scores(directory: Path, tasks: Mapping[str, Sequence[TaskItem]]) -> dict[str, dict[str, float]]:
    """For each task the share of items that an exported model gets right: `exact`, by greedy decoding, and `choice`, if
    the completion is the likeliest choice. The end of text counts in both."""
    manifest, _ = export.read_record(directory)
    tokenizer, model = export.exported_tokenizer(manifest, directory), ExportedModel.load(directory, "cpu")
    found = {}
    for task, items in tasks.items():
        scores = [
            one for at in range(0, len(items), ITEMS) for one in _scores(model, tokenizer, items[at : at + ITEMS])
        ]
        exact, choice = zip(*scores, strict=True)
        found[task] = {"exact": fmean(exact), "choice": fmean(choice)}
    return found


@torch.no_grad()
def _scores(model: ExportedModel, tokenizer: Tokenizer, items: Sequence[TaskItem]) -> list[tuple[bool, bool]]:
    """(exact, choice) of each item."""
    batch = padded([example(tokenizer, item.prompt, choice) for item in items for choice in item.choices])
    logits_BTV, targets_BT = model.logits(batch), host_tensor.to_torch(batch.targets).long()
    counted_BT = targets_BT != IGNORED
    # Greedy decoding yields a text if and only if each of its ids is the likeliest after those before it.
    greedy_BC = ((logits_BTV.argmax(-1) == targets_BT) | ~counted_BT).all(1).view(-1, CHOICES)
    chances_BT = logits_BTV.log_softmax(-1).gather(2, targets_BT.clamp(min=0)[:, :, None])[:, :, 0]
    likeliest_B = (chances_BT * counted_BT).sum(1).view(-1, CHOICES).argmax(1)
    return [(bool(greedy_BC[row, one.answer]), int(likeliest_B[row]) == one.answer) for row, one in enumerate(items)]


@torch.no_grad()
def replica_divergence(directories: Sequence[Path], batches: Sequence[Batch]) -> float:
    """Jensen-Shannon divergence of two replicas' next-token distributions in nats, the mean over all pairs and
    positions: from 0, if they are equal, to ln 2 (Lin 1991, "Divergence measures based on the Shannon entropy").

    Raises ValueError if there are fewer than two replicas.
    """
    models = [ExportedModel.load(directory, "cpu") for directory in directories]
    found = []
    for batch in batches:
        chances_RBTV = [model.logits(batch).double().softmax(-1) for model in models]
        found += [
            float(_entropy((p + q) / 2) - (_entropy(p) + _entropy(q)) / 2) for p, q in combinations(chances_RBTV, 2)
        ]
    return fmean(found)


def _entropy(chances_BTV: Tensor) -> Tensor:
    """Entropy of the distributions in nats, the mean over positions."""
    entropy: Tensor = torch.special.entr(chances_BTV).sum(-1).mean()
    return entropy
