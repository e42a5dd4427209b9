"""Fabric `mixed` where members of even and of odd number are told that they have a host each."""

from __future__ import annotations

from typing import Any

from refit_backends.gloo import GlooFabric
from refit_backends.mixed import MixedFabric
from refit_backends.shm import ShmFabric


class TwoHosts:
    """TCP between the hosts."""

    name = "two hosts"
    far: Any = None

    @classmethod
    def missing(cls) -> str | None:
        """As the fabric says."""
        return MixedFabric.missing()

    def connect(self, *, process: int, **about: Any) -> Any:
        """Shared memory inside a host."""
        near = ShmFabric(host=f"h{process % 2}")
        fabric = MixedFabric(shm=near) if self.far is None else MixedFabric(shm=near, far=self.far())
        return fabric.connect(process=process, **about)


class TwoHostsByGloo(TwoHosts):
    """Gloo between the hosts."""

    name = "two hosts by gloo"
    far = GlooFabric
