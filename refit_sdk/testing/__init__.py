"""The room of the conformance kit, which a plug-in's tests will subclass. It has no suite yet.

It needs the extra `testing`. Assertions in every module of this package are rewritten by pytest, so that a suite that
fails in somebody else's tests says what it compared.
"""

from __future__ import annotations

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
