"""Plug-ins that fail late, engines that meddle with their tensors, readers beside a push, and very many operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve
from bad_cases import Said, Seat, said_of, seats
from refit_backends.gloo import GlooFabric
from refit_backends.mixed import MixedFabric
from refit_backends.reshard import Reshard

from refit_sdk import joining
from refit_sdk.adapter import Fragment
from refit_sdk.box import Box
from refit_sdk.errors import FencedError, PushError, RefitError
from refit_sdk.fabric import FabricError
from refit_sdk.layout import Layout
from refit_sdk.mesh import Mesh
from refit_sdk.offers import Offer, Origin, Registry
from refit_sdk.placement import Shard
from refit_sdk.session import RefitSession
from refit_sdk.settings import Settings
from refit_sdk.testing.crew import Crew, Job, crew, meet
from refit_sdk.testing.models import Held, Model, Ranks, spread
from refit_sdk.testing.ranks import Rank, free_rendezvous

DOWN = "the device mlx5_0 is down"
NAME, SHAPE = "model.layers.0.up.weight", (8, 4)


def cut(dim: int, size: int = 2) -> Ranks:
    return spread(NAME, SHAPE, Layout(Mesh(range(size)), [Shard(dim)]), size=size)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    with crew(4) as made:
        yield made


class Frail(GlooFabric):
    """Usable by its own word; connecting fails, on all processes or on one."""

    name: ClassVar[str] = "frail"

    def __init__(self, error: Exception, *, only: int | None) -> None:
        super().__init__()
        self._error = error
        self._only = only

    def connect(self, **how: Any) -> Any:
        if self._only in (None, how["process"]):
            raise self._error
        return super().connect(**how)


class Frayed(Reshard):
    """A transport that fails when it's asked."""

    name: ClassVar[str] = "frayed"

    def steps(self, moves: Any, topology: Any) -> Any:
        raise RuntimeError("no rail leads to process 3")


@contextmanager
def counted(owner: type, verb: str) -> Iterator[list[type]]:
    """The classes on whose objects a method is called meanwhile."""
    old, found = owner.__dict__[verb], []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(type(self))
        return old(self, *args, **kwargs)

    setattr(owner, verb, call)
    try:
        yield found
    finally:
        setattr(owner, verb, old)


def registry_with_frayed() -> Registry:
    here = Origin("tests", "test_more_faults", "tests", "1")
    real = registry()
    return evolve(real, offers=(*real.offers, Offer("transport", "frayed", Frayed, here)))


registry = joining.registry


def joins(_: Rank, seat: Seat, where: str) -> tuple[Said, set[str]]:
    """Join, which fails; what was said, and the fabrics and transports that were asked for anything."""
    model = Model(seat.held)
    joining.registry = registry_with_frayed
    try:
        with (
            counted(GlooFabric, "connect") as gloo,
            counted(MixedFabric, "connect") as fabrics,
            counted(Reshard, "steps") as transports,
        ):
            try:
                seat.join(model, where).close()
                said = Said("", faults=tuple(model.untouched()))
            except RefitError as error:
                said = said_of(error, model)
        return said, {each.__name__ for each in (*gloo, *fabrics, *transports)}
    finally:
        joining.registry = registry


def all_joining(ranks: Crew, **options: Any) -> list[tuple[Said, set[str]]]:
    settings = options.pop("settings", Settings())
    everybody = [*seats("source", cut(0), settings=settings, **options), *seats("target", cut(1), **options)]
    where = free_rendezvous()
    return ranks.results([(joins, (seat, where)) for seat in everybody])


@pytest.mark.parametrize(
    ("error", "only"),
    [(FabricError(DOWN), None), (OSError(DOWN), None), (FabricError(DOWN), 1), (OSError(DOWN), 3)],
    ids=["everywhere", "everywhere, any error", "on a source", "on a target, any error"],
)
def test_a_fabric_that_fails_to_connect(ranks: Crew, error: Exception, only: int | None) -> None:
    found = all_joining(ranks, fabric=Frail(error, only=only), deadline=5)
    texts = [said.text for said, _ in found]
    assert [text for text in texts if "fabric 'frail' can't connect the group of engine rollout-0" not in text] == []
    assert [text for text in texts if DOWN not in text] == []
    if only is not None:
        seat = {1: "source[1]", 3: "rollout-0[1]"}[only]
        assert [text for text in texts if seat not in text] == []
    assert [(said.kind, said.faults) for said, _ in found] == [("PushError", ())] * 4
    assert set().union(*(asked for _, asked in found)) <= {"Frail", "Reshard"}


