"""The conformance kit: cases, a judge, and suites that a plug-in's own tests subclass. It needs the extra `testing`.

`TransportSuite`, `FabricSuite` and `AdapterSuite` are imported from here. Assertions in every module of this package
are rewritten by pytest, so that a suite that fails in somebody else's tests says what it compared.
"""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

_SUITES = {"AdapterSuite": "adapters", "FabricSuite": "suites", "TransportSuite": "suites"}


def __getattr__(name: str) -> Any:
    """A suite, imported when it is asked for: ranks of a test need the rest of this package only."""
    from importlib import import_module

    if name not in _SUITES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_SUITES[name]}"), name)
