"""Fabrics that cases of real processes run over, other than the default: made by process, as hosts are stated by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from refit_backends.gloo import GlooFabric
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric

FABRICS: dict[str, Callable[[int], Any]] = {
    "gloo": lambda process: "gloo",
    "tcp": lambda process: "tcp",
    "shm": lambda process: "shm",
    "two copies": lambda process: ShmFabric(one_copy=False),
    "two hosts": lambda process: MixedFabric(shm=ShmFabric(host=f"h{process % 2}")),
    "two hosts by gloo": lambda process: MixedFabric(far=GlooFabric(), shm=ShmFabric(host=f"h{process % 2}")),
}
"""`two hosts` has shared memory and TCP in one group."""
