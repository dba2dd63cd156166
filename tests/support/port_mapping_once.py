"""Has port 5001 mapped by the home router, renews that, and gives it back; prints the addresses, or why not."""

import asyncio
import sys

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.port_mapping import PortMapping


async def main() -> None:
    mapping = PortMapping(5001)
    try:
        for _ in range(2):
            await mapping.renew()
            sys.stdout.write(f"{mapping.address}\n")
    except Unreachable as error:
        sys.stdout.write(f"{error}\n")
    await mapping.end()
    assert mapping.address == ""


if __name__ == "__main__":
    asyncio.run(main())
