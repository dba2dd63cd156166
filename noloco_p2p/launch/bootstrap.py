"""The first thing that a node opens: its libp2p daemon, with links to those whom the command line names."""

import asyncio
import contextlib
import importlib
import logging

from noloco_p2p.config import ListenSettings
from noloco_p2p.errors import Unreachable
from noloco_p2p.io.dht.identity import Identity
from noloco_p2p.io.dht.libp2p import Libp2pDaemon
from noloco_p2p.launch import join_file, run_files

log = logging.getLogger("noloco_p2p")


async def opened(join: tuple[str, ...], identity: Identity, listen: ListenSettings) -> Libp2pDaemon:
    """The daemon; `join` is what `--join` says. A file among it is waited for, and read again while nobody answers.

    A node that was here before needs none of them: it knows its run, and other peers. Raises as `Libp2pDaemon.open`.
    """
    was_here = run_files.stored_manifest(identity.path.parent) is not None
    addresses = join_file.JoinAddresses(join, patience_s=join_file.PATIENCE_S if was_here else None)
    if addresses.by_file:
        await asyncio.gather(_wait(addresses), asyncio.to_thread(_import_ahead))
    while True:
        try:
            return await _open(identity, listen, await addresses.come())
        except Unreachable as error:
            if await addresses.may_change(error):
                continue
            if not join or not was_here:
                raise
            log.warning("%s; the peers known from before are tried", error)
            return await _open(identity, listen, ())


async def _open(identity: Identity, listen: ListenSettings, join: tuple[str, ...]) -> Libp2pDaemon:
    return await Libp2pDaemon.open(
        identity,
        host=listen.host,
        port=listen.dht_port,
        announce_host=listen.announce_host,
        join=join,
        metrics_port=listen.libp2p_metrics_port,
    )


async def _wait(addresses: join_file.JoinAddresses) -> None:
    with contextlib.suppress(Unreachable):
        await addresses.come()


def _import_ahead() -> None:
    """What takes seconds to import, while there is perhaps nobody to join yet."""
    for name in ("hivemind", "noloco_p2p.compute.factory"):
        importlib.import_module(name)
