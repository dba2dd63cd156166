"""The Batches port without data: small integers from the manifest's seed. Shape legend: B microbatch, T sequence."""

import asyncio
import random
from array import array
from collections.abc import Iterator, Mapping

from noloco_p2p.config import RunManifest
from noloco_p2p.core.messages import Batch, HostTensor, PeerId
from noloco_p2p.core.seeds import generator

IGNORED = -100
"""The target of a position that does not count as a token (METHOD.md, "Inner step")."""


class SimBatches:
    """Microbatches determined by (seed, peer, position), and held-out ones determined by (seed, position).

    With `unequal`, some targets are ignored, so microbatches differ in their number of tokens, which is at least one.
    `cursor`: the position in another stream from which this one continues.
    """

    def __init__(
        self, manifest: RunManifest, me: PeerId, cursor: Mapping[str, object] | None = None, *, unequal: bool = False
    ) -> None:
        self._manifest = manifest
        self._me = me
        self._unequal = unequal
        self._position = int(str(cursor["position"])) if cursor else 0

    async def next(self) -> Batch:
        """See `ports.Batches`."""
        await asyncio.sleep(0)
        self._position += 1
        return self._make(generator(self._manifest.seed, "batch", self._me, self._position))

    def validation(self) -> Iterator[Batch]:
        """See `ports.Batches`."""
        for position in range(self._manifest.evaluation.microbatches):
            yield self._make(generator(self._manifest.seed, "held out", position))

    @property
    def cursor(self) -> dict[str, object]:
        """See `ports.Batches`."""
        return {"position": self._position}

    def close(self) -> None:
        """See `ports.Batches`. There is no thread to stop."""

    def _make(self, rng: random.Random) -> Batch:
        shape = (self._manifest.microbatch_size, self._manifest.sequence_length)
        vocabulary = int(str(self._manifest.model.config.get("vocab_size", 2)))
        inputs, targets = array("i"), array("i")
        for _ in range(shape[0]):
            sample = [rng.randrange(vocabulary) for _ in range(shape[1] + 1)]
            inputs.extend(sample[:-1])
            targets.extend(sample[1:])
        if self._unequal:
            for place in range(1, len(targets)):
                if rng.random() < 0.4:
                    targets[place] = IGNORED
        return Batch(_tensor("inputs", shape, inputs), _tensor("targets", shape, targets))


def _tensor(name: str, shape: tuple[int, int], values: "array[int]") -> HostTensor:
    return HostTensor(name, "int32", shape, memoryview(values.tobytes()))
