"""torch's compiler is not imported for models and optimizers, and works for whoever uses it after all."""

import subprocess
import sys

import pytest
from soak import soak

BEGIN = """
import inspect, os, sys, torch, traceback
from noloco_p2p.compute import model_family, unused_compiler
def loaded(): return "torch._dynamo.utils" in sys.modules or "sympy" in sys.modules
"""
TRAIN = """
model_family.import_transformers()
weight = torch.nn.Parameter(torch.ones(2))
for optimizer in (torch.optim.AdamW([weight]), torch.optim.SGD([weight])):
    optimizer.zero_grad()
    torch.autograd.backward(weight * 2, torch.ones(2))
    optimizer.step()
"""
MISMATCH = """
try: torch.autograd.grad(weight * 2, weight, torch.ones(3))
except RuntimeError as error: assert "Mismatch in shape" in str(error)
else: raise AssertionError
"""
COMPILE = """
doubled = torch.compile(lambda x: x * 2, backend="eager", dynamic=True)
assert [doubled(torch.ones(size)).sum().item() for size in (1, 2, 3)] == [2.0, 4.0, 6.0]
torch._dynamo.graph_break()
"""
CASES = {
    "training": ("assert not loaded()",),
    "a gradient of another shape": (MISMATCH, "assert not loaded()"),
    "left out twice": ("unused_compiler.leave_out()", TRAIN, "assert not loaded()", COMPILE, "assert loaded()", TRAIN),
    "reflection": ("inspect.getmodule(torch.ones)", "assert not loaded()"),
}
"""What is done after training."""
COMES_FIRST = {
    "another of its modules first": (TRAIN, "import torch._dynamo.utils", COMPILE),
    "imported before": ("import torch._dynamo", TRAIN, "assert loaded()", COMPILE),
}
PASSES = """
def passes(case):
    child = os.fork()
    if not child:
        try:
            exec(case, globals())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
"""
EACH = """
failed = [name for name, case in CASES.items() if not passes(case)]
if failed: sys.exit(f"failed: {failed}")
"""


@pytest.mark.parametrize(("before", "cases"), [(TRAIN, CASES), *soak([("", COMES_FIRST)])])
def test_the_compiler_is_imported_only_when_it_is_used_and_then_works(
    before: str, cases: dict[str, tuple[str, ...]]
) -> None:
    """Each case in a copy of one process, because importing torch takes longest."""
    programs = {name: "\n".join(case) for name, case in cases.items()}
    program = "\n".join((BEGIN, PASSES, before, f"CASES = {programs!r}", EACH))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr  # torch may warn there of a CUDA that it does not find
