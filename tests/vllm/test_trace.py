"""The layout that the trace tells, against coordinates that went through vLLM's own loader: every element of every
parameter of every rank, padding too."""

import fake_world
import kinds
import pytest
import refit_unpacked
import torch
from probe import coordinates, probe
from refit_adapters.loadtrace import fragments
from refit_adapters.vllm import VllmAdapter, VllmModel

WITH_EXPERTS = ("qwen3-moe", "mixtral", "deepseek-v3", "gpt-oss", "qwen3-next")
LANDING = {"nemotron-h": [(("backbone.layers.0.mixer.A_log",), ("model.layers.0.mixer.A",))]}
"""What can't be written directly, by kind."""


@pytest.fixture(scope="module", autouse=True)
def unpacked():
    refit_unpacked.unpack()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    made = {}

    def write(name):
        if name not in made:
            made[name] = kinds.write(name, tmp_path_factory.mktemp(name))
        return made[name]

    return write


def cases():
    for name in kinds.CONFIGS:
        for tp in (1, 2, 4, 8):
            yield name, tp, False
            if name in WITH_EXPERTS and tp > 1:
                yield name, tp, True


def differing(adapter, model, numbers):
    """Parameters of which the trace says otherwise than the loader does."""
    found = adapter.trace
    truth = probe(model, numbers)
    mine = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in truth.items()}
    for fragment in fragments(found, mine):
        fragment.view.copy_(numbers[fragment.name][fragment.box.slices()])
    for constant in found.constants:
        assert constant.value == 0
        view = mine[constant.into].as_strided(constant.shape, constant.strides, constant.offset)
        assert not view.any(), "a constant lies where something was loaded"
    landed = {into for group in found.groups for into in group.into}
    return [name for name in truth if name not in landed and not torch.equal(mine[name], truth[name])]


@pytest.mark.parametrize(("name", "tp", "ep"), list(cases()), ids=lambda value: str(value))
def test_every_element_is_where_the_loader_puts_it(written, name, tp, ep):
    kind = written(name)
    numbers = coordinates(kind.checkpoint)
    for rank in range(tp):
        with fake_world.rank_of(kind.path, tp=tp, rank=rank, ep=ep) as (model, config):
            adapter = VllmAdapter(VllmModel(model, config=config, checkpoint=kind.checkpoint), rank=rank, size=tp)
            adapter.describe()
            assert [(group.names, group.into) for group in adapter.trace.groups] == LANDING.get(name, [])
            assert differing(adapter, model, numbers) == []
            share = adapter.shares
            assert share.direct / (share.direct + share.lands) > 0.99


def test_what_lands_is_installed_by_the_loader(written):
    kind = written("nemotron-h")
    for rank in range(2):
        with fake_world.rank_of(kind.path, tp=2, rank=rank) as (model, config):
            adapter = VllmAdapter(VllmModel(model, config=config, checkpoint=kind.checkpoint), rank=rank, size=2)
            (scratch,) = [f for f in adapter.describe() if f.name.endswith("A_log")]
            values = torch.linspace(-1, 1, 8).to(scratch.view.dtype)
            scratch.view.copy_(values)
            adapter.install(version=1)
            installed = dict(model.named_parameters())["model.layers.0.mixer.A"]
            assert torch.equal(installed.data, -torch.exp(values.float())[rank * 4 : rank * 4 + 4])


def test_halves_of_latent_attention_are_made_anew_where_they_are(written):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    kind = written("deepseek-v3")
    with fake_world.rank_of(kind.path, tp=2, rank=1) as (model, config):
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.zero_()
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        adapter = VllmAdapter(VllmModel(model, config=config, checkpoint=kind.checkpoint), rank=1, size=2)
        described = adapter.describe()
        before, identity = derived(model), adapter.identity()
        assert len(before) == 4
        for fragment in described:
            fragment.view.copy_(torch.rand(fragment.view.shape))
        adapter.install(version=1)
        after = derived(model)
        assert {name: tensor.data_ptr() for name, tensor in after.items()} == {
            n: t.data_ptr() for n, t in before.items()
        }
        assert adapter.identity() == identity
        parameters = dict(model.named_parameters())
        for layer in range(2):
            path = f"model.layers.{layer}.self_attn."
            kv_b = parameters[path + "kv_b_proj.weight"].detach().view(4, 64, 32)
            assert torch.equal(after[path + "mla_attn.mla_attn.W_UK_T"], kv_b[:, :32])
            assert torch.equal(after[path + "mla_attn.mla_attn.W_UV"], kv_b[:, 32:].transpose(1, 2))


def derived(model):
    return {name: tensor for name, tensor in model.named_parameters() if ".W_U" in name}


def test_eighteen_thousand_tensors_of_a_real_size(tmp_path):
    """Qwen3-30B-A3B at its true size, one rank of eight, without memory."""
    kind = kinds.write("qwen3-30b-a3b", tmp_path)
    assert len(kind.checkpoint) > 18000
    with fake_world.rank_of(kind.path, tp=8, rank=3, ep=True, meta=True) as (model, config):
        adapter = VllmAdapter(VllmModel(model, config=config, checkpoint=kind.checkpoint), rank=3, size=8)
        adapter.describe()
        written = sum(landing.box.size for landing in adapter.trace.landings)
        assert written == sum(parameter.numel() for parameter in model.parameters())
