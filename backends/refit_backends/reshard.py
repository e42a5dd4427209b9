"""Transport `reshard`: each move goes from its server to every process that needs it, in one round.

A byte leaves its holder once for each process that needs it and has none of it, and passes nobody else.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from refit_sdk.hookspecs import hookimpl
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Moves, Steps, Transport


class Reshard:
    """Direct sends.

    >>> one = np.array([0])
    >>> two, served = np.array([1, 2]), np.array([0, 1])
    >>> moves = Moves(np.array([[0]]), np.array([[8]]), one, np.array([0, 2]), two, served, one, 2)
    >>> steps = Reshard().steps(moves, Topology.single(3))
    >>> steps.src.tolist(), steps.dst.tolist(), steps.stop.tolist()
    ([0, 0], [1, 2], [[8], [8]])
    """

    name: ClassVar[str] = "reshard"
    capabilities: ClassVar[Capabilities] = Capabilities(copies="direct")

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """One step for each move and each process that needs it."""
        move = np.repeat(np.arange(len(moves)), np.diff(moves.need_start))
        return Steps(move, moves.start[move], moves.stop[move], moves.server[move], moves.need, np.zeros_like(move))


@hookimpl
def refit_register_transports() -> list[type[Transport]]:
    """The transport of this module."""
    return [Reshard]
