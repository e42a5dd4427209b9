"""Names as data: what the tables say is what transformers writes, and users add their own."""

import json

import pytest
import transformers
from refit_adapters.architectures import names_for, refit_register_architectures
from refit_adapters.architectures.roles import ROLES, shape_of, sizes_of
from transformers.core_model_loading import revert_weight_conversion

from refit_sdk import plugins
from refit_sdk.errors import LayoutError, PluginError
from refit_sdk.plugins import Offer, Origin, Registry

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "vocab_size": 40, "intermediate_size": 48,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
MAMBA = {
    "layers_block_type": ["mamba", "attention", "mlp", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 8,
    "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24, "chunk_size": 16,
}  # fmt: skip
CASES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3 with biases": {"attention_bias": True},
    "qwen3_moe": EXPERTS,
    "qwen3_moe with dense layers": {**EXPERTS, "mlp_only_layers": [1]},
    "deepseek_v3": LATENT,
    "deepseek_v3 without q ranks": {**LATENT, "q_lora_rank": None},
    "nemotron_h": MAMBA,
}


def written(model_type, differing):
    """Config, and the shape of each tensor, that transformers writes."""
    import torch

    stated = {**COMMON, **differing}
    if stated["head_dim"] is None:
        del stated["head_dim"]
    config = transformers.AutoConfig.for_model(model_type, **stated)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = revert_weight_conversion(model, model.state_dict())
    # Nemotron-H's checkpoints have the name that transformers reads, not the one that it writes.
    names = {name.replace("backbone.embedding.", "backbone.embeddings."): t.shape for name, t in state.items()}
    return json.loads(json.dumps(config.to_dict(), default=str)), {name: tuple(shape) for name, shape in names.items()}


def told(architecture, config):
    """Every tensor that the tables know, by name, with its shape; for all layers and experts."""
    sizes = sizes_of(architecture, config)
    found = {}
    for role, template in architecture.names.items():
        for layer in range(sizes["layers"]):
            for expert in range(sizes.get("experts", 1)):
                found.setdefault(template.format(layer=layer, expert=expert), []).append(shape_of(role, sizes))
    return found


@pytest.mark.parametrize("case", CASES)
def test_tables_have_what_transformers_writes_in_its_shapes(case):
    config, shapes = written(case.split()[0], CASES[case])
    architecture = names_for(config)
    known = told(architecture, config)
    assert sorted(shapes.keys() - known.keys()) == []
    assert {name for name, shape in shapes.items() if shape not in known[name]} == set()


def test_every_role_of_a_table_has_a_shape():
    for architecture in refit_register_architectures():
        assert set(architecture.names) <= ROLES.keys()
        unknown = {name for role in architecture.names for dim in ROLES[role] for name in parts(dim)}
        derived = {"head_dim", "kv_heads", "expert_in", "1", "2"}
        assert unknown - architecture.sizes.keys() - derived == set(), architecture.name


def parts(dim):
    return dim.replace("+", "*").split("*")


def test_templates_ask_for_numbers_that_there_are():
    for architecture in refit_register_architectures():
        for template in architecture.names.values():
            assert "{" not in template.format(layer=0, expert=0)


class Mine:
    name = "mine"
    model_types = ("mine",)
    names = {"embed": "wte.weight"}  # noqa: RUF012
    sizes = {"vocab": "vocab_size"}  # noqa: RUF012


def offer(offered, plugin="mine"):
    return Offer("architecture", offered.name, offered, Origin(plugin, plugin, plugin, "1"))


def test_a_plugins_architecture_is_found(monkeypatch):
    monkeypatch.setattr("refit_adapters.architectures.registry", lambda: Registry((offer(Mine),)))
    assert names_for({"model_type": "mine"}) is Mine
    assert names_for({"model_type": "llama"}) is None


def test_two_for_one_model_are_an_error_with_both(monkeypatch):
    class Other(Mine):
        name = "other"

    both = Registry((offer(Mine), offer(Other, "theirs")))
    monkeypatch.setattr("refit_adapters.architectures.registry", lambda: both)
    with pytest.raises(PluginError, match=r"'mine' of mine .* and 'other' of theirs .*REFIT_PLUGINS=-theirs"):
        names_for({"model_type": "mine"})


def test_a_config_without_a_model_type_is_an_error():
    with pytest.raises(LayoutError, match="no model_type"):
        names_for({"vocab_size": 8})


def test_what_is_no_architecture_is_told(monkeypatch):
    class Wrong:
        name = "wrong"
        model_types = "llama"
        names = {}  # noqa: RUF012

    from refit_sdk.adapter import Architecture
    from refit_sdk.interface import faults

    assert faults(Mine, Architecture) == ()
    assert faults(Wrong, Architecture) == (
        "its model_types is 'llama', not a tuple",
        "its sizes is None, not a Mapping",
    )


def test_the_six_are_registered():
    known = {"deepseek_v3", "llama", "nemotron_h", "qwen2", "qwen3", "qwen3_moe"}
    assert known <= set(plugins.registry().names("architecture"))
