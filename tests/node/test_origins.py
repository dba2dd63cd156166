"""Under `balanced`: a replica does not wait forever for origins that have fallen silent."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from noloco_p2p.config import NodeConfig, RunManifest
from noloco_p2p.core.intake import AttemptKey
from noloco_p2p.core.messages import Advert, MicrobatchId, Origin
from noloco_p2p.node.membership import Membership
from noloco_p2p.node.pipeline.serve import MicrobatchServer
from noloco_p2p.node.state import NodeState
from noloco_p2p.sim import virtual_time


def test_an_origin_whose_microbatch_breaks_off_is_given_up_even_after_the_others() -> None:
    """One of two origins was silent; the other hung later, when all that was due had come. The step never ended."""

    async def scenario() -> None:
        manifest = RunManifest(routing="balanced", microbatches_per_step=2)
        me = Advert("me", manifest.run_id, 1, (), state="training")
        node = NodeState(me, manifest, NodeConfig(), cast(Any, SimpleNamespace(event=lambda *_, **__: None)))
        swarm = Membership(node)
        swarm.read([Advert(peer, manifest.run_id, 0, (), state="training") for peer in ("A", "B")])
        for peer in "AB":
            swarm.members.answered(peer)
        server = MicrobatchServer(node, swarm, cast(Any, None))
        assert server.may_open()
        server.open()
        of_b = [AttemptKey(MicrobatchId("B", 1, index), index) for index in range(2)]
        for index, key in enumerate(of_b):
            server.intake.offer(key, Origin("B", 0, index))
        step = asyncio.create_task(server.until_ready(lambda: False))
        await asyncio.sleep(700)
        assert server.intake.missing_origins == [], "A has been given up"
        for key in of_b:
            server.intake.leave(key)
        assert server.intake.missing_origins == ["B"]
        async with asyncio.timeout(1300):
            await step

    virtual_time.run(scenario(), limit_s=10_000)