def test_a_transport_that_fails(ranks: Crew) -> None:
    found = all_joining(ranks, settings=Settings(routes=[("*", "frayed")]))
    assert len({said.text for said, _ in found}) == 1
    assert "transport 'frayed' failed" in found[0][0].text
    assert "RuntimeError: no rail leads to process 3" in found[0][0].text
    assert [(said.kind, said.faults, asked) for said, asked in found] == [("PluginError", (), set())] * 4
    assert [said.details for said, _ in found] == ["frayed"] * 4


LONG = 120.0
"""Seconds that a push of very many operations may take where other work is done, too."""
PIECES = 24_000
KINDS = {"wide": (1, (2048, 2048)), "tall": (20, (256, 128)), "small": (6000, (64, 64))}
"""How many tensors of which shape; two sources and two targets make four pieces of each, of 2 KiB to 2 MiB."""


def many(dim: int, rank: int) -> tuple[Held, ...]:
    """A rank's half of every tensor, all in one block."""
    held, at = [], 0
    for kind, (count, shape) in KINDS.items():
        half = shape[dim] // 2
        box = Box.whole(shape).narrow(dim, rank * half, rank * half + half)
        for number in range(count):
            name = f"model.layers.{number // 100}.experts.{number % 100}.{kind}"
            held.append(Held(name, shape, box, "bfloat16", block="all", offset=at))
            at += 2 * half * shape[1 - dim]
    return tuple(held)


def gives_many(_: Rank, where: str, rank: int) -> tuple[int, int, int]:
    """Push once; the pieces and messages that this rank sends, and the windows."""
    model, settings = Model(many(0, rank)), Settings(window_ops=16, window_bytes=1 << 21, coalesce_bytes=0)
    with RefitSession.source(model, rendezvous=where, rank=rank, size=2, settings=settings, deadline=LONG) as session:
        model.fill(version=1)
        session.push(version=1)
        windows = session.plan.program(rank).windows
    sends = [message for window in windows for message in window.sends]
    return sum(len(message.pieces) for message in sends), len(sends), len(windows)


def takes_many(_: Rank, where: str, rank: int) -> list[str]:
    model = Model(many(1, rank))
    with RefitSession.target(model, rendezvous=where, engine="a", rank=rank, size=2, deadline=LONG) as session:
        assert session.receive().version == 1
    return model.faults(version=1)


def test_very_many_operations_in_small_windows(ranks: Crew) -> None:
    where = free_rendezvous()
    jobs: list[Job] = [(body, (where, rank)) for body in (gives_many, takes_many) for rank in range(2)]
    with ranks.at_work(jobs) as working:
        *sent, first, second = [rank.result(timeout=LONG) for rank in working]
    assert first == second == []
    assert sum(pieces for pieces, _, _ in sent) >= PIECES
    assert [messages > 12_000 and windows > 500 for _, messages, windows in sent] == [True, True], sent


class Meddling(Model):
    """A target that can be told to rebind or reshape a tensor while it installs; it keeps why it is fenced."""

    meddle: Callable[[], object] | None = None
    fenced: str | None = None

    def refit_install(self, *, version: int) -> None:
        if self.meddle is not None:
            self.meddle()

    def refit_fence(self, reason: str) -> None:
        self.fenced = reason

    def refit_unfence(self) -> None:
        self.fenced = None

    def turn(self) -> None:
        """The same storage in another shape; again, and it's as before."""
        self.fragments[0].view.t_()

    def move(self) -> None:
        """The same values elsewhere."""
        kept = self.fragments[0]
        self.fragments[0] = evolve(kept, view=kept.view.clone())


def gives_all(me: Rank, where: str, held: Ranks, rank: int, versions: Sequence[int]) -> list[tuple[str, Any]]:
    """Push versions; of each, the error's text and what the engine is then."""
    model, found = Model(held[rank]), []
    with RefitSession.source(model, rendezvous=where, rank=rank, size=len(held), deadline=20) as session:
        for version in versions:
            me.meet("next")
            model.fill(version=version)
            try:
                found.append(("", session.push(version=version).engines["a"].state))  # type: ignore[union-attr]
            except PushError as error:
                found.append((str(error), error.engines["a"]))
    return found


