"""Finds out how others reach a node when it starts (ARCHITECTURE.md, "Reachability"), and sets up what it relays."""

from contextlib import AsyncExitStack

from noloco_p2p.config import ListenSettings, NodeConfig
from noloco_p2p.core.line_cap import BYTES_PER_MBIT
from noloco_p2p.io.dht import join_handshake as joining
from noloco_p2p.io.dht.addresses import from_here
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.io.dht.reach import joined
from noloco_p2p.io.dht.relay_service import MemberRelay
from noloco_p2p.io.dht.streams import Streams
from noloco_p2p.io.dht.ways_in import WaysIn
from noloco_p2p.io.transport.grpc_transport import GrpcTransport
from noloco_p2p.launch.run_key import Standing

RELAYED_SHARE = 0.05
"""The share of its line that a member uses for relaying."""
UNMEASURED_MBIT_PER_S = 100.0
"""The assumed upload rate of a line that has neither been measured nor capped."""
NOT_HERE = "not through this node, which others cannot dial; use the address of another node"
"""Printed in place of a join address by a node that others cannot dial."""


def open_streams(closing: AsyncExitStack, libp2p: Libp2pDaemon, run_id: str, standing: Standing) -> Streams:
    """Open the streams over a node's links; `closing` closes them."""
    members = standing.records
    streams = Streams(libp2p, run_id, lambda: "" if members is None else members.certificate)
    closing.push_async_callback(streams.close)
    standing.links.streams = streams
    return streams


async def find(libp2p: Libp2pDaemon, streams: Streams, listen: ListenSettings, host: str, port: int) -> WaysIn | None:
    """How others reach this node, whose gRPC server listens as in `listen`; None if at `host` and `port`, as announced.

    Raises LocalError if they cannot reach it at all.
    """
    ways = WaysIn(libp2p, streams, (from_here(listen.host).strip("[]"), port), joined(host, port))
    if await joining.check_reachable(libp2p, joined(host, port), ways):
        return None
    libp2p.ways = ways.addresses
    await ways.find_relays()
    return ways


def relay(
    libp2p: Libp2pDaemon, run_id: str, standing: Standing, transport: GrpcTransport, local: NodeConfig
) -> MemberRelay | None:
    """The relay of this node, at the rate in its settings or, in a members-only run, at a share of its line.

    None if it relays nothing.
    """
    given, most = local.limits.relay_mbit_per_s, local.limits.upload_mbit_per_s or UNMEASURED_MBIT_PER_S
    if given == 0 or (given is None and standing.records is None):
        return None

    def bytes_per_s() -> float:
        if given is not None:
            return given * BYTES_PER_MBIT
        return RELAYED_SHARE * (transport.line.up.bytes_per_s or most * BYTES_PER_MBIT)

    return MemberRelay(libp2p, run_id, standing.records, bytes_per_s)
