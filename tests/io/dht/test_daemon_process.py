"""The process of the libp2p daemon is forked from one that has threads, and is Python until it becomes the daemon."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gc, os, sys
from pathlib import Path
from daemons import daemon, run

home, me = Path(sys.argv[1]), os.getpid()

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        (home / ("parent" if os.getpid() == me else "child")).touch()

def allocate():  # as filelock does, and enough for a collection
    [[] for _ in range(10 * gc.get_threshold()[0])]

os.register_at_fork(before=Garbage, after_in_child=allocate)

async def scenario():
    async with daemon(home):
        gc.collect()

run(scenario)
assert gc.isenabled()
"""


def test_nothing_is_collected_in_a_process_that_becomes_the_daemon(tmp_path: Path) -> None:
    """A channel of gRPC that is freed there waits for threads that only the parent has, and the parent for its exec."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROGRAM}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).exists() for name in ("parent", "child")] == [True, False]