def meddles(me: Rank, where: str, held: Ranks, rank: int, verb: str, versions: Sequence[int]) -> list[Any]:
    """Take pushes. During the second, rank 1 meddles; what it did to its shape it undoes."""
    model, found = Meddling(held[rank]), []
    with RefitSession.target(model, rendezvous=where, engine="a", rank=rank, size=len(held), deadline=20) as session:
        for number, version in enumerate(versions):
            meddling = rank == 1 and number == 1
            model.meddle = getattr(model, verb) if meddling else None
            me.meet("next")
            try:
                session.receive()
                found.append(("", model.fenced, tuple(model.faults(version=version))))
            except PushError as error:
                found.append((str(error), model.fenced, error.engines))
            if meddling and verb == "turn":
                model.turn()
    return found


@pytest.mark.parametrize("verb", ["move", "turn"], ids=["rebound", "reshaped"])
def test_an_install_that_meddles_tears_its_engine_until_it_is_mended(ranks: Crew, verb: str) -> None:
    where, versions = free_rendezvous(), range(1, 6)
    jobs: list[Job] = [(gives_all, (where, cut(0), rank, versions)) for rank in range(2)]
    jobs += [(meddles, (where, cut(1), rank, verb, versions)) for rank in range(2)]
    with ranks.at_work(jobs) as working:
        for _ in versions:
            meet(working, "next")
        found = [rank.result() for rank in working]
    for pushed in found[:2]:
        assert [state for _, state in pushed] == ["complete", "torn", "complete", "complete", "complete"]
        assert "a[1]" in pushed[1][0]
        assert "rebound or reshaped during the push" in pushed[1][0]
    for taken in found[2:]:
        assert [taken[0], *taken[2:]] == [("", None, ())] * 4
        text, fenced, engines = taken[1]
        assert "a[1]" in text
        assert (fenced is not None, engines) == (True, {"a": "torn"})


class Deriving(Model):
    """A target with a tensor that is computed from its weights, in place, when it installs."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.sums = torch.zeros(SHAPE[0], dtype=torch.int64)

    def derived(self) -> torch.Tensor:
        return self.fragments[0].view.view(torch.int32).sum(1)

    def refit_install(self, *, version: int) -> None:
        self.sums.copy_(self.derived())


def derives(me: Rank, where: str, held: Ranks, rank: int, versions: Sequence[int]) -> list[Any]:
    """Take pushes; after each, whether what is derived is right, its address, and itself."""
    model, found = Deriving(held[rank]), []
    with RefitSession.target(model, rendezvous=where, engine="a", rank=rank, size=len(held), deadline=20) as session:
        for version in versions:
            me.meet("next")
            session.receive()
            assert model.faults(version=version) == []
            found.append((torch.equal(model.sums, model.derived()), model.sums.data_ptr(), model.sums.tolist()))
    return found


def test_what_is_derived_from_weights_is_refreshed_in_place(ranks: Crew) -> None:
    where, versions = free_rendezvous(), (1, 2, 3)
    jobs: list[Job] = [(gives_all, (where, cut(0), rank, versions)) for rank in range(2)]
    jobs += [(derives, (where, cut(1), rank, versions)) for rank in range(2)]
    with ranks.at_work(jobs) as working:
        for _ in versions:
            meet(working, "next")
        found = [rank.result() for rank in working]
    for each in found[2:]:
        right, addresses, values = zip(*each, strict=True)
        assert right == (True, True, True)
        assert len(set(addresses)) == 1
        assert all(a != b for a, b in pairwise(values))


class Read(torch.nn.Module):
    """A module that runs in a thread of its own while pushes come in. A forward returns the values that it met."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (torch.full((64, 64), -1.0) for _ in range(2))
        self.running = threading.Lock()

    def forward(self) -> set[float]:
        return {float(each) for tensor in (self.first, self.last) for each in (tensor.min(), tensor.max())}

    def refit_fragments(self) -> list[Fragment]:
        whole = Box.whole((64, 64))
        return [Fragment(f"{name}.w", (64, 64), whole, getattr(self, name)) for name in ("first", "last")]

    def refit_fence(self, reason: str) -> None:
        """A forward that began before the fence was closed ends before anything is written."""
        with self.running:
            pass


