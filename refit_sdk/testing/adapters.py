"""The suite that an adapter's own tests subclass: what it describes, held against the framework's loader and exporter.

    class TestAcme(AdapterSuite):
        adapter = "acme"

        def checkpoint(self): return {"w": ((6, 4), "float32")}
        def build(self, *, side, rank, size, folder): ...
        def load(self, model, tensors): ...
        def export(self, model): ...

The hooks run in rank processes, `size` of them, with a default group of torch's over gloo; an adapter is never judged
by what it says itself. Values are the judge's: of version, tensor and place.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from refit_sdk.box import Box
from refit_sdk.errors import FencedError
from refit_sdk.plugins import registry
from refit_sdk.session import RefitSession
from refit_sdk.testing import judge, torch_fill
from refit_sdk.testing.crew import Job
from refit_sdk.testing.meeting import PATIENCE, Processes
from refit_sdk.testing.models import SEED, Held, Model
from refit_sdk.testing.ranks import free_rendezvous
from refit_sdk.testing.rig import VERSIONS, raise_first

Side = Literal["source", "target"]
Described = list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Places: name, whole shape, start, stop."""


class AdapterSuite:
    """All that an adapter is held to. Set `adapter`, and say how the framework makes, loads and exports a model."""

    adapter: ClassVar[str]
    sides: ClassVar[tuple[Side, ...]] = ("source", "target")
    size: ClassVar[int] = 2
    keeps_storage: ClassVar[bool] = True
    """Whether loading writes into the storage that was described. If not, it is described anew, and its identity is
    another."""

    def checkpoint(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each tensor of the model's checkpoint."""
        raise NotImplementedError

    def build(self, *, side: Side, rank: int, size: int, folder: Path) -> Any:
        """The object that is passed to a session on this rank. `folder` is empty, and the same on all ranks."""
        raise NotImplementedError

    def load(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put whole tensors, by checkpoint name, into this rank's model, as the framework itself does."""
        raise NotImplementedError

    def export(self, model: Any) -> Mapping[str, torch.Tensor]:
        """The whole tensors of the model, by checkpoint name, as the framework itself exports them."""
        raise NotImplementedError

    def serve(self, model: Any) -> None:
        """Run the model once, as an engine would. Without a hook, fencing isn't tried."""
        raise NotImplementedError

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each side."""
        assert metafunc.cls is not None
        if "side" in metafunc.fixturenames:
            metafunc.parametrize("side", metafunc.cls.sides)

    @pytest.fixture(scope="class")
    @classmethod
    def players(cls) -> Iterator[Processes]:
        """The ranks."""
        made = Processes(cls.size + 1)
        yield made
        made.close()

    def _everywhere(self, players: Processes, body: Any, *args: Any, beside: Sequence[Job] = ()) -> list[Any]:
        cls = type(self)
        jobs: list[Job] = [
            (body, (inspect.getfile(cls), cls.__qualname__, rank, *args)) for rank in range(self.size)
        ]  # fmt: skip
        outcomes = players.outcomes([*jobs, *beside])
        raise_first(outcomes)
        return outcomes[: self.size]

    def test_exactly_one_adapter_accepts_the_model(self, players: Processes, side: Side, tmp_path: Path) -> None:
        """This one."""
        assert self._everywhere(players, accepted, side, tmp_path) == [[self.adapter]] * self.size

    def test_describes_what_the_framework_loaded(self, players: Processes, side: Side, tmp_path: Path) -> None:
        """On all ranks together everything, each place with its own values, as live views."""
        if side == "target" and not self.keeps_storage:
            pytest.skip("not run here: a target that isn't loaded, but written anew by each push")
        found = self._everywhere(players, described, side, tmp_path)
        assert [wrong for _, faults in found for wrong in faults] == []
        seen = {name: np.zeros(shape, bool) for name, (shape, _) in self.checkpoint().items()}
        for places, _ in found:
            for name, shape, start, stop in places:
                assert shape == seen[name].shape
                seen[name][tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
        assert [name for name, mask in seen.items() if not mask.all()] == [], "tensors that no rank holds all of"

    def test_a_push_moves_it(self, players: Processes, side: Side, tmp_path: Path) -> None:
        """What the framework loaded arrives; what was sent is what the framework exports. Twice."""
        where, tensors = free_rendezvous(), dict(self.checkpoint())
        other: Job = (opposite, (tensors, side, where))
        found = self._everywhere(players, took_part, side, tmp_path, where, beside=[other])
        assert [wrong for faults in found for wrong in faults] == []

    def test_a_fenced_model_does_not_serve(self, players: Processes, tmp_path: Path) -> None:
        """Until it is unfenced."""
        if "target" not in self.sides or type(self).serve is AdapterSuite.serve:
            pytest.skip("not run here: the suite doesn't say how to serve")
        assert self._everywhere(players, fenced, "target", tmp_path) == [[True, False]] * self.size


def _suite(file: str, name: str) -> AdapterSuite:
    """A suite's class, by the file that it is in: ranks can't import every test module by its name."""
    key = f"refit_suite_of {file}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Any = sys.modules[key]
    for part in name.split("."):
        found = getattr(found, part)
    suite: AdapterSuite = found()
    return suite


@contextmanager
def _model(suite: AdapterSuite, rank: int, side: Side, folder: Path) -> Iterator[Any]:
    """This rank's model, while the job's group is there."""
    store = f"file://{folder}/refit-kit-store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=suite.size)
    try:
        inner = folder / "model"
        inner.mkdir(exist_ok=True)
        yield suite.build(side=side, rank=rank, size=suite.size, folder=inner)
    finally:
        dist.destroy_process_group()


def _bits(suite: AdapterSuite, name: str, start: Sequence[int], stop: Sequence[int], version: int) -> Any:
    shape, dtype = suite.checkpoint()[name]
    return judge.expected(name, shape, start, stop, dtype, SEED, version)


def _tensors(suite: AdapterSuite, version: int) -> dict[str, torch.Tensor]:
    """A whole checkpoint of the judge's values."""
    made = {}
    for name, (shape, dtype) in suite.checkpoint().items():
        made[name] = torch.empty(shape, dtype=getattr(torch, dtype))
        torch_fill.fill(made[name], _bits(suite, name, [0] * len(shape), shape, version))
    return made


def accepted(_: Any, file: str, name: str, rank: int, side: Side, folder: Path) -> list[str]:
    """Names of the adapters that accept the model."""
    with _model(_suite(file, name), rank, side, folder) as model:
        return [offer.name for offer in registry().offers_of(f"{side}_adapter") if offer.accepts(model)]


def described(_: Any, file: str, name: str, rank: int, side: Side, folder: Path) -> tuple[Described, list[str]]:
    """The places that are described, and what is wrong with their values after each of two loads."""
    suite = _suite(file, name)
    with _model(suite, rank, side, folder) as model:
        adapter = registry().get(f"{side}_adapter", suite.adapter)(model, rank=rank, size=suite.size)
        fragments: Sequence[Any] = ()
        identities: list[Hashable] = []
        faults: list[str] = []
        for version in VERSIONS:
            suite.load(model, _tensors(suite, version))
            if side == "source":
                adapter.prepare()
            if not fragments or not suite.keeps_storage:
                fragments = adapter.describe()
            identities.append(adapter.identity())
            for each in fragments:
                right = _bits(suite, each.name, each.box.start, each.box.stop, version)
                wrong = judge.compare(torch_fill.read(each.view), right, start=each.box.start)
                faults += [f"rank {rank}, version {version}: {each.name} {mismatch}" for mismatch in wrong]
        if (identities[0] == identities[1]) != suite.keeps_storage:
            faults.append(f"rank {rank}: the identities after two loads are {identities}")
        return [(each.name, each.shape, each.box.start, each.box.stop) for each in fragments], faults


def took_part(_: Any, file: str, name: str, rank: int, side: Side, folder: Path, where: str) -> list[str]:
    """A rank of the adapter's side in two pushes; of a target, what its exporter gives that it shouldn't."""
    suite, faults = _suite(file, name), []
    common: dict[str, Any] = {
        "rendezvous": where, "rank": rank, "size": suite.size, "adapter": suite.adapter, "deadline": PATIENCE,
    }  # fmt: skip
    with _model(suite, rank, side, folder) as model:
        if side == "source":
            suite.load(model, _tensors(suite, VERSIONS[0]))
        made = RefitSession.source(model, **common) if side == "source" else RefitSession.target(
            model, engine="e", **common
        )  # fmt: skip
        with made as session:
            for version in VERSIONS:
                if side == "source":
                    suite.load(model, _tensors(suite, version))
                    session.push(version=version)
                    continue
                session.receive()
                exported = suite.export(model)
                faults += [
                    f"rank {rank}, version {version}: {tensor} {mismatch}"
                    for tensor, (shape, _) in suite.checkpoint().items()
                    for mismatch in judge.compare(
                        torch_fill.read(exported[tensor]), _bits(suite, tensor, [0] * len(shape), shape, version)
                    )
                ]
                dist.barrier()
    return faults


def opposite(_: Any, tensors: Mapping[str, tuple[tuple[int, ...], str]], side: Side, where: str) -> None:
    """The other side: one rank that describes itself and has everything."""
    model = Model([Held(name, shape, Box.whole(shape), dtype) for name, (shape, dtype) in tensors.items()])
    common: dict[str, Any] = {"rendezvous": where, "rank": 0, "size": 1, "deadline": PATIENCE}
    made = (
        RefitSession.target(model, engine="e", **common) if side == "source" else RefitSession.source(model, **common)
    )
    with made as session:
        for version in VERSIONS:
            if side == "target":
                model.fill(version=version)
                session.push(version=version)
            else:
                session.receive()
                assert model.faults(version=version) == []


def fenced(_: Any, file: str, name: str, rank: int, side: Side, folder: Path) -> list[bool]:
    """Whether a fenced model, and one that was unfenced, refuses to serve."""
    suite = _suite(file, name)
    with _model(suite, rank, side, folder) as model:
        adapter = registry().get("target_adapter", suite.adapter)(model, rank=rank, size=suite.size)
        adapter.describe()
        adapter.fence("torn by the test")
        found = [_refuses(suite, model)]
        adapter.unfence()
        return [*found, _refuses(suite, model)]


def _refuses(suite: AdapterSuite, model: Any) -> bool:
    try:
        suite.serve(model)
    except FencedError:
        return True
    return False
