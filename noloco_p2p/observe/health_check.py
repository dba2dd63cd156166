"""`noloco-node health`: asks a running node on this machine whether it is healthy. For a container's HEALTHCHECK.

It runs every few seconds next to a node that needs the CPU, so nothing heavy is imported here.
"""

import http.client
from contextlib import closing, suppress
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from noloco_p2p.errors import ConfigError
from noloco_p2p.humanize import plain
from noloco_p2p.launch.node_probe import ENDPOINTS, HOME, read_json, written_at

ANSWER_S = 5.0
"""Longest wait for the answer, seconds."""
LONGEST_LINE = 1_000


def ask(directory: Path | None, url: str | None, home: Path = HOME) -> tuple[bool, str]:
    """Whether a node is healthy, and one line: `ok`, what is wrong with it, or why it cannot be asked.

    Asks the node at `url`; without one, the node of `directory`; without either, the newest node below `home`. Raises
    ConfigError if `url` is not an address.
    """
    if url is None:
        newest = max(home.glob(f"node-*/{ENDPOINTS}"), key=written_at, default=home / "node-*" / ENDPOINTS)
        found = directory / ENDPOINTS if directory else newest
        known = read_json(found) or {}
        url = str(known.get("health") or known.get("metrics") or "")  # the first is the one on this machine
        if not url:
            return False, f"no node has written its address to {found}"
    host, port = _checked(url)
    answers = [(False, f"no node answers at http://{host}:{port}/health: timed out")]
    # The connection's own limit begins again with each byte that arrives.
    asking = Thread(target=lambda: answers.append(_answer((host, port))), daemon=True)
    asking.start()
    asking.join(ANSWER_S)
    return answers[-1]


def _checked(url: str) -> tuple[str, int]:
    """Host and port of a URL with any path."""
    with suppress(ValueError):
        parts = urlsplit(url if "//" in url else f"//{url}")
        if parts.hostname is not None and parts.scheme in ("", "http"):
            return parts.hostname, parts.port or 80
    raise ConfigError(f"{url!r} is not the address of a node: give http://HOST:PORT, as printed by the node")


def _answer(address: tuple[str, int]) -> tuple[bool, str]:
    try:
        with closing(http.client.HTTPConnection(*address, timeout=ANSWER_S)) as connection:
            connection.request("GET", "/health")
            answer = connection.getresponse()
            line = plain(answer.read(LONGEST_LINE).decode(errors="replace").strip().partition("\n")[0])
    except (OSError, ValueError, http.client.HTTPException) as error:
        where = f"http://{address[0]}:{address[1]}/health"
        return False, f"no node answers at {where}: {getattr(error, 'strerror', None) or error}"
    return answer.status == http.client.OK, line
