"""Leaves out torch's compiler, which nothing here uses.

transformers, every optimizer of torch and every backward pass import parts of it, and those import the rest and sympy:
75 MiB and a second of CPU time. Outside compiled functions, what they call of it does nothing, or checks sizes that
might not be known yet, but always are.
"""

import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def _undecorated(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """The function itself, or for a decorator with arguments one that returns it."""
    return function if function is not None else lambda decorated: decorated


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch._dynamo": {
        "allow_in_graph": _undecorated,
        "assume_constant_result": _undecorated,
        "disable": _undecorated,
        "graph_break": lambda *_, **__: None,
    },
    "torch.fx.experimental.symbolic_shapes": {"expect_true": bool, "sym_eq": operator.eq},
}
"""By module, the functions that are called outside compiled functions, as they behave there."""
INDEPENDENT = "torch._dynamo._trace_wrapped_higher_order_op"
"""A module that transformers imports and that needs nothing of the compiler, although it belongs to it."""


class _Deferred(ModuleType):
    """A module that is executed when anything but its stand-ins is used."""

    def __getattr__(self, name: str) -> Any:
        """Also for the `__path__` of a package, which is read when another module of it is imported."""
        spec = self.__spec__
        assert spec is not None, "it was made from its spec"
        assert spec.loader is not None, "which was found"
        folders = spec.submodule_search_locations
        if name.startswith("__") and not (folders and name == "__path__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        if folders:
            self.__path__ = folders
        spec.loader.exec_module(self)
        return getattr(self, name)


def leave_out() -> None:
    """Import torch's compiler no earlier than it is used; if it has been imported already, nothing changes."""
    for name, functions in STAND_INS.items():
        if name not in sys.modules and (found := importlib.util.find_spec(name)) is not None:
            module = sys.modules[name] = importlib.util.module_from_spec(found)
            module.__class__ = _Deferred
            vars(module).update(functions)
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)
    importlib.import_module(INDEPENDENT)
    # From here on, importing another module of a package executes the package first.
    for name in STAND_INS:
        if isinstance(sys.modules[name], _Deferred):
            vars(sys.modules[name]).pop("__path__", None)
