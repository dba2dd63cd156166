"""The least that moving a tensor between two processes can cost: bare asyncio TCP, and gloo's send and receive."""

import asyncio
import socket
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from noloco_p2p.errors import LocalError
from noloco_p2p.lab.processes import workers

MIB = 1 << 20
WAIT_S = 60.0
"""Longest wait of either side for the other."""


async def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill the buffer from the connection; False when it was closed before."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(into):
        got = await loop.sock_recv_into(connection, into[filled:])
        if got == 0:
            return False
        filled += got
    return True


def tensor_and_bytes(size: int) -> tuple[torch.Tensor, memoryview]:
    """A float32 tensor of `size` bytes, and a view of them."""
    tensor = torch.ones(size // 4)
    return tensor, tensor.view(torch.uint8).numpy().data


async def echo(listener: socket.socket, size: int) -> None:
    """Receive `size` bytes into a torch tensor and send them back, until the one caller closes its connection."""
    loop = asyncio.get_running_loop()
    _, view = tensor_and_bytes(size)
    connection, _ = await loop.sock_accept(listener)
    with connection:
        connection.setblocking(False)
        while await receive(connection, view):
            await loop.sock_sendall(connection, view)


async def tcp_seconds(connection: socket.socket, view: memoryview) -> float:
    """Seconds for the buffer to go there and come back over a bare connection to `echo`."""
    began = time.perf_counter()
    await asyncio.get_running_loop().sock_sendall(connection, view)
    if not await receive(connection, view):
        raise ConnectionError("the far process ended the bare connection")
    return time.perf_counter() - began


def gloo_mib_per_s(size: int, rounds: int) -> float | None:
    """MiB/s of a tensor sent there and back by gloo between two processes; None where gloo is missing or fails."""
    if not torch.distributed.is_gloo_available():
        return None
    try:
        with tempfile.TemporaryDirectory() as folder, workers(2, GLOO_SOCKET_IFNAME="lo") as pool:
            ranks = [pool.submit(_gloo_rank, Path(folder) / "store", rank, size, rounds) for rank in range(2)]
            rate, _ = (rank.result(2 * WAIT_S) for rank in ranks)
            return rate
    except (RuntimeError, TimeoutError, LocalError):
        return None


def _gloo_rank(store: Path, rank: int, size: int, rounds: int) -> float:
    """One of the two processes of `gloo_mib_per_s`; its rate."""
    torch.distributed.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=2, timeout=timedelta(seconds=WAIT_S)
    )
    tensor = torch.ones(size // 4)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        for sender in (0, 1):
            if rank == sender:
                torch.distributed.send(tensor, 1 - rank)
            else:
                torch.distributed.recv(tensor, 1 - rank)
        seconds.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    return 2 * size / MIB / statistics.median(seconds[1:])
