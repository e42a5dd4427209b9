"""Plain modules and mappings of tensors: who accepts what, ties, refusals, identity, the fence."""

import subprocess
import sys

import pytest
import torch
from refit_adapters import dtensor, fragments, fsdp
from refit_adapters.dtensor import DTensorAdapter
from refit_adapters.fragments import FragmentsAdapter
from refit_adapters.fsdp import FsdpAdapter

from refit_sdk.adapter import Fragment, SourceAdapter, TargetAdapter
from refit_sdk.box import Box
from refit_sdk.errors import FencedError, LayoutError

ADAPTERS = (FsdpAdapter, DTensorAdapter, FragmentsAdapter)


def adapter(model):
    return DTensorAdapter(model, rank=0, size=1)


def described(model):
    return adapter(model).describe()


class Whole(torch.nn.Linear):
    """A module that describes itself."""

    def refit_fragments(self):
        return [Fragment("w", (4, 4), Box((2, 0), (4, 4)), self.weight.detach())]


class VllmLinear(torch.nn.Linear):
    pass


VllmLinear.__module__ = "vllm.model_executor.layers.linear"


@pytest.mark.parametrize(
    ("model", "accepting"),
    [
        (torch.nn.Linear(2, 2), [DTensorAdapter]),
        ([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], [DTensorAdapter]),
        ({"w": torch.ones(2)}, [DTensorAdapter]),
        (Whole(4, 2), [FragmentsAdapter]),
        (torch.nn.Sequential(VllmLinear(2, 2)), []),
        ({}, []),
        ({"w": 1}, []),
        ([], []),
        (torch.ones(2), []),
        (object(), []),
        (None, []),
    ],
    ids=[
        "module",
        "stages",
        "mapping",
        "itself",
        "vllm",
        "empty",
        "no-tensors",
        "no-stages",
        "tensor",
        "object",
        "None",
    ],
)
def test_exactly_one_adapter_accepts_what_can_be_described(model, accepting):
    assert [cls for cls in ADAPTERS if cls.accepts(model)] == accepting


@pytest.mark.parametrize("module", [fsdp, dtensor, fragments], ids=lambda module: module.__name__)
def test_the_doors_are_registered(module):
    offered = module.refit_register_source_adapters()
    assert all(isinstance(cls(torch.nn.Linear(1, 1), rank=0, size=1), SourceAdapter) for cls in offered)
    assert module.refit_register_source_adapters.refit_sdk_impl
    if module is not fsdp:
        offered = module.refit_register_target_adapters()
        assert all(isinstance(cls(torch.nn.Linear(1, 1), rank=0, size=1), TargetAdapter) for cls in offered)


def test_importing_the_adapters_imports_no_framework():
    wanted = "import sys, refit_adapters.fsdp, refit_adapters.dtensor, refit_adapters.fragments"
    unwanted = "{'transformers', 'peft', 'vllm', 'sglang', 'megatron', 'torch.distributed.fsdp'} & set(sys.modules)"
    code = f"{wanted}; found = {unwanted}; sys.exit(str(found) if found else 0)"
    subprocess.run([sys.executable, "-c", code], check=True)


