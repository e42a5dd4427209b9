"""A real engine, whose parameters are written where they are: its tokens are transformers' after each push."""

import subprocess
import sys
from pathlib import Path

import engines
import pytest
import refit_unpacked
import sources
import tiny
import torch
from refit_adapters.vllm import VllmAdapter, VllmModel

from refit_sdk.errors import FencedError
from refit_sdk.session import RefitSession

SUPPORT = Path(__file__).parent / "support"


@pytest.fixture(scope="module", autouse=True)
def unpacked():
    refit_unpacked.unpack()


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe", "llama", "gemma3"])
def test_tokens_are_those_of_transformers_after_each_push(kind, tmp_path):
    """Started on no weights; three pushes, from two source processes, by the session's own means."""
    versions = [tiny.save(kind, tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    wanted = [tiny.tokens(folder) for folder in versions]
    assert wanted[0] != wanted[1]
    where = engines.rendezvous()
    with engines.engine(versions[0], load_format="dummy") as llm:
        assert engines.generated(llm) not in wanted
        worker = engines.worker(llm)
        model = VllmModel(worker.model_runner.get_model(), config=worker.vllm_config)
        addresses = [parameter.data_ptr() for parameter in model.model.parameters()]
        sources.put(versions[1], tmp_path / "live")
        with (
            sources.sources(tmp_path / "live", where, engines=["vllm"]) as pushing,
            RefitSession.target(model, rendezvous=where, engine="vllm", rank=0, size=1, deadline=60) as session,
        ):
            pushing.answers("joined")
            for number, choice in enumerate((1, 0, 1), start=1):
                sources.put(versions[choice], tmp_path / "live")
                pushing.ask(number)
                session.receive()
                pushing.answers("pushed")
                llm.reset_prefix_cache()
                assert engines.generated(llm) == wanted[choice]
        assert [parameter.data_ptr() for parameter in model.model.parameters()] == addresses


def test_a_fenced_model_does_not_run_and_what_is_rebound_is_seen(tmp_path):
    folder = tiny.save("qwen3", tmp_path, seed=0)
    with engines.engine(folder) as llm:
        worker = engines.worker(llm)
        model = worker.model_runner.get_model()
        adapter = VllmAdapter(VllmModel(model, config=worker.vllm_config), rank=0, size=1)
        adapter.describe()
        assert str(adapter.shares).startswith("100.0 % of ")
        before = adapter.identity()
        adapter.fence("a push broke off")
        with pytest.raises(FencedError, match="a push broke off"):
            model(input_ids=torch.tensor([1]), positions=torch.tensor([0]))
        adapter.unfence()
        assert adapter.identity() == before
        norm = model.model.norm.weight
        norm.data = norm.data.clone()
        assert adapter.identity() != before


STOCK = """
import sys
sys.path.append(sys.argv[1])
import engines
from pathlib import Path
from refit_adapters.vllm import VllmAdapter, VllmModel
with engines.engine(Path(sys.argv[2])) as llm:
    worker = engines.worker(llm)
    model = VllmModel(worker.model_runner.get_model(), config=worker.vllm_config)
    VllmAdapter(model, rank=0, size=1).describe()
"""


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3-moe"])
def test_an_engine_that_packs_its_weights_is_refused_by_name(kind, tmp_path):
    """vLLM's CPU backend as it is: dense layers, the head and experts are computed with from packed copies."""
    folder = tiny.save(kind, tmp_path, seed=0)
    command = [sys.executable, "-c", STOCK, str(SUPPORT), str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200).stderr
    assert "can't be written in place, as it doesn't compute with what was loaded:" in said
    (dense,) = [line for line in said.splitlines() if "is a Parameter, and a ModelWeightParameter was loaded" in line]
    assert "model.layers.1.self_attn.qkv_proj.weight" in dense
    (head,) = [line for line in said.splitlines() if "is computed with from a packed copy" in line]
    assert "model.embed_tokens.weight" in head
    if kind == "qwen3-moe":
        (experts,) = [line for line in said.splitlines() if "is laid out anew for the experts' backend CPU" in line]
        assert "model.layers.0.mlp.experts.routed_experts.w13_weight" in experts
