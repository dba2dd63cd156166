"""Maps ports 5001 and 5009 at the home router, renews and removes the mappings; prints addresses, or why not, and
finally on standard error by how many MiB the process has grown at most.

`port_mapping_once.py [seconds]`: how long the router has to map a port, and to remove the mappings.
"""

import asyncio
import re
import sys
from pathlib import Path

from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht import port_mapping
from noloco_p2p.io.dht.port_mapping import HomeRouter

PORTS = 5001, 5009


def in_status(name: str) -> int:
    """A size of this process in `/proc`, MiB."""
    [kib] = re.findall(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) >> 10


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
    before = in_status("VmRSS")
    asyncio.run(main())
    sys.stderr.write(f"{in_status('VmHWM') - before}\n")
