"""The least that moving a tensor between two processes costs: bare asyncio TCP, and gloo's send and receive."""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

MIB = 1 << 20
WAIT_S = 60.0
"""Longest wait of either side for the other."""


async def receive(connection: socket.socket, into: memoryview) -> bool:
    """Fills the buffer from the connection; False when it ended before."""
    loop = asyncio.get_running_loop()
    filled = 0
    while filled < len(into):
        got = await loop.sock_recv_into(connection, into[filled:])
        if got == 0:
            return False
        filled += got
    return True


def tensor_and_bytes(size: int) -> tuple[torch.Tensor, memoryview]:
    """A float32 tensor of so many bytes, and a view of them."""
    tensor = torch.ones(size // 4)
    return tensor, tensor.view(torch.uint8).numpy().data


async def echo(listener: socket.socket, size: int) -> None:
    """Receives `size` bytes into a torch tensor and sends them back, until the one caller is gone."""
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


def gloo_rank(store: str, rank: int, size: int, rounds: int) -> None:
    """One of the two processes of `gloo_mib_per_s`; the first prints the rate."""
    torch.distributed.init_process_group(
        "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=WAIT_S),
    )
    tensor = torch.ones(size // 4)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        if rank == 0:
            torch.distributed.send(tensor, 1)
            torch.distributed.recv(tensor, 1)
        else:
            torch.distributed.recv(tensor, 0)
            torch.distributed.send(tensor, 0)
        seconds.append(time.perf_counter() - began)
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(2 * size / MIB / statistics.median(seconds[1:]), flush=True)


def gloo_mib_per_s(size: int, rounds: int) -> float | None:
    """MiB/s of a tensor sent there and back by gloo between two processes; None where torch has no gloo."""
    if not torch.distributed.is_gloo_available():
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "noloco_p2p.lab.bench.bare_links", str(Path(folder) / "store")]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(rounds)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(2)
        ]
        try:
            out, _ = ranks[0].communicate(timeout=2 * WAIT_S)
            ranks[1].communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    return float(out) if ranks[0].returncode == 0 else None


if __name__ == "__main__":
    gloo_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
