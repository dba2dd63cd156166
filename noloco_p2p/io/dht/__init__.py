"""The distributed hash table and its libp2p daemon, both hivemind's.

Importing the package hivemind would also import its averager, experts and optimizers, and with them scipy: half a
second of CPU time and 40 MiB for code that is not used here. So a bare package that points at hivemind's folder stands
in for it, and only the modules that are needed are imported from there. Two of these import torch, which an observer
does not need, for a class that is not used here either: an empty class stands in for it.
"""

import importlib.util
import sys
from types import ModuleType

if "hivemind" not in sys.modules and (_found := importlib.util.find_spec("hivemind")) is not None:
    sys.modules["hivemind"] = importlib.util.module_from_spec(_found)
    if "torch" not in sys.modules:
        for _module, _class in ("mpfuture", "MPFuture"), ("tensor_descr", "TensorDescriptor"):
            _empty = sys.modules[f"hivemind.utils.{_module}"] = ModuleType(_module)
            setattr(_empty, _class, type(_class, (), {}))
