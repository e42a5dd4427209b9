"""The fabrics of device memory, by the kit, over their stand-ins for machines without a GPU."""

from __future__ import annotations

import gpu_standins

from refit_sdk.testing import FabricSuite
from refit_sdk.testing.suites import Pushes


class TestCudaIpc(FabricSuite):
    fabric = gpu_standins.StandinCudaIpc
    one_in = 4


class TestNccl(Pushes):
    """NCCL compares no lengths, and loses a whole group with a peer: the rules of single messages aren't its own."""

    fabric = gpu_standins.StandinNccl
    one_in = 4
