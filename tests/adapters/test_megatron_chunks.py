"""Megatron's modules, chunks and configs as they can be told apart without Megatron."""

from types import SimpleNamespace

import pytest
import torch
from refit_adapters._hf_config import read
from refit_adapters._megatron_chunks import chunks_of, hf_config_of, refusals
from refit_adapters._megatron_sync import check
from refit_adapters._megatron_version import about, missing
from refit_adapters.fsdp import FsdpAdapter
from refit_adapters.megatron import MegatronAdapter, MegatronModel

from refit_sdk.errors import LayoutError
from refit_sdk.plugins import choose_adapter, registry


class Gpt(torch.nn.Module):
    """Looks like a chunk of Megatron's from outside."""

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.layer = torch.nn.Linear(2, 2)

    def sharded_state_dict(self, metadata=None):
        return {}


class Wrapper(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


class DistributedDataParallel(Wrapper):
    def __init__(self, module, **config):
        super().__init__(module)
        self.bucket_groups = []
        self.ddp_config = SimpleNamespace(**config)


Gpt.__module__ = "megatron.core.models.gpt.gpt_model"
DistributedDataParallel.__module__ = "megatron.core.distributed.distributed_data_parallel"


@pytest.mark.parametrize(
    ("model", "accepted"),
    [
        (Gpt(), True),
        ([Gpt(), Gpt()], True),
        ([DistributedDataParallel(Wrapper(Gpt()))], True),
        (MegatronModel(Gpt()), True),
        (torch.nn.Linear(1, 1), False),
        ([Gpt(), torch.nn.Linear(1, 1)], False),
        ({"w": torch.ones(1)}, False),
        (None, False),
    ],
    ids=["model", "chunks", "wrapped", "with config", "a linear", "mixed", "a mapping", "nothing"],
)
def test_accepts(model, accepted):
    assert MegatronAdapter.accepts(model) is accepted
    assert not (accepted and FsdpAdapter.accepts(model))


def test_exactly_one_adapter_takes_a_chunk(monkeypatch):
    monkeypatch.setattr(MegatronAdapter, "missing", classmethod(lambda cls: None))
    for model in (Gpt(), [DistributedDataParallel(Gpt())], MegatronModel(Gpt())):
        assert choose_adapter(registry(), "source_adapter", model) is MegatronAdapter


def test_wrappers_are_walked_through_and_ddp_is_kept():
    ddp = DistributedDataParallel(Wrapper(Gpt()))
    (chunk,) = chunks_of(ddp)
    assert chunk.ddp is ddp
    assert type(chunk.module) is Gpt


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_mlp_glu_interleave_size", 32), ("moe_shared_expert_glu_interleave_size", 32),
        ("attention_output_gate", True), ("gtp_weight_remat_size", 2), ("expert_gtp_weight_remat_size", 2),
        ("fp8_param", True), ("fp4_param", True), ("heterogeneous_block_specs", True), ("use_mup", True),
        ("rotary_interleaved", True),
    ],
)  # fmt: skip
def test_settings_that_are_refused(setting, value):
    with pytest.raises(LayoutError, match=rf"{setting}={value}: \w+"):
        chunks_of(Gpt(**{setting: value}))


def test_settings_at_rest_are_not_refused():
    config = SimpleNamespace(
        moe_mlp_glu_interleave_size=None, attention_output_gate=False, gtp_weight_remat_size=1, fp8_param=False
    )
    assert list(refusals(config)) == []
    assert list(refusals(SimpleNamespace(rotary_interleaved=True, multi_latent_attention=True))) == []


def test_all_refused_settings_are_one_error():
    with pytest.raises(LayoutError, match=r"(?s)attention_output_gate.*fp8_param"):
        chunks_of(Gpt(attention_output_gate=True, fp8_param=True))


