"""Fabrics that are made with arguments, or whose hosts are stated, pass the kit as those of plain names do."""

from __future__ import annotations

from refit_backends.shm import ShmFabric
from stated_hosts import TwoHosts, TwoHostsByGloo

from refit_sdk.testing import FabricSuite


class TestTwoCopies(FabricSuite):
    fabric = ShmFabric(one_copy=False)
    one_in = 4


class TestTwoHosts(FabricSuite):
    fabric = TwoHosts
    one_in = 4


class TestTwoHostsByGloo(FabricSuite):
    fabric = TwoHostsByGloo
    one_in = 4
