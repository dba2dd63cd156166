"""For how many bodies a node asks for places at once: for what its line can send soon, and no more.

A place that has been granted is held until its body is there, and an inner step waits for it. A slow line that asked
for all of its bodies at once would hold up every replica of the next stage (ARCHITECTURE.md, "Admission").
"""

from collections.abc import Callable

from noloco_p2p.core import routing
from noloco_p2p.core.messages import MicrobatchId
from noloco_p2p.core.status import Resource, for_microbatch
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


class Asking:
    """The bodies of one node for which places have been asked, and that have not left."""

    def __init__(self, node: NodeState, transport: Transport) -> None:
        self._node = node
        self._transport = transport
        self._asked: dict[object, None] = {}
        self._gone = 0
        """How many have left, or never will."""

    def may_ask(self) -> bool:
        """Ask for one more; always where the policy names the replica: a later body may be the one that it waits for.

        Nor does a node wait that leaves.
        """
        node = self._node
        return (
            node.manifest.routing not in routing.FREE
            or node.draining
            or self._transport.line.asks_for(len(self._asked))
        )

    async def until_may_ask(self, microbatch: MicrobatchId, longest_s: float) -> bool:
        """Wait for the bodies that go before; False: none of them has left for `longest_s`."""
        why = for_microbatch(microbatch)
        while not self.may_ask():
            gone = self._gone
            if not await self._node.waits.until(
                lambda gone=gone: self._gone > gone or self.may_ask(),  # type: ignore[misc]
                "line",
                Resource.LINE,
                longest_s,
                why=why,
            ):
                return False
        return True

    def begin(self) -> Callable[[], None]:
        """One more is asked for; call what this returns when it has left or never will, once or more often."""
        key = object()
        self._asked[key] = None

        def left() -> None:
            if self._asked.pop(key, key) is None:
                self._gone += 1
                self._node.waits.pulse()

        return left
