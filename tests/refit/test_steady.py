"""Ten pushes: the second to tenth plan nothing, say no word per tensor, keep no more memory, and change no address."""

from __future__ import annotations

import gc
import os
import resource
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from attrs import define, field, frozen

from refit_sdk import control, executor, joining, messages, plan, seat
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.placement import Shard
from refit_sdk.session import RefitSession
from refit_sdk.testing.crew import Crew, crew, meet
from refit_sdk.testing.models import Model, Ranks, beside, spread
from refit_sdk.testing.ranks import Rank, free_rendezvous

PUSHES = 10
ROWS, COLUMNS = 1600, 8
"""Of all tensors of a case together: however many there are, as many bytes travel."""
WORK = ((joining, "make_plan"), (joining, "input_digest"), (plan, "lower"), (executor, "bind"), (seat, "fold"))
"""What is done to plan, lower, bind and describe."""


@frozen(kw_only=True)
class Seen:
    """What a push left behind: calls of what only a first push needs, control messages, and what the process holds."""

    calls: dict[str, int]
    words: Counter[str]
    said_bytes: int
    buffers: int
    traced: int
    resident: int
    descriptors: int
    threads: int
    addresses: int


@define
class Watch:
    """Counts calls and control messages of this process, until `restore`."""

    calls: dict[str, int] = field(factory=dict)
    words: Counter[str] = field(factory=Counter)
    said_bytes: int = 0
    _old: list[tuple[Any, str, Any]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        for module, name in WORK:
            self.calls[name] = 0
            self._replace(module, name, lambda old, name=name: self._counting(old, name))  # type: ignore[misc]
        self._replace(control.Client, "send", self._sending)
        self._replace(control.Client, "_take", self._taking)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._old.append((owner, name, getattr(owner, name)))
        setattr(owner, name, make(getattr(owner, name)))

    def _counting(self, old: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return old(*args, **kwargs)

        return call

    def _sending(self, old: Any) -> Any:
        def send(client: Any, message: Any) -> None:
            self._count("said", message)
            old(client, message)

        return send

    def _taking(self, old: Any) -> Any:
        def take(client: Any, message: Any) -> None:
            self._count("heard", message)
            old(client, message)

        return take

    def _count(self, verb: str, message: Any) -> None:
        if not isinstance(message, messages.Beat | messages.Closed):
            self.words[f"{verb} {type(message).__name__}"] += 1
            self.said_bytes += len(messages.encode(message))

    def restore(self) -> None:
        for owner, name, old in self._old:
            setattr(owner, name, old)


def measured(session: RefitSession, model: Model, watch: Watch) -> Seen:
    """Everything, after a push."""
    gc.collect()
    standing = session._participant._mover.standing
    assert standing is not None
    return Seen(
        calls=dict(watch.calls),
        words=Counter(watch.words),
        said_bytes=watch.said_bytes,
        buffers=sum(each.buffer_nbytes for each in standing.executors.values()),
        traced=tracemalloc.get_traced_memory()[0],
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        addresses=hash(tuple(model.addresses())),
    )


def source(me: Rank, where: str, held: Ranks, rank: int) -> list[Seen]:
    model, watch, seen = Model(held[rank]), Watch(), []
    tracemalloc.start()
    try:
        with RefitSession.source(
            model, rendezvous=where, rank=rank, size=len(held), window_bytes=4096, deadline=60
        ) as session:
            for version in range(PUSHES):
                model.fill(version=version)
                session.push(version=version)
                seen.append(measured(session, model, watch))
            me.meet("all")
    finally:
        tracemalloc.stop()
        watch.restore()
    return seen


def target(me: Rank, where: str, held: Ranks, rank: int) -> list[Seen]:
    model, watch, seen = Model(held[rank]), Watch(), []
    tracemalloc.start()
    try:
        with RefitSession.target(
            model, rendezvous=where, engine="rollout-0", rank=rank, size=len(held), deadline=60
        ) as session:
            for version in range(PUSHES):
                model.poison()
                assert session.receive().version == version
                assert model.faults(version=version, source="float32") == []
                seen.append(measured(session, model, watch))
            me.meet("all")
    finally:
        tracemalloc.stop()
        watch.restore()
    return seen


def tensors(count: int, dim: int, stored: str) -> Ranks:
    layout, shape = Layout(Mesh(range(2)), [Shard(dim)]), (ROWS // count, COLUMNS)
    return beside(*(spread(f"layers.{i}.w", shape, layout, size=2, stored=stored) for i in range(count)))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


def ten_pushes(ranks: Crew, count: int) -> list[list[Seen]]:
    where, rows, columns = free_rendezvous(), tensors(count, 0, "float32"), tensors(count, 1, "bfloat16")
    jobs: list[Any] = [(source, (where, rows, rank)) for rank in range(2)]
    with ranks.at_work([*jobs, *((target, (where, columns, rank)) for rank in range(2))]) as working:
        meet(working, "all")
        return [rank.result() for rank in working]


@pytest.fixture(scope="module")
def few(ranks: Crew) -> list[list[Seen]]:
    return ten_pushes(ranks, 4)


@pytest.fixture(scope="module")
def many(ranks: Crew) -> list[list[Seen]]:
    return ten_pushes(ranks, 400)


def test_the_second_to_tenth_plan_and_describe_nothing(many: list[list[Seen]]) -> None:
    for seen in many:
        assert seen[0].calls == {"make_plan": 1, "input_digest": 1, "lower": 1, "bind": 1, "fold": 1}
        assert seen[-1].calls == seen[0].calls


def words(seen: list[Seen]) -> list[tuple[Counter[str], int]]:
    """The control messages, and their bytes, of each push after the first."""
    return [(after.words - before.words, after.said_bytes - before.said_bytes) for before, after in pairwise(seen)]


def test_control_messages_do_not_depend_on_the_number_of_tensors(few: list[list[Seen]], many: list[list[Seen]]) -> None:
    for of_few, of_many in zip(few, many, strict=True):
        assert words(of_few) == words(of_many)
        said = ["said Ready", "heard Link", "said Linked", "heard Go", "said Done", "heard Outcome"]
        each = dict.fromkeys(said, 1)
        assert [found for found, _ in words(of_many)] == [each] * (PUSHES - 1)


def test_nothing_grows(many: list[list[Seen]]) -> None:
    assert all(seen[0].buffers for seen in many[:2]), "sources cast, and so have buffers"
    for seen in many:
        assert len({each.buffers for each in seen}) == 1
        assert seen[0].buffers <= 4 * 4096
        assert seen[-1].traced - seen[2].traced < 32 * 1024  # what a push says of itself is kept here
        assert seen[-1].resident - seen[2].resident < 8 * 1024**2
        assert len({(each.descriptors, each.threads) for each in seen[1:]}) == 1


def test_no_address_changes(many: list[list[Seen]]) -> None:
    for seen in many:
        assert len({each.addresses for each in seen}) == 1
