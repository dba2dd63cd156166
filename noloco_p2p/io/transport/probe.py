"""Checks whether a node answers at an address that it claims as its own."""

import asyncio

from noloco_p2p.core.messages import PeerId
from noloco_p2p.errors import PeerError
from noloco_p2p.io.security.certificates import Role
from noloco_p2p.io.transport import callers
from noloco_p2p.io.transport.channels import OPTIONS, SERVICE, connect
from noloco_p2p.io.transport.grpc_errors import translated_errors
from noloco_p2p.io.transport.peer_links import Links, target


async def probe(address: str, peer_id: PeerId, links: Links, timeout_s: float, role: Role = "member") -> str | None:
    """Check that node `peer_id` of our run answers at `address` (see `Advert`). Returns None, or the reason why not."""
    try:
        dialled = await target(links, address, peer_id)
        async with links.channel(dialled, peer_id, OPTIONS, role) as channel, asyncio.timeout(timeout_s):
            if (reason := await connect(channel, timeout_s)) is not None:
                return reason
            give_up_at = asyncio.get_running_loop().time() + timeout_s
            with translated_errors(peer_id, "description", timeout_s, give_up_at):
                await channel.unary_unary(f"{SERVICE}/Describe")(b"", timeout=timeout_s, metadata=callers.metadata())
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except PeerError as error:
        return str(error)
    return None
