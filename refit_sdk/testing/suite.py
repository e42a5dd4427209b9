"""The suites as they run without a line of code, for the names in `--refit-transport` and `--refit-fabric`.

    pytest -p refit_sdk.testing.plugin --pyargs refit_sdk.testing.suite --refit-transport acme

Every transport is tried over every fabric. A transport's own rules run once a transport, a fabric's once a fabric.
"""

from __future__ import annotations

from itertools import product

import pytest

from refit_sdk.testing.suites import FabricRules, Pair, Pushes, TransportRules

__all__ = ["TestFabric", "TestPushes", "TestTransport"]


def _named(config: pytest.Config) -> tuple[list[str], list[str]]:
    transports, fabrics = (config.getoption(f"refit_{kind}", None) for kind in ("transports", "fabrics"))
    return list(transports or ["reshard"]), list(fabrics or ["inproc"])


class TestPushes(Pushes):
    """Every case, by every transport, over every fabric."""

    @classmethod
    def pairs(cls, config: pytest.Config) -> list[Pair]:
        """All."""
        return list(product(*_named(config)))


class TestTransport(TransportRules):
    """The steps of every transport."""

    @classmethod
    def pairs(cls, config: pytest.Config) -> list[Pair]:
        """Each transport, over the first fabric."""
        transports, fabrics = _named(config)
        return [(transport, fabrics[0]) for transport in transports]


class TestFabric(FabricRules):
    """The messages of every fabric."""

    @classmethod
    def pairs(cls, config: pytest.Config) -> list[Pair]:
        """Each fabric, with the first transport."""
        transports, fabrics = _named(config)
        return [(transports[0], fabric) for fabric in fabrics]
