"""Names: what an adapter calls a tensor is what `save_pretrained` calls it, and wrappers leave no trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_adapters._checkpoint import Piece, _decode
from refit_adapters.dtensor import DTensorAdapter
from safetensors.torch import load_file

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 64, "intermediate_size": 48, "moe_intermediate_size": 16, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
MLA = {
    "head_dim": None, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
}  # fmt: skip

MODELS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "Qwen3-tied": ("Qwen3ForCausalLM", "Qwen3Config", {"tie_word_embeddings": True}),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 4}),
    "GptOss": ("GptOssForCausalLM", "GptOssConfig", {"num_local_experts": 4}),
    "DeepseekV3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", MLA),
}


def tiny(name):
    import transformers

    model, config, extra = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**{**SIZES, **extra}))


def composite(name):
    import transformers

    text = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


def described(model):
    return DTensorAdapter(model, rank=0, size=1).describe()


def as_saved(model, folder):
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_same(fragments, saved):
    assert {f.name for f in fragments} == set(saved)
    for fragment in fragments:
        whole = saved[fragment.name]
        assert fragment.shape == tuple(whole.shape), fragment.name
        assert torch.equal(fragment.view, whole[fragment.box.slices()]), fragment.name


@pytest.mark.parametrize("name", MODELS)
def test_names_and_values_are_those_of_save_pretrained(name, tmp_path):
    model = tiny(name)
    assert_same(described(model), as_saved(model, tmp_path))


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VLMoe"])
def test_composite_models_too(name, tmp_path):
    model = composite(name)
    assert_same(described(model), as_saved(model, tmp_path))


def test_a_loaded_model_keeps_the_names_it_was_loaded_from(tmp_path):
    import transformers

    tiny("Mixtral").save_pretrained(tmp_path / "first")
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "first")
    fragments = described(model)
    assert "model.layers.1.block_sparse_moe.experts.3.w2.weight" in {f.name for f in fragments}
    assert_same(fragments, as_saved(model, tmp_path / "second"))


def test_fused_experts_are_views_of_the_live_parameter():
    model = tiny("Qwen3Moe")
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    views = {f.name: f.view for f in described(model)}
    up = views["model.layers.1.mlp.experts.3.up_proj.weight"]
    with torch.no_grad():
        up.fill_(5.0)
    assert torch.equal(fused[3, 16:], torch.full((16, 32), 5.0))
    assert not (fused[3, :16] == 5.0).any()
    assert not (fused[:3] == 5.0).any()


def test_what_isnt_a_region_of_one_parameter_is_refused_by_name():
    import transformers
    from transformers.core_model_loading import Interleave, WeightConverter

    model = tiny("Llama")
    model._weight_conversions = [
        WeightConverter("gate_proj.weight", "gate_proj.weight", operations=[Interleave(dim=0)])
    ]
    assert isinstance(model, transformers.PreTrainedModel)
    with pytest.raises(LayoutError, match=r"LlamaForCausalLM: .*model\.layers\.0\.mlp\.gate_proj\.weight"):
        described(model)


class Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.module = inner


def layers():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def compiled(model):
    return torch.compile(model, backend="eager")


def checkpointed(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model[0] = checkpoint_wrapper(model[0])
    return checkpoint_wrapper(model)


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, torch.nn.DataParallel, compiled, checkpointed, lambda m: compiled(Wrapper(Wrapper(m)))],
    ids=["module", "DataParallel", "compiled", "checkpointed", "all"],
)
def test_wrapper_prefixes_are_stripped(wrap):
    names = [f.name for f in described(wrap(layers()))]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_child_called_module_beside_others_keeps_its_name():
    model = Wrapper(torch.nn.Linear(2, 2))
    model.head = torch.nn.Linear(2, 1, bias=False)
    assert [f.name for f in described(model)] == ["module.weight", "module.bias", "head.weight"]


def test_two_tensors_under_one_stripped_name_are_refused():
    model = [torch.nn.Linear(2, 2), Wrapper(torch.nn.Linear(2, 2))]
    with pytest.raises(LayoutError, match="two tensors have the checkpoint name 'weight'"):
        described(model)


def test_pipeline_stages_are_one_model():
    whole = layers()
    stages = [torch.nn.ModuleDict({"0": whole[0]}), torch.nn.ModuleDict({"1": whole[1]})]
    assert [f.name for f in described(stages)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


class LoraLinear(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 1, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(1, 4, bias=False)})


def test_an_unmerged_lora_wrapper_is_refused_with_what_to_do():
    model = layers()
    model[0] = LoraLinear(model[0])
    with pytest.raises(LayoutError, match=r"^0: wrapped by a LoRA adapter .* merge_and_unload\(\)"):
        described(model)
    model[0] = model[0].base_layer
    assert len(described(model)) == 4


def test_a_parametrized_weight_is_refused():
    model = layers()
    torch.nn.utils.parametrizations.orthogonal(model[0])
    with pytest.raises(LayoutError, match="remove_parametrizations"):
        described(model)


def rearranged(tensor, steps):
    """A view of a tensor by narrowing, transposing, selecting or inserting dims, as drawn."""
    for kind, number in steps:
        dim = number % max(tensor.ndim, 1)
        if kind == "narrow" and tensor.ndim and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 1, tensor.shape[dim] - 1)
        elif kind == "transpose" and tensor.ndim > 1:
            tensor = tensor.transpose(dim, 0)
        elif kind == "select" and tensor.ndim:
            tensor = tensor.select(dim, tensor.shape[dim] - 1)
        elif kind == "unsqueeze":
            tensor = tensor.unsqueeze(dim)
    return tensor


@given(
    shape=st.lists(st.integers(1, 4), max_size=4),
    steps=st.lists(
        st.tuples(st.sampled_from(["narrow", "transpose", "select", "unsqueeze"]), st.integers(0, 3)), max_size=5
    ),
    data=st.data(),
)
def test_any_rearranged_view_is_found_again_in_any_shard(shape, steps, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    piece = _decode("w", rearranged(whole, steps), whole)
    cuts = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))) for n in shape]
    box = Box((a for a, _ in cuts), (b for _, b in cuts))
    expected = rearranged(whole, steps)
    assert piece.shape == tuple(expected.shape)
    taken = None if box.is_empty else piece.take(box, whole[box.slices()])
    inside = torch.zeros(whole.shape, dtype=torch.bool)
    inside[box.slices()] = True
    assert (0 if taken is None else taken[0].size) == int(rearranged(inside, steps).sum())
    if taken is not None:
        assert torch.equal(taken[1], expected[taken[0].slices()])


@pytest.mark.parametrize(
    "view",
    [torch.empty(4, 6).reshape(24), torch.empty(4, 6)[:, ::2], torch.empty(4, 6).view(4, 2, 3).transpose(1, 2)],
    ids=["flattened", "strided", "interleaved"],
)
def test_views_that_are_no_region_are_not_decoded(view):
    assert _decode("w", view, torch.empty(4, 6)) is None


def test_a_piece_of_a_whole_parameter_is_the_parameter():
    tensor = torch.arange(6.0).view(2, 3)
    box, view = Piece.whole("w", (2, 3)).take(Box.whole((2, 3)), tensor)
    assert (box, view.data_ptr()) == (Box.whole((2, 3)), tensor.data_ptr())
