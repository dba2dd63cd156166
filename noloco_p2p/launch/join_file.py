"""Passes join addresses in a file: `--address-file FILE` writes it, a node's `--join @FILE` waits for it.

The file has one address per line. The writing node removes the file of an earlier run when it starts, and writes its
own atomically once others can join. A node that has read an old address gets no answer there, and reads the file again.
"""

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from noloco_p2p.errors import ConfigError, LocalError, Unreachable
from noloco_p2p.io.dht.addresses import JoinAddress
from noloco_p2p.io.durable_files import writing
from noloco_p2p.launch import homes
from noloco_p2p.launch.run_files import write_whole

AT = "@"
FILE_LIMIT_BYTES = 65_536
POLL_S = 0.2
AGAIN_S = 2.0
"""Pause before a file is read again after no node answered at its addresses, seconds."""
PATIENCE_S = 60.0
"""Longest wait for the file, for a node that ran before and can continue without it, seconds."""

log = logging.getLogger("noloco_p2p")


class JoinAddresses:
    """The addresses given by `--join` options, including those that files will hold later."""

    def __init__(self, given: Sequence[str], patience_s: float = math.inf) -> None:
        """`given`: addresses, or `@FILE`. `patience_s`: longest wait for a file, from now on."""
        self.given = tuple(given)
        self.files = [Path(text.removeprefix(AT)) for text in given if text.startswith(AT)]
        """The files among `given`."""
        self._give_up_at = time.monotonic() + patience_s
        self._said: set[str] = set()

    def __iter__(self) -> Iterator[str]:
        """The addresses known now. Raises ConfigError for a file that cannot be read or holds anything else."""
        for text in self.given:
            yield from read(Path(text.removeprefix(AT))) if text.startswith(AT) else (text,)

    async def wait(self) -> tuple[str, ...]:
        """The addresses, as soon as there is one; empty if no `--join` was given.

        Logs once that it waits. Raises ConfigError, and Unreachable after `patience_s`.
        """
        while not (found := tuple(self)) and self.files:
            if time.monotonic() >= self._give_up_at:
                raise Unreachable(f"there is no join address in {' or '.join(map(str, self.files))}")
            self._say(logging.INFO, f"waiting for the join address in {' and '.join(map(str, self.files))}")
            await asyncio.sleep(POLL_S)
        return found

    async def may_change(self, failure: Unreachable) -> bool:
        """After no node has answered: whether a file may yet get other addresses. If so, logs `failure` and pauses."""
        if not self.files or time.monotonic() >= self._give_up_at:
            return False
        self._say(logging.WARNING, f"{failure}; reading the file again until a node answers")
        await asyncio.sleep(AGAIN_S)
        return True

    def _say(self, level: int, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            log.log(level, "%s", line)


def check(given: Sequence[str]) -> None:
    """Check the values of `--join` before anything starts. Raises ConfigError."""
    if AT in given:
        raise ConfigError("--join @ lacks a file name: write --join @FILE")
    for address in JoinAddresses(given):
        JoinAddress.parse(address)


def known(given: Sequence[str]) -> tuple[str, ...]:
    """The addresses, for a command that does not wait for a file. Raises ConfigError also if there is none yet."""
    check(given)
    found = tuple(JoinAddresses(given))
    if given and not found:
        raise ConfigError(f"no join address is in {' or '.join(given)} yet: is its node running?")
    return found


def read(path: Path) -> list[str]:
    """The join addresses in a file, one per line; none if it is empty or does not exist. Raises ConfigError."""
    try:
        homes.require_file("", path)  # opening a pipe would wait for its other end
        with path.open("rb") as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
        if len(content) > FILE_LIMIT_BYTES:
            raise ConfigError(f"{path} has more than {FILE_LIMIT_BYTES} bytes: it is not a list of join addresses")
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
    """Remove the file that an earlier process wrote.

    Raises LocalError if the file could not be written either, ConfigError if it is something else.
    """
    if not path.parent.is_dir():
        raise LocalError(f"--address-file {path}: there is no directory {path.parent}")
    with writing(f"--address-file {path}"):
        homes.require_file("--address-file ", path)
        read(path)  # raises unless it is a list of addresses: anything else is not ours to remove
        path.unlink(missing_ok=True)


def write(path: Path, addresses: Sequence[str]) -> None:
    """Write the file atomically. If an address has an invitation, only the owner may read it. Raises LocalError."""
    text = "".join(f"{address}\n" for address in addresses)
    write_whole(path, text.encode(), 0o600 if "/invite/" in text else 0o666)
