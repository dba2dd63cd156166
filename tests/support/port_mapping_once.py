"""Maps ports 5001 and 5009 at the home router, renews and removes the mappings; prints addresses, or why not.

`port_mapping_once.py [seconds]`: how long the router has to map a port, and to remove the mappings.
"""

import asyncio
import sys

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht import port_mapping
from noloco_p2p.io.dht.port_mapping import HomeRouter

PORTS = 5001, 5009


async def main() -> None:
    router = HomeRouter()
    try:
        for port in PORTS:
            await router.map(port)
        await router.renew()
    except Unreachable as error:
        sys.stdout.write(f"{error}\n")
    sys.stdout.write(f"{[router.place(port) for port in PORTS]}\n")
    await router.end()
    assert router.place(PORTS[0]) is None
    await router.end()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        port_mapping.MAP_S = port_mapping.END_S = float(sys.argv[1])
    asyncio.run(main())
