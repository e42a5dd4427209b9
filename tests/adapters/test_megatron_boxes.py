"""Entries as plain data → fragments: numbers of layers and experts, groups of heads, padding, parts, and refusals."""

import numpy as np
import pytest
from refit_adapters._megatron_boxes import Heads, Model, owned
from refit_adapters._megatron_entries import Entry
from refit_adapters._megatron_keys import INSIDE, LATENT, OUTSIDE, PARTS, QKV, place_of
from refit_adapters.architectures.deepseek_v3 import DeepseekV3
from refit_adapters.architectures.llama import Llama
from refit_adapters.architectures.nemotron_h import NemotronH
from refit_adapters.architectures.qwen3_moe import Qwen3Moe
from refit_adapters.architectures.roles import ROLES

from refit_sdk.errors import LayoutError

HEADS = Heads(8, 2, 4)


def model(table=Llama, **over):
    stated = {"architecture": table.name, "names": table.names, "sizes": {}, "heads": HEADS, "layers": 4}
    return Model(**{**stated, **over})


def entry(key, shape, start, local, **over):
    """An entry whose storage has the flat index of each element."""
    values = np.arange(np.prod(shape)).reshape(shape)
    view = values[tuple(slice(a, a + n) for a, n in zip(start, local, strict=True))]
    return Entry(key, key, shape, start, view, **over)


def boxes(*entries, of=None):
    return [(each.fragment.name, each.fragment.box, each.fragment.view) for each in owned(entries, of or model())]


def test_numbers_in_a_key_are_the_names():
    made = boxes(
        entry("decoder.layers.3.mlp.experts.experts.5.linear_fc1.weight_w", (4, 6), (2, 0), (2, 6)),
        of=model(Qwen3Moe),
    )
    assert [(name, str(box)) for name, box, _ in made] == [
        ("model.layers.3.mlp.experts.5.gate_proj.weight", "[2:4, 0:6]")
    ]


def test_mtp_layers_are_numbered_after_the_others():
    inside = entry("mtp.layers.1.transformer_layer.mlp.router.weight", (4, 6), (0, 0), (4, 6))
    beside = entry("mtp.layers.1.eh_proj.weight", (4, 6), (0, 0), (4, 6))
    names = [name for name, *_ in boxes(inside, beside, of=model(DeepseekV3, layers=61))]
    assert names == ["model.layers.62.mlp.gate.weight", "model.layers.62.eh_proj.weight"]


def whole_qkv(heads, width):
    """q, k and v as a checkpoint has them, and fused as Megatron has them, written as loops over groups."""
    q, k, v = (
        np.arange(rows * heads.dim * width).reshape(rows * heads.dim, width) + 1000 * number
        for number, rows in enumerate((heads.queries, heads.groups, heads.groups))
    )
    each, fused = heads.queries // heads.groups, []
    for group in range(heads.groups):
        fused += [q[(group * each + h) * heads.dim : (group * each + h + 1) * heads.dim] for h in range(each)]
        fused += [part[group * heads.dim : (group + 1) * heads.dim] for part in (k, v)]
    return (q, k, v), np.concatenate(fused)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [Heads(8, 2, 4), Heads(4, 4, 4), Heads(8, 1, 8), Heads(6, 2, 4)], ids=str)
def test_fused_rows_are_the_checkpoints_wherever_they_are_cut(heads, size):
    parts, fused = whole_qkv(heads, 3)
    found = {name: np.full_like(part, -1) for name, part in zip("qkv", parts, strict=True)}
    for rank in range(size):
        each = len(fused) // size
        view = fused[rank * each : (rank + 1) * each]
        made = Entry("decoder.layers.0.self_attention.linear_qkv.weight", "p", fused.shape, (rank * each, 0), view)
        for name, box, rows in boxes(made, of=model(heads=heads)):
            at = found[name.split(".")[-2][0]]
            assert (at[box.slices()] == -1).all()
            at[box.slices()] = rows
    assert all((found[name] == part).all() for name, part in zip("qkv", parts, strict=True))


@pytest.mark.parametrize("start", [0, 8, 16, 24], ids=lambda start: f"from {start}")
def test_padding_rows_are_in_no_fragment(start):
    made = entry("output_layer.weight", (32, 2), (start, 0), (8, 2), padded=True)
    rows = [(box.start[0], box.stop[0], len(view)) for _, box, view in boxes(made, of=model(sizes={"vocab": 19}))]
    assert rows == {0: [(0, 8, 8)], 8: [(8, 16, 8)], 16: [(16, 19, 3)], 24: []}[start]