class Buffered(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("steps", torch.tensor([3]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("bias", None)


def test_parameters_and_persistent_buffers_are_covered_and_others_listed():
    one = adapter(torch.nn.ModuleDict({"a": Buffered()}))
    assert [(f.name, f.shape, f.box) for f in one.describe()] == [
        ("a.scale", (), Box((), ())),
        ("a.steps", (1,), Box((0,), (1,))),
    ]
    assert one.uncovered == ("a.cache",)


def test_views_are_live_and_outside_autograd():
    layer = torch.nn.Linear(3, 2)
    weight = described(layer)[0].view
    weight.fill_(2.0)
    assert torch.equal(layer.weight, torch.full((2, 3), 2.0))
    assert not weight.requires_grad


def test_transposed_parameters_keep_their_strides():
    stored = torch.arange(12.0).view(3, 4)
    (fragment,) = described({"w": stored.t()})
    assert (fragment.shape, fragment.view.stride(), fragment.view.data_ptr()) == ((4, 3), (1, 4), stored.data_ptr())


def tied_parameter():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def tied_storage():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    model["head"].weight = torch.nn.Parameter(model["embed"].weight.data)
    return model


def tied_module():
    linear = torch.nn.Embedding(5, 3)
    return torch.nn.ModuleDict({"embed": linear, "head": linear})


@pytest.mark.parametrize("make", [tied_parameter, tied_storage, tied_module])
def test_tied_tensors_are_one_fragment_with_an_alias(make):
    (fragment,) = described(make())
    assert (fragment.name, fragment.aliases) == ("embed.weight", ("head.weight",))


@pytest.mark.parametrize(
    "pair",
    [lambda w: (w, w.t()), lambda w: (w[:2], w[2:]), lambda w: (w, w.view(torch.int32)), lambda w: (w[:0], w[:0])],
    ids=["transposed", "disjoint", "other-dtype", "empty"],
)
def test_tensors_of_one_storage_that_differ_are_not_tied(pair):
    first, second = pair(torch.ones(4, 4))
    fragments = described({"a": first, "b": second})
    assert [f.aliases for f in fragments] == [()] * (2 if first.numel() else 0)


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def zero3():
    parameter = torch.nn.Parameter(torch.empty(0))
    parameter.ds_id = 7
    return parameter


def megatron():
    parameter = torch.nn.Parameter(torch.ones(64, 4))
    parameter.tensor_model_parallel = True
    return parameter


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "meta device"),
        (lambda: torch.nn.UninitializedParameter(), "isn't initialised"),
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantized"),
        (freed, "freed or offloaded"),
        (zero3, r"ds_id is set.*ZeRO-3"),
        (megatron, "tensor_model_parallel is set.*megatron adapter"),
    ],
    ids=["meta", "lazy", "sparse", "quantized", "freed", "zero3", "megatron"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cant_be_understood_is_refused_by_name(make, reason):
    with pytest.raises(LayoutError, match=rf"^layer\.w: .*{reason}"):
        described({"layer.w": make()})


def test_a_mark_that_says_no_is_no_sharding():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel = False
    assert len(described({"w": parameter})) == 1


def same(model):
    pass


def stepped(model):
    model.weight.data.add_(1)


def rebound(model):
    model.weight.data = model.weight.data.clone()


def replaced(model):
    model.weight = torch.nn.Parameter(model.weight.data.clone())


def reshaped(model):
    model.weight.data = model.weight.data.view(2, 8)


def recast(model):
    model.inner.weight.data = model.inner.weight.data.view(torch.int32)


def resized(model):
    model.weight.untyped_storage().resize_(0)


def removed(model):
    model.weight = None


def submodule(model):
    model.inner = torch.nn.Linear(2, 2)


def buffer(model):
    model.counter = torch.zeros(1)


@pytest.mark.parametrize(
    ("change", "seen"),
    [(same, False), (stepped, False)]
    + [(f, True) for f in (rebound, replaced, reshaped, recast, resized, removed, submodule, buffer)],
)
def test_identity_changes_with_storage_and_not_with_values(change, seen):
    model = torch.nn.Linear(4, 4)
    model.inner = torch.nn.Linear(2, 2).requires_grad_(False)
    model.register_buffer("counter", torch.zeros(1))
    one = adapter(model)
    kept = one.describe()
    before = one.identity()
    change(model)
    assert (one.identity() != before) is seen
    assert len(kept) == 5


def test_identity_is_that_of_the_last_description():
    model = torch.nn.Linear(4, 4)
    one = adapter(model)
    assert one.identity() == one.identity()
    rebound(model)
    changed = one.identity()
    one.describe()
    assert one.identity() == changed


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: torch.compile(m, backend="eager")], ids=["plain", "compiled"])
def test_a_fenced_module_refuses_to_run_until_it_is_unfenced(wrap):
    model = wrap(torch.nn.Linear(3, 2))
    batch = torch.ones(1, 3)
    model(batch)
    one = adapter(model)
    one.fence("version 4 is arriving")
    one.fence("rank 1 died in window 3")
    with pytest.raises(FencedError, match=r"fenced: rank 1 died in window 3\. .*full push"):
        model(batch)
    assert one.fenced == "rank 1 died in window 3"
    one.unfence()
    one.unfence()
    assert model(batch).shape == (1, 2)
    assert one.fenced is None
    one.fence("again")
    with pytest.raises(FencedError, match="again"):
        model(batch)