class Reader:
    """The thread that reads, and all that it met: a set of values, or the class of the error."""

    def __init__(self, module: Read) -> None:
        self.met: list[Any] = []
        self._module = module
        self._turn = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="reader")

    def _read(self) -> None:
        while not self._ended:
            with self._module.running:
                try:
                    met: Any = self._module()
                except FencedError:
                    met = FencedError
            with self._turn:
                self.met.append(met)
                self._turn.notify_all()

    def again(self) -> None:
        """Wait until the thread has read once more, from beginning to end."""
        with self._turn:
            enough = len(self.met) + 2
            assert self._turn.wait_for(lambda: len(self.met) >= enough, 20)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.join()


class WaitingGroup:
    """A group of gloo's that calls back before every receive."""

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    def __init__(self, group: Any, called: Callable[[], object]) -> None:
        self._called = called
        self._group = group
        self.send, self.abort, self.close = group.send, group.abort, group.close

    def recv(self, buffer: torch.Tensor, *, peer: int) -> Any:
        self._called()
        return self._group.recv(buffer, peer=peer)


class Waiting(GlooFabric):
    """gloo that calls back before every receive."""

    def __init__(self, called: Callable[[], object]) -> None:
        super().__init__()
        self._called = called

    def connect(self, **how: Any) -> Any:
        return WaitingGroup(super().connect(**how), self._called)


def read_beside(_: Rank, where: str, versions: Sequence[int]) -> list[Any]:
    """Take pushes in small windows, the reader at work between any two receives; what it met."""
    module = Read()
    with Reader(module) as reader:
        fabric, seat = Waiting(reader.again), {"engine": "a", "rank": 0, "size": 1}
        with RefitSession.target(module, rendezvous=where, fabric=fabric, deadline=30, **seat) as session:
            for version in versions:
                assert session.receive().version == version
                reader.again()
    return reader.met


def gives_constants(_: Rank, where: str, versions: Sequence[int]) -> int:
    """Push tensors full of their version; the windows of a push."""
    module = Read()
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "fabric": "gloo", "deadline": 30}
    with RefitSession.source(module, window_bytes=4096, **given) as session:
        for version in versions:
            module.first.fill_(version)
            module.last.fill_(version)
            report = session.push(version=version)
    return report.windows  # type: ignore[union-attr]


def test_a_thread_that_reads_beside_pushes_never_sees_a_mix(ranks: Crew) -> None:
    where, versions = free_rendezvous(), (1, 2, 3)
    windows, met = ranks.results([(gives_constants, (where, versions)), (read_beside, (where, versions))])
    assert windows >= 8
    read = [values for values in met if values is not FencedError]
    assert [values for values in read if len(values) != 1] == []
    assert {value for values in read for value in values} == {-1.0, 1.0, 2.0, 3.0}
    assert read == sorted(read, key=min)
    assert met.count(FencedError) >= windows * len(versions)


class Buffered(torch.nn.Module):
    """A module with a buffer that isn't in checkpoints, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 2, bias=False)
        self.head = torch.nn.Linear(2, 2, bias=False)
        self.register_buffer("cache", torch.full((2,), 5.0), persistent=False)


def tells_uncovered(_: Rank, where: str, side: str, frozen: tuple[str, ...]) -> Any:
    """Push or take once; the names that no push writes, and what is there afterwards."""
    module = Buffered()
    for tensor in (module.body.weight, module.head.weight):
        torch.nn.init.constant_(tensor, 1.0 if side == "source" else 0.0)
    given: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "deadline": 20}
    if side == "source":
        module.cache.zero_()
        ignore = frozen or None
        with RefitSession.source(module, ignore=ignore, **given) as session:
            session.push(version=1)
            return session.uncovered
    with RefitSession.target(module, engine="a", frozen=frozen, **given) as session:
        session.receive()
        tensors = (module.body.weight, module.head.weight, module.cache)
        return session.uncovered, [set(tensor.flatten().tolist()) for tensor in tensors]


@pytest.mark.parametrize(
    ("frozen", "uncovered", "values"),
    [((), ("cache",), [{1.0}, {1.0}, {5.0}]), (("head.*",), ("cache", "head.weight"), [{1.0}, {0.0}, {5.0}])],
    ids=["buffers", "buffers and what is frozen"],
)
def test_a_session_tells_what_no_push_writes(
    ranks: Crew, frozen: tuple[str, ...], uncovered: tuple[str, ...], values: list[set[float]]
) -> None:
    where = free_rendezvous()
    jobs: list[Job] = [(tells_uncovered, (where, side, frozen)) for side in ("source", "target")]
    assert ranks.results(jobs) == [(), (uncovered, values)]
