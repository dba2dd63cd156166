"""Limits for how many bodies a node asks for places at once: for what its line can send soon, and no more.

A granted place stays reserved until its body arrives, and an inner step waits for it. A node with a slow line that
asked for all its bodies at once would hold up every replica of the next stage (ARCHITECTURE.md, "A microbatch").
"""

from collections.abc import Callable

from noloco_p2p.core import routing
from noloco_p2p.core.messages import MicrobatchId
from noloco_p2p.core.status import Resource, for_microbatch
from noloco_p2p.node.state import NodeState
from noloco_p2p.ports import Transport


class Asking:
    """The bodies of one node for which a place has been requested, and that have not been sent yet."""

    def __init__(self, node: NodeState, transport: Transport) -> None:
        self._node = node
        self._transport = transport
        self._asked: dict[object, None] = {}
        self._ended = 0
        """How many bodies have been sent, or never will be."""

    def may_ask(self) -> bool:
        """Whether to request a place for one more body.

        Always if the policy names the replica, because a later body may be the one that it waits for, and always if
        this node is leaving.
        """
        limited = self._node.manifest.routing in routing.FREE and not self._node.draining
        return not limited or self._transport.line.asks_for(len(self._asked))

    async def until_may_ask(self, microbatch: MicrobatchId, longest_s: float) -> bool:
        """Wait for the bodies that go first. False if none of them has been sent within `longest_s`."""
        why = for_microbatch(microbatch)
        while not self.may_ask():

            def goes_on(ended: int = self._ended) -> bool:
                return self._ended > ended or self.may_ask()

            if not await self._node.waits.until(goes_on, "line", Resource.LINE, longest_s, why=why):
                return False
        return True

    def begin(self) -> Callable[[], None]:
        """Count one more body. Returns an idempotent function to call when the body was sent or never will be."""
        key = object()
        self._asked[key] = None

        def left() -> None:
            if self._asked.pop(key, key) is None:
                self._ended += 1
                self._node.waits.pulse()

        return left
