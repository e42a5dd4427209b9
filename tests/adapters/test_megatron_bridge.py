"""What is taken of Megatron-Bridge's mappings: names of those that only rename, cut and fuse as our formats do."""

import pytest
from refit_adapters._megatron_bridge import _names, names_from_bridge

from refit_sdk.errors import LayoutError


class AutoMapping:
    def __init__(self, hf_param, permute_dims=None):
        self.hf_param, self.permute_dims = hf_param, permute_dims


class QKVMapping(AutoMapping):
    pass


class GatedMLPMapping(AutoMapping):
    pass


class ZeroCentred(AutoMapping):
    pass


LAYER = "decoder.layers.70001"


def names(known):
    return dict(_names(known.get))


def test_numbers_become_places():
    known = {
        f"{LAYER}.mlp.experts.linear_fc2.weight80002": AutoMapping("h.70001.ffn.80002.down"),
        f"{LAYER}.self_attention.linear_qkv.weight": QKVMapping({x: f"h.70001.{x}" for x in "qkv"}),
        f"{LAYER}.mlp.linear_fc1.weight": GatedMLPMapping({"gate": "h.70001.g", "up": "h.70001.u"}),
        "output_layer.weight": AutoMapping("out.weight"),
    }
    assert names(known) == {
        "head": "out.weight",
        "expert.down": "h.{layer}.ffn.{expert}.down",
        "attention.q": "h.{layer}.q",
        "attention.k": "h.{layer}.k",
        "attention.v": "h.{layer}.v",
        "mlp.gate": "h.{layer}.g",
        "mlp.up": "h.{layer}.u",
    }


@pytest.mark.parametrize(
    "mapping",
    [ZeroCentred("norm.weight"), AutoMapping("norm.weight", permute_dims=(1, 0)), AutoMapping({"a": "b"})],
    ids=["another kind", "permuted", "several"],
)
def test_mappings_that_do_more_have_no_name(mapping):
    assert names({"decoder.final_layernorm.weight": mapping}) == {}


def test_bridges_that_change_values_are_refused(monkeypatch):
    class MegatronModelBridge:
        def maybe_modify_loaded_hf_weight(self):
            pass

        def maybe_modify_converted_hf_weight(self):
            pass

    class Family(MegatronModelBridge):
        def maybe_modify_loaded_hf_weight(self):
            pass

    class One(Family):
        pass

    monkeypatch.setattr("refit_adapters._megatron_bridge._is_installed", lambda: True)
    monkeypatch.setattr("refit_adapters._megatron_bridge._bridge", lambda config: One())
    with pytest.raises(LayoutError, match=r"'quux', .*changes values on the way \(maybe_modify_loaded_hf_weight\)"):
        names_from_bridge({"model_type": "quux"})


def test_without_it_there_are_no_names(monkeypatch):
    monkeypatch.setattr("refit_adapters._megatron_bridge._is_installed", lambda: False)
    assert names_from_bridge({"model_type": "quux"}) is None
