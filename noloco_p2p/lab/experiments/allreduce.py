"""Models of all-reduces on the simulator's links: how long N nodes that start together take to average a vector.

A message of b bytes arrives after a latency, drawn for each message, plus b / speed. Messages that enter or leave one
node at the same time share its speed, which is the same in both directions. Every model returns the time until the last
node has the mean, in seconds. What precedes an all-reduce, such as matchmaking, is not included. N is a power of two.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noloco_p2p.core.seeds import generator

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wire:
    """The properties of the links."""

    latency_s: float
    """Mean one-way latency, seconds."""
    std_over_mean: float
    """Standard deviation of the log-normal latency divided by its mean; 0: constant."""
    vector_s: float = 0.0
    """Time that one vector takes through the access of an otherwise idle node, seconds."""

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm of the latency: std/mean = sqrt(exp(σ²) − 1)."""
        return math.sqrt(math.log1p(self.std_over_mean**2))

    @property
    def median_s(self) -> float:
        """Median latency: mean · exp(−σ²/2)."""
        return self.latency_s * math.exp(-(self.sigma**2) / 2)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Times:
        """Random latencies, seconds."""
        return self.median_s * np.exp(self.sigma * rng.standard_normal(shape))


def dice(seed: int, *purpose: str | int) -> np.random.Generator:
    """A new random generator that depends only on the arguments."""
    return np.random.default_rng(generator(seed, *purpose).getrandbits(64))


def exchange_s(wire: Wire, rng: np.random.Generator) -> float:
    """The paper's pair: both send one vector to each other at the same time; the later arrival counts."""
    return float(wire.draw(rng, (2,)).max()) + wire.vector_s


def tree_s(wire: Wire, nodes: int, rng: np.random.Generator) -> float:
    """The paper's tree: log2 N levels. A parent waits for two messages, and sends two on the way down.

    Without spread: 2·log2 N·(latency + 2·vector). With log-normal latency it gives the ratios of the paper's figure 5
    (tests). Its inner vertices are separate nodes here.
    """
    at = np.zeros(nodes)
    while len(at) > 1:
        arrived = at + wire.draw(rng, at.shape) + 2 * wire.vector_s
        at = np.maximum(arrived[0::2], arrived[1::2])
    while len(at) < nodes:
        sent = np.repeat(at, 2)
        at = sent + wire.draw(rng, sent.shape) + 2 * wire.vector_s
    return float(at.max())


def binomial_tree_s(wire: Wire, nodes: int, rng: np.random.Generator) -> float:
    """A tree of N nodes: in each turn, half of the remaining nodes send to the other half; then the same in reverse.

    Without spread: 2·log2 N·(latency + vector).
    """
    at = np.zeros(nodes)
    while len(at) > 1:
        receivers, senders = np.split(at, 2)
        at = np.maximum(receivers, senders + wire.draw(rng, senders.shape) + wire.vector_s)
    # A sender's next message leaves once the previous one has left: after `vector_s`, not after its latency.
    out = at.copy()
    while len(at) < nodes:
        got = out + wire.vector_s + wire.draw(rng, out.shape)
        at, out = np.concatenate([at, got]), np.concatenate([out + wire.vector_s, got])
    return float(at.max())


def ring_s(wire: Wire, nodes: int, rng: np.random.Generator) -> float:
    """2·(N − 1) turns: each node passes on the part of 1/N of the vector that it received in the previous turn.

    Without spread: 2·(N − 1)·(latency + vector/N). Messages on one link keep their order.
    """
    part_s = wire.vector_s / nodes
    got, out = np.zeros(nodes), np.zeros(nodes)
    for _ in range(2 * (nodes - 1)):
        out = np.maximum(got, out) + part_s
        got = np.maximum(got, np.roll(out + wire.draw(rng, out.shape), 1))
    return float(got.max())


def butterfly_s(wire: Wire, nodes: int, rng: np.random.Generator) -> float:
    """As in hivemind: each node sends part j of its vector to node j, which averages it and sends it back to all.

    Without spread: 2·(latency + vector·(N − 1)/N). hivemind, averaging/allreduce.py; Ryabinin et al. 2021, arXiv
    2103.03239. The parts have equal size here, because the nodes are equally fast.
    """
    others_s = wire.vector_s * (nodes - 1) / nodes
    return float(_all_to_all(_all_to_all(np.zeros(nodes), wire, rng) + others_s, wire, rng).max() + others_s)


def _all_to_all(at: Times, wire: Wire, rng: np.random.Generator) -> Times:
    """When each node has the messages that all others sent at their times, without transfer times. O(N²) draws."""
    arrived = at[:, None] + wire.draw(rng, (len(at), len(at)))
    np.fill_diagonal(arrived, at)
    return np.asarray(arrived.max(axis=0))
