"""What can't be described right is refused, on every rank alike where all know it: what is wrong, what to do."""

import bodies
import pytest
import tiny
import worlds
from build import Layout

CASES = [
    ("one chunk of two", Layout(pp=2, vp=2), "1 chunks were given, and Megatron's config says virtual_pipeline"),
    ("a chunk twice", Layout(pp=2, vp=2), "a chunk is given twice among 2"),
    ("an unmapped parameter", Layout(), "5 of this rank's tensors have no name in a checkpoint of qwen3"),
    ("a parameter without an entry", Layout(), "mlp.scale: a parameter, but sharded_state_dict has no entry for it"),
    ("another vocabulary", Layout(), "a vocabulary of 4096, Megatron's embedding.word_embeddings.weight has 512 rows"),
    ("no vocabulary", Layout(tp=2), "which of the 512 rows are padding; they would travel"),
    ("other heads", Layout(), "num_query_groups=2 in Megatron's, 4 in the Hugging Face config"),
    ("other width of the mlp", Layout(tp=2), "makes it (128, 64), the Hugging Face config says (96, 64)"),
    ("tied, says the config", Layout(), "the head is not the embedding in Megatron's model, and tie_word_embeddings"),
    ("an unknown model", Layout(), "no architecture is known for model_type 'quux'"),
    ("no config", Layout(), "pass MegatronModel(chunks, hf_config=path)"),
    ("a layer nobody has", Layout(pp=2), "nobody has layers 2 of 4"),
    ("a layer two have", Layout(pp=2), "both own"),
    ("two ranks of one number", Layout(tp=2), "two ranks of the Megatron job are rank 0 of the session"),
    ("out of ddp", Layout(dp=2), "taken out of a DistributedDataParallel that overlaps its parameter all-gather"),
    ("a copy", Layout(), "linear_proj.weight: Megatron hands out a copy"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.write("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(("name", "layout", "text"), CASES, ids=[name for name, *_ in CASES])
def test_is_refused(checkpoint, name, layout, text):
    said = worlds.everywhere(bodies.unusual, layout.world, checkpoint, layout, name)
    assert all(each.startswith("LayoutError: ") for each in said), said
    assert all(text in each for each in said), said[0]


def test_every_bad_input_is_tried():
    assert sorted(bodies.BAD) == sorted(name for name, *_ in CASES)


def test_all_unmapped_keys_are_in_one_error(checkpoint):
    (said,) = worlds.everywhere(bodies.unusual, 1, checkpoint, Layout(), "an unmapped parameter")
    assert "decoder.layers.0.self_attention.sinks and 3 more like it" in said
    assert "decoder.layers.0.self_attention.scale" in said
