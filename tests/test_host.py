"""What the host lets a process use: cores and memory."""

from pathlib import Path

import pytest
import torch

from noloco_p2p import host
from noloco_p2p.compute import hardware


def test_free_memory_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n", encoding="ascii")
    monkeypatch.setattr(host, "MEMINFO", meminfo)
    monkeypatch.setattr(host, "CGROUP", cgroup)
    assert host.free_host_bytes() == 5_000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n", encoding="ascii")
    (cgroup / "memory.current").write_text("3000000\n", encoding="ascii")
    (cgroup / "memory.stat").write_text("anon 2000000\ninactive_file 500000\n", encoding="ascii")
    assert host.free_host_bytes() == 5_000 * 1024
    (cgroup / "memory.max").write_text("4000000\n", encoding="ascii")
    assert host.free_host_bytes() == 1_500_000
    (cgroup / "memory.max").write_text("1000000\n", encoding="ascii")
    assert host.free_host_bytes() == 0


@pytest.mark.parametrize(
    ("limit", "cores"),
    [(None, 8), ("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)],
)
def test_cores_are_those_of_the_machine_or_of_the_container(
    limit: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit + "\n", encoding="ascii")
    assert host.cores() == cores


@pytest.mark.parametrize(
    ("wanted", "variable", "used"),
    [(None, None, 4), (None, "16", 16), (8, None, 8), (2, "16", 2)],
    ids=["by itself", "by the variable", "by the setting", "by both"],
)
def test_in_a_container_torch_gets_no_more_threads_than_cores(
    wanted: int | None, variable: str | None, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two threads in half a core, training was two to four times slower than with one."""
    threads = [16]
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    hardware.set_threads(wanted)
    assert threads[-1] == used
    monkeypatch.setattr(hardware, "cores", lambda: 32)
    threads[:] = [16]
    hardware.set_threads(None)
    assert threads == [16], "fewer than cores: torch's own choice"
