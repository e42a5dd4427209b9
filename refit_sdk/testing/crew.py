"""A crew: rank processes that live through many cases, each case with a rendezvous of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from refit_sdk.testing.ranks import Failure, Process, Rank, details, running

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A body, `body(rank, *args)`, and its arguments."""


def _serve(rank: Rank) -> None:
    """Do job after job; say what each returned or raised."""
    import traceback

    while (job := rank.pipe.recv()) is not None:
        body, args = job
        try:
            rank.pipe.send(("result", None, body(rank, *args)))
        except BaseException as error:  # noqa: BLE001 - a rank's failure is the test's to judge
            rank.pipe.send(("error", type(error).__name__, (str(error), traceback.format_exc(), details(error))))


class Crew:
    """At most `size` ranks at a time. After a test that left some of them busy, all are started anew."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._stack = ExitStack()
        self._ranks: list[Process] = []

    @contextmanager
    def at_work(self, jobs: Sequence[Job]) -> Iterator[list[Process]]:
        """Start jobs; the test hears and tells the ranks, and takes every outcome."""
        ranks, self._ranks = self._ranks or self._stack.enter_context(running([(_serve, ())] * self._size)), []
        for rank, job in zip(ranks, jobs, strict=False):
            rank.pipe.send(job)
        yield ranks[: len(jobs)]
        self._ranks = ranks

    def outcomes(self, jobs: Sequence[Job]) -> list[Any]:
        """What each job returned, or its `Failure`."""
        assert len(jobs) <= self._size
        with self.at_work(jobs) as ranks:
            return [rank.outcome() for rank in ranks]

    def results(self, jobs: Sequence[Job]) -> list[Any]:
        """What each job returned. The first failure is raised, with the traceback of its rank."""
        found = self.outcomes(jobs)
        failures = [f"rank process {i}: {each.trace}" for i, each in enumerate(found) if isinstance(each, Failure)]
        assert failures == [], "\n".join(failures)
        return found

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            with suppress(OSError):  # one that is gone needs no word
                rank.pipe.send(None)
        self._stack.close()


def meet(working: Sequence[Process], event: str) -> None:
    """Wait until all have come to an event, and let them go on."""
    for rank in working:
        rank.expect(event)
    for rank in working:
        rank.go(event)


@contextmanager
def crew(size: int) -> Iterator[Crew]:
    """A crew that is gone at the end."""
    made = Crew(size)
    try:
        yield made
    finally:
        made.close()
