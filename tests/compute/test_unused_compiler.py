"""torch's compiler is not imported for models and optimizers, and works for whoever uses it after all."""

import subprocess
import sys

import pytest

BEGIN = """
import sys, torch
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
    "training": (TRAIN, "assert not loaded()"),
    "a gradient of another shape": (TRAIN, MISMATCH, "assert not loaded()"),
    "left out twice": (TRAIN, "unused_compiler.leave_out()", TRAIN, "assert not loaded()", COMPILE),
    "reflection": (TRAIN, "import inspect; inspect.getmodule(torch.ones)", "assert not loaded()"),
    "a compiled function": (TRAIN, COMPILE, "assert loaded()", TRAIN),
    "another of its modules first": (TRAIN, "import torch._dynamo.utils", COMPILE),
    "imported before": ("import torch._dynamo", TRAIN, "assert loaded()", COMPILE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_compiler_is_imported_only_when_it_is_used(case: str) -> None:
    program = "\n".join((BEGIN, *CASES[case]))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
