"""A transport: a server serves those that need a move one after the other."""

from __future__ import annotations

import numpy as np

from refit_sdk.hookspecs import hookimpl
from refit_sdk.topology import Topology
from refit_sdk.transport import Capabilities, Moves, Steps


class Turns:
    """Each move goes from its server to every process that needs it, to one after the other."""

    name = "acme"
    capabilities = Capabilities(copies="direct")

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        """One step for each process that needs a move; its round is its place in the queue."""
        move = np.repeat(np.arange(len(moves)), np.diff(moves.need_start))
        place = np.arange(len(move)) - moves.need_start[move]
        return Steps(move, moves.start[move], moves.stop[move], moves.server[move], moves.need, place)


@hookimpl
def refit_register_transports() -> list[type]:
    """The one transport."""
    return [Turns]
