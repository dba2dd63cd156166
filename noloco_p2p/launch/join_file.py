"""Join addresses passed in a file: `--address-file FILE` writes it, `--join @FILE` waits for it.

The file has one address a line. The node that writes it removes that of an earlier run when it starts, and writes its
own in one step when others can join. A node that read an old address finds nobody there, and reads the file again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from noloco_p2p.errors import ConfigError, LocalError, Unreachable
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.launch import homes
from noloco_p2p.launch.run_files import write_whole

AT = "@"
FILE_LIMIT_BYTES = 65_536
POLL_S = 0.2
AGAIN_S = 2.0
"""Pause after nobody answered at an address from a file, seconds."""
PATIENCE_S = 60.0
"""Longest wait for the file by an observer, and by a node that ran before and can continue without it, seconds."""

log = logging.getLogger("noloco_p2p")


class JoinAddresses:
    """The addresses that the `--join` options give, now and later."""

    def __init__(self, given: Sequence[str], patience_s: float = math.inf) -> None:
        """`given`: addresses, and `@FILE`. `patience_s`: longest wait for a file, from now on."""
        self.given = tuple(given)
        self.files = [Path(text.removeprefix(AT)) for text in given if text.startswith(AT)]
        """Where some of them come from."""
        self._give_up_at = time.monotonic() + patience_s
        self._said: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        """The addresses known now. Raises ConfigError for a file that cannot be read, or holds anything else."""
        for text in self.given:
            yield from read(Path(text.removeprefix(AT))) if text.startswith(AT) else (text,)

    async def come(self) -> tuple[str, ...]:
        """The addresses, as soon as there is one; logs once that it waits.

        Empty when no `--join` was given. Raises ConfigError, and Unreachable when its patience ends.
        """
        while not (found := tuple(self)) and self.files:
            if time.monotonic() >= self._give_up_at:
                raise Unreachable(f"there is no join address in {' or '.join(map(str, self.files))}")
            self._say(logging.INFO, f"waiting for the join address in {' and '.join(map(str, self.files))}")
            await asyncio.sleep(POLL_S)
        return found

    async def may_change(self, failure: Unreachable) -> bool:
        """Nobody answered: whether a file may have other addresses later. If so, logs why, and pauses."""
        if not self.files or time.monotonic() >= self._give_up_at:
            return False
        self._say(logging.WARNING, f"{failure}; reading the file again until somebody answers")
        await asyncio.sleep(AGAIN_S)
        return True

    def _say(self, level: int, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.log(level, "%s", line)


def check(given: Sequence[str]) -> None:
    """Refuse what is no value of `--join` before anything starts. Raises ConfigError."""
    if AT in given:
        raise ConfigError("--join @ names no file: write --join @FILE")
    for address in JoinAddresses(given):
        JoinAddress.parse(address)


def read(path: Path) -> list[str]:
    """The join addresses in a file, one a line; none when it is empty or not there. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
        if len(content) > FILE_LIMIT_BYTES:
            raise ConfigError(f"{path}: more than {FILE_LIMIT_BYTES} bytes are no list of join addresses")
        lines = content.decode().splitlines()
    except FileNotFoundError:
        return []
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        try:
            found += [line] if line and JoinAddress.parse(line) else []
        except ConfigError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
    return found


def remove(path: Path) -> None:
    """Remove what an earlier process wrote there. Raises LocalError when `write` would fail as well,
    ConfigError when it is something else."""
    if not path.parent.is_dir():
        raise LocalError(f"--address-file {path}: there is no directory {path.parent}")
    try:
        homes.require_file("--address-file ", path)
        if path.is_file():
            read(path)  # what is no list of addresses is not ours to remove
        path.unlink(missing_ok=True)
    except OSError as error:
        raise LocalError(f"--address-file {path} cannot be removed: {error.strerror or error}") from error


def write(path: Path, addresses: Sequence[str]) -> None:
    """Atomic: a reader sees no file or the whole one; with an invitation, only its owner can. Raises LocalError."""
    text = "".join(f"{address}\n" for address in addresses)
    write_whole(path, text.encode(), 0o600 if "/invite/" in text else 0o666)
