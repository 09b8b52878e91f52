"""The generated stubs of etcd's API, without what the distribution that has them would load beside."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def _load(name: str) -> Any:
    """Import a module of the package ``etcd3`` without running the package's own code.

    That loads a client class with its retries, locks and members, of which
    nothing is used here: a tenth of what a start without peers takes. Whoever
    imports the package itself afterwards gets it as a whole.
    """
    if "etcd3" in sys.modules:
        return importlib.import_module(name)
    spec = find_spec("etcd3")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("No module named 'etcd3'", name="etcd3")
    package = sys.modules["etcd3"] = ModuleType("etcd3")
    package.__path__ = list(spec.submodule_search_locations)
    try:
        return importlib.import_module(name)
    finally:
        del sys.modules["etcd3"]


etcdrpc = _load("etcd3.etcdrpc")
kv_pb2 = _load("etcd3.etcdrpc.kv_pb2")
