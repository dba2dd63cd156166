"""The memory of library code that only start-up needs."""

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from noloco_p2p.launch import library_code


def code_kib(library: str) -> int:
    """The resident code of a library."""
    blocks = library_code.MAPPINGS.read_text().split("VmFlags:")
    mine = [block for block in blocks if f"/{library}" in block and " r-xp " in block]
    return sum(int(block.partition("\nRss:")[2].split()[0]) for block in mine)


def test_torch_runs_in_less_memory_than_its_import_took() -> None:
    product = torch.ones(8, 8) @ torch.ones(8, 8)
    before = code_kib("libtorch_cpu.so")
    library_code.give_back_unused_code()
    assert torch.equal(torch.ones(8, 8) @ torch.ones(8, 8), product)
    assert 0 < code_kib("libtorch_cpu.so") < before / 2


def test_code_that_the_process_has_changed_is_kept(tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(b"a" * mmap.PAGESIZE)
    with (tmp_path / "code").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapped[:3] = b"new"
    place = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    protect = ctypes.CDLL(None).mprotect
    assert protect(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC) == 0
    library_code.give_back_unused_code()
    assert mapped[:4] == b"newa"


def test_nothing_is_done_where_mappings_are_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_code, "MAPPINGS", tmp_path / "none")
    library_code.give_back_unused_code()
