"""vLLM led through pushes by a session: real engines and workers, found by the entry point, and real sources."""

import os
from pathlib import Path

import engines
import pytest
import sources
import tiny
from refit_adapters.vllm_control import VllmEngine

from refit_sdk.errors import PushError
from refit_sdk.session import RefitSession

PLUGIN = Path(__file__).parent / "support" / "plugin"
STAGES = {"pause", "finish", "caches", "resume"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two versions of a kind, and the tokens of each."""
    made = {}

    def versions(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            paths = [tiny.save(kind, folder / str(seed), seed=seed) for seed in (0, 1)]
            made[kind] = paths, [tiny.tokens(path) for path in paths]
        return made[kind]

    return versions


@pytest.fixture
def unpacked_workers(monkeypatch):
    """Workers find the plug-in that keeps the CPU's weights unpacked beside ours."""
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(PLUGIN), known])))
    monkeypatch.setenv("REFIT_TEST_UNPACKED", "1")


def test_the_backend_is_registered_once():
    from refit_adapters import vllm_plugin
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for _ in range(2):
        vllm_plugin.register()
    made = WeightTransferEngineFactory._registry["refit"]()
    assert made is vllm_plugin.RefitWeightTransferEngine
    assert made.init_info_cls is vllm_plugin.InitInfo


@pytest.mark.parametrize(
    ("kind", "options"),
    [("qwen3-tied", {}), ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True})],
    ids=["one worker", "two workers, experts apart"],
)
def test_an_llm_object_serves_each_version(kind, options, checkpoints, unpacked_workers, tmp_path):
    """One script: source rank 0 is beside the object, rank 1 in a process of its own; the engine is others still."""
    versions, wanted = checkpoints(kind)
    where = engines.rendezvous()
    live = tmp_path / "live"
    sources.put(versions[1], live)
    stated = {"workers": True, "load_format": "dummy", "weight_transfer_config": {"backend": "refit"}, **options}
    with (
        engines.engine(versions[0], **stated) as llm,
        sources.sources(live, where, size=2, first=1, engines=["vllm"]) as others,
        RefitSession.source(live, rendezvous=where, rank=0, size=2, engines=[VllmEngine(llm)], deadline=60) as session,
    ):
        others.answers("joined")
        for number, choice in enumerate((1, 0, 1), start=1):
            sources.put(versions[choice], live)
            others.ask(number)
            report = session.push(version=number)
            others.answers("pushed")
            assert report.seconds.keys() >= STAGES
            assert report.engines["vllm"].state == "complete"
            assert engines.generated(llm) == wanted[choice]
            assert llm.get_weight_version() == str(number)
        failed_push_stays_fenced(session, others, llm)
        sources.put(versions[0], live)
        others.ask(5)
        session.push(version=5)
        others.answers("pushed")
        assert engines.generated(llm) == wanted[0]


def failed_push_stays_fenced(session, others, llm):
    """A window that fails in the middle: the error says how to recover, and the engine stays paused."""

    def fail(done, total):
        raise RuntimeError("out of luck")

    session.watch(fail)
    others.ask(4)
    with pytest.raises(PushError, match=r"out of luck.*vllm: it stays paused and fenced; push again"):
        session.push(version=4)
    session.watch(None)
    assert all("out of luck" in said for said in others.answers("refused"))
    assert llm.llm_engine.is_sleeping()
    assert llm.get_weight_version() == "3"
