"""What children do in the tests of processes and mutants; imported by name in the children."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

Say = Callable[[object], None]


def count(stop: int, say: Say) -> None:
    for number in range(stop):
        say((number,))


def refuse(say: Say) -> None:
    from refit_sdk.errors import LayoutError

    say("reading the layout")
    raise LayoutError("rows 0:4 of a.weight, found 0:3")


def crash(say: Say) -> None:
    raise ZeroDivisionError("a bug")


def die(say: Say) -> None:
    say("pushing version 3")
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_ever(say: Say) -> None:
    say("receiving version 7")
    say((os.getpid(),))
    threading.Event().wait()


def deaf(job: Any, rank: int, say: Say) -> None:
    """A target whose receive does nothing."""
    _target(job, rank, say, lambda decoder, receive: receive(None))


def flipped(job: Any, rank: int, say: Say) -> None:
    """A target that gets one bit of one element wrong, on its last rank."""
    _target(job, rank, say, lambda decoder, receive: _flip_a_bit(decoder, receive, here=rank == job.targets - 1))


def swapped(job: Any, rank: int, say: Say) -> None:
    """A target that takes gate for up."""
    _target(job, rank, say, _swap_gate_and_up)


def _flip_a_bit(decoder: Any, receive: Callable[[Any], Any], *, here: bool) -> Any:
    import torch

    report = receive(decoder)
    if here:
        decoder.model.layers[1].mlp.down_proj.weight.to_local().view(torch.int16)[3, 5] ^= 1
    return report


def _swap_gate_and_up(decoder: Any, receive: Callable[[Any], Any]) -> Any:
    report = receive(decoder)
    mlp = decoder.model.layers[0].mlp
    gate, up = mlp.gate_proj.weight.to_local(), mlp.up_proj.weight.to_local()
    kept = gate.clone()
    gate.copy_(up)
    up.copy_(kept)
    return report


def _target(job: Any, rank: int, say: Say, around: Callable[[Any, Callable[[Any], Any]], Any]) -> None:
    """The demo's target with `around(decoder, receive)` in place of every receive."""
    import torch

    from refit_sdk.demo import rollout
    from refit_sdk.session import RefitSession

    class Session:
        @staticmethod
        def target(decoder: Any, **kwargs: Any) -> Any:
            session = RefitSession.target(decoder, **kwargs)
            honest = session.receive

            def receive(_: Any) -> Any:
                if _ is not None:
                    return honest()
                kept = [parameter.clone() for parameter in decoder.parameters()]
                report = honest()
                for parameter, old in zip(decoder.parameters(), kept, strict=True):
                    parameter.copy_(old)
                return report

            session.receive = torch.no_grad()(lambda: around(decoder, receive))
            return session

    rollout.RefitSession = Session  # type: ignore[assignment,misc]
    rollout.target_main(job, rank, say)
