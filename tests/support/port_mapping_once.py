"""Has ports 5001 and 5009 mapped by the home router, renews that, and gives it back; prints the places, or why not."""

import asyncio
import sys

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.port_mapping import HomeRouter


async def main() -> None:
    router = HomeRouter()
    try:
        for port in (5001, 5009, 5001):
            host, outside = await router.map(port)
            sys.stdout.write(f"{port} at {host}:{outside}\n")
    except Unreachable as error:
        sys.stdout.write(f"{error}\n")
    await router.end()
    await router.end()


if __name__ == "__main__":
    asyncio.run(main())