@pytest.mark.parametrize(
    "module", ["megatron.core.distributed.fsdp.mcore_fsdp_adapter", "megatron.core.distributed.torch_fully_sharded_x"]
)
def test_wrappers_with_shards_of_their_own_are_refused(module):
    made = type("FullyShardedDataParallel", (Wrapper,), {"__module__": module})
    with pytest.raises(LayoutError, match=r"FullyShardedDataParallel is refused: (it holds|Megatron cuts)"):
        chunks_of(made(Gpt()))


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([Gpt(virtual_pipeline_model_parallel_size=2)], "1 chunks were given, .*size=2"),
        ([Gpt(), Gpt()], "2 chunks were given, .*size=1"),
        ([], "no chunk"),
    ],
    ids=["one missing", "one too many", "none"],
)
def test_chunks_must_be_all_there(chunks, text):
    with pytest.raises(LayoutError, match=text):
        chunks_of(chunks)


def test_a_stage_twice_is_refused():
    chunks = [Gpt(virtual_pipeline_model_parallel_size=2) for _ in range(2)]
    for chunk in chunks:
        chunk.vp_stage = 0
    with pytest.raises(LayoutError, match=r"virtual stages \[0, 0\], not 0 to 1"):
        chunks_of(chunks)
    with pytest.raises(LayoutError, match="given twice"):
        chunks_of([chunks[0], chunks[0]])


def test_a_gather_that_cannot_be_completed_is_refused():
    chunks = chunks_of(DistributedDataParallel(Gpt(), overlap_param_gather=True))
    with pytest.raises(LayoutError, match=r"puts its parameter all-gather off .* train without"):
        check(chunks)
    check(chunks_of(DistributedDataParallel(Gpt(), overlap_param_gather=False)))


def test_the_hugging_face_config_is_read_off_the_model():
    model = Gpt()
    assert hf_config_of(chunks_of(model)) is None
    model.config.hf_config = {"model_type": "llama"}
    assert hf_config_of(chunks_of(model)) == {"model_type": "llama"}


def test_a_config_is_read_from_a_path_a_mapping_or_an_object(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=99)
    config.save_pretrained(tmp_path)
    for given in (tmp_path, str(tmp_path / "config.json"), config, config.to_dict()):
        assert (read(given)["model_type"], read(given)["vocab_size"]) == ("llama", 99)


def test_what_is_no_config_is_refused(tmp_path):
    tmp_path.joinpath("config.json").write_text("[]")
    for given, text in ((7, "hf_config=7 is a int"), (tmp_path, "holds a list"), (tmp_path / "no", "can't be read")):
        with pytest.raises(LayoutError, match=text):
            read(given)


def test_the_doctor_is_told_what_lacks():
    said = missing()
    if said is None:
        assert "singleton shards" in about()
    else:
        assert "install megatron-core" in said
        assert about() == ""


def test_old_versions_and_checkouts_are_told_apart(monkeypatch, tmp_path):
    def made(version, words):
        for file in ("transformer/transformer_block.py", "transformer/moe/experts.py"):
            tmp_path.joinpath(file).parent.mkdir(parents=True, exist_ok=True)
            tmp_path.joinpath(file).write_text(words)
        tmp_path.joinpath("package_info.py").write_text(version)
        monkeypatch.setattr("refit_adapters._megatron_version.root", lambda: tmp_path)

    made("MAJOR = 0\nMINOR = 12\nPATCH = 1\n", "")
    assert missing() == "megatron-core 0.12.1 is too old; install 0.16 or later"
    made("MAJOR = 0\nMINOR = 18\nPATCH = 1\n", "")
    assert "megatron-core 0.18.1 has no singleton shards of layers, singleton shards of experts" in str(missing())
    made("MAJOR = 0\nMINOR = 18\nPATCH = 1\n", "singleton_local_shards")
    assert missing() is None
    assert about().startswith("megatron-core 0.18.1 (tested with 0.19.2): singleton shards of layers")
    assert "; not there: parts of Mamba layers" in about()