def test_a_tied_embedding_offers_the_head():
    (found,) = owned(
        [entry("embedding.word_embeddings.weight", (8, 2), (0, 0), (8, 2), padded=True)],
        model(sizes={"vocab": 8}, tied=True),
    )
    assert found.fragment.aliases == ("lm_head.weight",)


def test_another_stages_copy_is_not_offered_but_known():
    made = entry("embedding.word_embeddings.weight", (8, 2), (0, 0), (8, 2), padded=True, replica=(1, 0, 0))
    (found,) = owned([made], model(sizes={"vocab": 8}))
    assert (found.is_owner, found.offered) == (False, False)
    (copy,) = owned([entry("decoder.final_layernorm.weight", (8,), (0,), (8,), replica=(0, 1, 3))], model())
    assert (copy.is_owner, copy.offered) == (False, True)


def test_parts_of_a_mixer_begin_where_the_parts_before_them_end():
    whole = np.arange(24).reshape(12, 2)
    starts, rows = {"z": 0, "x": 4, "B": 8, "C": 9, "dt": 10}, {"z": 4, "x": 4, "B": 1, "C": 1, "dt": 2}
    key = "decoder.layers.0.mixer.in_proj.weight"
    entries = [
        Entry(f"{key}.{part}", key, (rows[part], 2), (0, 0), whole[starts[part] : starts[part] + rows[part]])
        for part in starts
    ]
    made = boxes(*entries, of=model(NemotronH))
    assert {name for name, *_ in made} == {"backbone.layers.0.mixer.in_proj.weight"}
    assert all((whole[box.slices()] == view).all() for _, box, view in made)
    assert sum(box.size for _, box, _ in made) == whole.size


def test_latent_attention_means_other_norms():
    key = "decoder.layers.0.self_attention.q_layernorm.weight"
    assert place_of(key, layers=1, latent=True).roles == ("mla.q_a_norm",)
    assert place_of(key, layers=1, latent=False).roles == ("attention.q_norm",)


def test_every_key_has_a_role_that_is_listed():
    roles = {*OUTSIDE.values(), *INSIDE.values(), *PARTS.values(), *LATENT.values()}
    assert roles | {role for three in QKV.values() for role in three} <= ROLES.keys()


def test_all_unknown_keys_are_one_error():
    unknown = [entry(f"decoder.layers.{n}.self_attention.sinks", (4,), (0,), (4,)) for n in range(3)]
    other = entry("vision.blocks.7.weight", (4,), (0,), (4,))
    with pytest.raises(LayoutError) as caught:
        owned([*unknown, other], model())
    assert "4 of this rank's tensors have no name in a checkpoint of llama" in str(caught.value)
    assert "decoder.layers.0.self_attention.sinks and 2 more like it" in str(caught.value)
    assert "vision.blocks.7.weight" in str(caught.value)
    assert "refit_register_architectures" in str(caught.value)


def test_an_architecture_may_name_a_key_that_only_it_has():
    names = {**Llama.names, "decoder.layers.{layer}.self_attention.sinks": "model.layers.{layer}.self_attn.sinks"}
    made = boxes(entry("decoder.layers.2.self_attention.sinks", (4,), (2,), (2,)), of=model(names=names))
    assert [(name, str(box)) for name, box, _ in made] == [("model.layers.2.self_attn.sinks", "[2:4]")]


@pytest.mark.parametrize(
    ("made", "over", "text"),
    [
        (("decoder.layers.0.self_attention.linear_qkv.weight", (40, 2), (0, 0), (40, 2)), {}, "40 rows, and .* 48"),
        (("output_layer.weight", (8, 2), (0, 0), (8, 2)), {"sizes": {"vocab": 9}}, "vocabulary of 9, .* 8 rows"),
        (("output_layer.weight", (8, 2), (0, 0), (8, 2)), {}, "states no vocabulary"),
        (("decoder.layers.0.mlp.linear_fc2.weight", (8, 2), (0, 0), (8, 2)), {"sizes": {"mlp": 4}}, r"\(\?, 4\)"),
        (("decoder.layers.0.mlp.linear_fc2.weight", (8,), (0,), (8,)), {"sizes": {}}, "makes it"),
    ],
    ids=["heads", "vocabulary", "no vocabulary", "width", "dims"],
)  # fmt: skip
def test_configs_that_contradict_the_weights_are_refused(made, over, text):
    with pytest.raises(LayoutError, match=text):
        owned([entry(*made)], model(**over))


def test_padding_that_nobody_knows_is_refused():
    made = entry("decoder.layers.0.mlp.linear_fc2.weight", (8, 2), (0, 0), (8, 2), padded=True)
    with pytest.raises(LayoutError, match=r"may be padded, .* they would travel"):
        owned([made], model())