def test_installing_changes_nothing_in_a_plain_module():
    model = torch.nn.Linear(3, 2)
    one = adapter(model)
    before = one.identity()
    one.prepare()
    one.install(version=3)
    assert one.identity() == before


def test_a_mapping_only_remembers_its_fence():
    one = adapter({"w": torch.ones(2)})
    one.fence("torn")
    assert one.fenced == "torn"
    one.unfence()
    assert one.fenced is None


def test_fsdp1_is_refused_with_what_to_use():
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    torch.nn.Module.__init__(wrapper)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.append(wrapper)
    with pytest.raises(LayoutError, match=r"^1 is wrapped by FSDP1 .*fully_shard"):
        described(model)


class Slotted:
    """Describes itself by hand: columns 2, 3, 4, 5 of 14, cut at no formula's borders."""

    def __init__(self):
        self.views = [torch.full((3, width), float(width)) for width in (2, 3, 4, 5)]
        self.told = []

    def refit_fragments(self):
        edges = (0, 2, 5, 9, 14)
        return [
            Fragment("w", (3, 14), Box((0, a), (3, b)), view)
            for a, b, view in zip(edges, edges[1:], self.views, strict=False)
        ]

    def refit_prepare(self):
        self.told.append("prepare")

    def refit_install(self, *, version):
        self.told.append(f"install {version}")

    def refit_fence(self, reason):
        self.told.append(f"fence {reason}")

    def refit_unfence(self):
        self.told.append("unfence")


def test_an_object_describes_itself_and_hears_every_verb():
    model = Slotted()
    one = FragmentsAdapter(model, rank=0, size=1)
    one.prepare()
    assert [f.box.start for f in one.describe()] == [(0, 0), (0, 2), (0, 5), (0, 9)]
    one.install(version=4)
    one.fence("torn")
    one.fence("again")
    one.unfence()
    assert model.told == ["prepare", "install 4", "fence torn", "fence again", "unfence"]


def test_its_identity_follows_its_views_and_boxes():
    model = Slotted()
    one = FragmentsAdapter(model, rank=0, size=1)
    before = one.identity()
    model.views[1].add_(1)
    assert one.identity() == before
    model.views[1] = model.views[1].clone()
    assert one.identity() != before


def test_a_self_describing_module_is_fenced_by_its_forward():
    model = Whole(4, 2)
    one = FragmentsAdapter(model, rank=1, size=2)
    one.fence("torn")
    with pytest.raises(FencedError, match="Whole is fenced: torn"):
        model(torch.ones(1, 4))
    one.unfence()
    model(torch.ones(1, 4))


@pytest.mark.parametrize(
    ("fragment", "reason"),
    [
        (Fragment("w", (4, 4), Box((0, 0), (2, 4)), torch.ones(4, 4)), r"^w: the view has shape \(4, 4\)"),
        (Fragment("w", (2, 4), Box((1, 0), (3, 4)), torch.ones(2, 4)), r"box is \[1:3, 0:4\] of a tensor"),
        ("w", "must return Fragments, found str"),
    ],
    ids=["shape", "outside", "type"],
)
def test_a_fragment_that_doesnt_fit_its_box_is_refused(fragment, reason):
    model = Slotted()
    model.refit_fragments = lambda: [fragment]
    with pytest.raises(LayoutError, match=reason):
        FragmentsAdapter(model, rank=0, size=1).describe()
