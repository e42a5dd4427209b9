"""Run by `runpy` in every rank of a group of processes: shards models, and judges what the adapters say they hold.

The judge is the unsharded model: what `save_pretrained` would write of it, or DTensor's own `full_tensor`. It works on
plain index arithmetic and gathers every rank's fragments on rank 0. A case's result is a list of problems.
"""

import contextlib
import os
import traceback
from datetime import timedelta

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import transformers
from refit_adapters.dtensor import DTensorAdapter
from refit_adapters.fsdp import FsdpAdapter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from refit_sdk.errors import LayoutError

LAYER_PLAN = {
    "self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel(), "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}  # fmt: skip
VOCAB_PLAN = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}


def qwen3(*, vocab=64, inter=48, tied=False, experts=0):
    common = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "vocab_size": vocab, "intermediate_size": inter, "max_position_embeddings": 64, "tie_word_embeddings": tied,
    }  # fmt: skip
    if experts:
        config = transformers.Qwen3MoeConfig(
            **common, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16
        )
        return numbered(transformers.Qwen3MoeForCausalLM(config))
    return numbered(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common)))


def numbered(module):
    """Every element of the module's parameters differs from every other."""
    first = 0
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.arange(first, first + parameter.numel(), dtype=torch.float32)
            parameter.copy_(values.view_as(parameter) / 2**18 - 1)
            first += parameter.numel()
    return module


def checkpoint(model):
    """What `save_pretrained` writes of an unsharded model; a state dict for other modules."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if isinstance(model, transformers.PreTrainedModel):
        state = transformers.core_model_loading.revert_weight_conversion(model, state)
    return state


def mesh(*shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def shard_layers(model, on, **kwargs):
    for layer in model.model.layers:
        fully_shard(layer, mesh=on, **kwargs)
    return fully_shard(model, mesh=on, **kwargs)


def problems(adapter, expected, *, everything=True):
    """Rank 0: what is wrong with the union of all ranks' fragments, compared with whole tensors, bit by bit."""
    mine = [(f.name, f.shape, f.box.start, f.box.stop, f.aliases, f.view.contiguous()) for f in adapter.describe()]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    if dist.get_rank():
        return []
    found, seen = [], {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in expected.items()}
    for rank, fragments in enumerate(gathered):
        for name, shape, start, stop, aliases, values in fragments:
            index = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            for known in (name, *aliases):
                if known not in expected or shape != tuple(expected[known].shape):
                    found.append(f"rank {rank}: {known} of shape {shape} isn't in the checkpoint")
                elif not torch.equal(values, expected[known][index]):
                    found.append(f"rank {rank}: {known}{index} has other values")
                else:
                    seen[known][index] += 1
            if not values.numel():
                found.append(f"rank {rank}: {name} has an empty fragment")
    if everything:
        found += [
            f"{name}: {int((count == 0).sum())} elements are missing"
            for name, count in seen.items()
            if (count == 0).any()
        ]
    return found


def local_elements(adapter, model):
    """Every local element of every parameter and persistent buffer is in exactly one fragment."""
    tensors = {
        id(t): t for t in (*model.parameters(), *(b for n, b in model.named_buffers() if n in model.state_dict()))
    }
    with torch.no_grad():
        held = sum((t.to_local() if isinstance(t, DTensor) else t).numel() for t in tensors.values())
    offered = sum(fragment.view.numel() for fragment in adapter.describe())
    return [] if held == offered else [f"rank {dist.get_rank()}: holds {held} elements, offers {offered}"]


def judge(model, expected):
    adapter_class = FsdpAdapter if any(isinstance(m, FSDPModule) for m in model.modules()) else DTensorAdapter
    assert [cls.accepts(model) for cls in (FsdpAdapter, DTensorAdapter)].count(True) == 1
    assert adapter_class.accepts(model)
    adapter = adapter_class(model, rank=dist.get_rank(), size=dist.get_world_size())
    return problems(adapter, expected) + local_elements(adapter, model)


def size():
    return dist.get_world_size()


def fsdp(**kwargs):
    expected = checkpoint(qwen3(**kwargs))
    if kwargs.get("tied"):
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    return judge(shard_layers(qwen3(**kwargs), mesh(size(), names=("fsdp",))), expected)


def fsdp_last_dim():
    model = qwen3()
    on = mesh(size(), names=("fsdp",))
    shard_layers(model, on, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    return judge(model, checkpoint(qwen3()))


def fsdp_every_class():
    """Every transformers class is replaced by FSDP's: transformers itself would find no conversion for them."""
    model = qwen3(experts=4)
    expected = checkpoint(model)
    on = mesh(size(), names=("fsdp",))
    for layer in model.model.layers:
        fully_shard(layer, mesh=on)
    fully_shard(model.model, mesh=on)
    return judge(fully_shard(model, mesh=on), expected)


def hsdp():
    return judge(shard_layers(qwen3(), mesh(2, size() // 2, names=("rep", "fsdp"))), checkpoint(qwen3()))


def fsdp_tp(*, vocab_plan=False, rep=1, tp=2, **kwargs):
    model = qwen3(**kwargs)
    expected = checkpoint(model)
    if rep > 1:
        whole = mesh(rep, size() // rep // tp, tp, names=("rep", "fsdp", "tp"))
        data = whole["rep", "fsdp"]
    else:
        whole = mesh(size() // tp, tp, names=("fsdp", "tp"))
        data = whole["fsdp"]
    for layer in model.model.layers:
        parallelize_module(layer, whole["tp"], LAYER_PLAN)
    if vocab_plan:
        parallelize_module(model, whole["tp"], VOCAB_PLAN)
    return judge(shard_layers(model, data), expected)


def fsdp_tp_few_rows():
    """9 rows over tp 2, then fsdp 4: some strided shards are empty, where DTensor's own reading of them differs."""
    model = numbered(torch.nn.Sequential(torch.nn.Linear(3, 9)))
    expected = checkpoint(model)
    whole = mesh(4, 2, names=("fsdp", "tp"))
    parallelize_module(model, whole["tp"], {"0": ColwiseParallel()})
    return judge(fully_shard(model, mesh=whole["fsdp"]), expected)


def expert_parallel(*, ep, experts=8, rep=1, placement=None):
    """Experts over `ep`, then FSDP over the rest of the mesh; everything else FSDP over all ranks."""
    model = qwen3(experts=experts)
    expected = checkpoint(model)
    names = ("rep", "efsdp", "ep") if rep > 1 else ("efsdp", "ep")
    shape = (rep, size() // rep // ep, ep) if rep > 1 else (size() // ep, ep)
    whole = mesh(*shape, names=names)
    data = whole["rep", "efsdp"] if rep > 1 else whole["efsdp"]
    for layer in model.model.layers:
        inner = layer.mlp.experts
        for name, parameter in list(inner.named_parameters(recurse=False)):
            cut = distribute_tensor(parameter.data, whole["ep"], [Shard(0)])
            inner.register_parameter(name, torch.nn.Parameter(cut))
        fully_shard(inner, mesh=data, shard_placement_fn=None if placement is None else lambda p: placement)
    return judge(shard_layers(model, mesh(size(), names=("fsdp",))), expected)


def experts_inside(dim):
    """Fused experts cut along gate|up, or along the hidden size, by a plain DTensor."""
    model = qwen3(experts=4)
    expected = checkpoint(model)
    on = mesh(size(), names=("tp",))
    for layer in model.model.layers:
        inner = layer.mlp.experts
        for name, parameter in list(inner.named_parameters(recurse=False)):
            inner.register_parameter(name, torch.nn.Parameter(distribute_tensor(parameter.data, on, [Shard(dim)])))
    return judge(model, expected)


def tensor_parallel(**kwargs):
    model = qwen3(**kwargs)
    expected = checkpoint(model)
    on = mesh(size(), names=("tp",))
    for layer in model.model.layers:
        parallelize_module(layer, on, LAYER_PLAN)
    parallelize_module(model, on, VOCAB_PLAN)
    return judge(model, expected)


def by_hand():
    """Mappings of names to DTensors, in placements that no wrapper makes: one dim cut twice, strides, 0-D to 4-D."""
    on = mesh(2, size() // 2, names=("a", "b"))
    whole = {
        "twice": torch.arange(35.0).view(7, 5),
        "strided": torch.arange(27.0).view(9, 3),
        "crossed": torch.arange(2 * 3 * 5 * 4.0).view(2, 3, 5, 4),
        "scalar": torch.tensor(3.5),
        "plain": torch.arange(6.0),
    }
    placements = {
        "twice": [Shard(0), Shard(0)], "crossed": [Shard(3), Shard(1)], "scalar": [Replicate(), Replicate()],
    }  # fmt: skip
    model = {
        name: distribute_tensor(tensor, on, placements[name]) if name in placements else tensor.clone()
        for name, tensor in whole.items()
    }
    rows = [[0, 1, 3, 4, 6, 7], [2, 5, 8]][on.get_coordinate()[0]]
    strided = [_StridedShard(0, split_factor=3), Replicate()]
    model["strided"] = DTensor.from_local(
        whole["strided"][rows], on, strided, run_check=False, shape=whole["strided"].shape, stride=(3, 1)
    )
    assert DTensorAdapter.accepts(model)
    return problems(DTensorAdapter(model, rank=dist.get_rank(), size=size()), whole)


def narrow_view_of_padding():
    """A re-gathered uneven shard keeps the strides of its padding: views are described by their real strides."""
    whole = torch.arange(4 * 31 * 10.0).view(4, 31, 10)
    on = mesh(size(), names=("x",))
    padded = torch.zeros(4, 32, 10)
    padded[:, :31] = whole
    view = padded[:, :31]
    assert view.stride() == (320, 10, 1)
    model = {"w": DTensor.from_local(view, on, [Replicate()], run_check=False)}
    adapter = DTensorAdapter(model, rank=dist.get_rank(), size=size())
    assert adapter.describe()[0].view.data_ptr() == padded.data_ptr()
    return problems(adapter, {"w": whole})


def outside_the_mesh():
    """A rank that isn't in a tensor's mesh holds nothing of it."""
    whole = torch.arange(12.0).view(6, 2)
    inner = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 0])
    local = whole.chunk(2)[1 - dist.get_rank()] if dist.get_rank() < 2 else torch.empty(0, 2)
    model = {"w": DTensor.from_local(local, inner, [Shard(0)], run_check=False, shape=whole.shape, stride=(2, 1))}
    return problems(DTensorAdapter(model, rank=dist.get_rank(), size=size()), {"w": whole})


def refused():
    """Partial sums, and shards cut by hand that the placements don't say."""
    on = mesh(size(), names=("x",))
    partial = {"w": DTensor.from_local(torch.ones(2, 2), on, [Partial()], run_check=False)}
    columns = [2, 3, 4, 5][: size()]
    cut = DTensor.from_local(
        torch.ones(3, columns[dist.get_rank()]), on, [Shard(1)], run_check=False, shape=(3, sum(columns)),
        stride=(sum(columns), 1),
    )  # fmt: skip
    found = []
    for model, needle in ((partial, "Partial"), ({"w": cut}, "refit_fragments")):
        try:
            DTensorAdapter(model, rank=dist.get_rank(), size=size()).describe()
            found.append(f"rank {dist.get_rank()}: {needle} was described")
        except LayoutError as error:
            found += [] if "w: " in str(error) and needle in str(error) else [str(error)]
    # Only ranks whose shard has the placement's length by chance describe the hand-made cut.
    gathered = [None] * size()
    dist.all_gather_object(gathered, found)
    return found if all(gathered) or "Partial" in str(found) else []


def plain_in_fsdp():
    """Parameters that FSDP was told to ignore, and persistent buffers, are whole on every rank."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 6)
            self.scale = torch.nn.Parameter(torch.arange(5.0))
            self.register_buffer("steps", torch.tensor(7))
            self.register_buffer("table", torch.ones(3), persistent=False)

    model = Scaled()
    numbered(model.linear)
    expected = checkpoint(model)
    fully_shard(model, mesh=mesh(size(), names=("fsdp",)), ignored_params={model.scale})
    adapter = FsdpAdapter(model, rank=dist.get_rank(), size=size())
    whole = {f.name for f in adapter.describe() if f.box.shape == f.shape}
    wrong = [] if {"scale", "steps"} <= whole and adapter.uncovered == ("table",) else [f"replicas: {whole}"]
    return judge(model, expected) + wrong


def trained(**kwargs):
    """Optimizer steps keep addresses; fp32 masters stay fp32; a forward without a backward changes nothing."""
    torch.manual_seed(1)
    model = qwen3(**kwargs)
    before = checkpoint(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard_layers(model, mesh(size(), names=("fsdp",)), mp_policy=policy)
    adapter = FsdpAdapter(model, rank=dist.get_rank(), size=size())
    where = [(f.name, f.view.data_ptr(), f.view.stride()) for f in adapter.describe()]
    identity, found = adapter.identity(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(16).view(2, 8)
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(tokens)
    unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if not unsharded:
        found.append("the forward left nothing unsharded: this case shows nothing")
    adapter.prepare()
    if adapter.identity() != identity:
        found.append("the identity changed, though no storage did")
    if where != [(f.name, f.view.data_ptr(), f.view.stride()) for f in adapter.describe()]:
        found.append("addresses changed")
    if {f.view.dtype for f in adapter.describe()} != {torch.float32}:
        found.append("the masters aren't described as they are")
    reference = qwen3(**kwargs)
    reference.load_state_dict({name: p.full_tensor() for name, p in model.state_dict().items()})
    after = checkpoint(reference)
    if any(torch.equal(before[name], after[name]) for name in before if name.endswith("up_proj.weight")):
        found.append("the steps changed nothing")
    return found + problems(adapter, after)


def described_unsharded():
    """describe() after an evaluation forward, without prepare(), reshards by itself."""
    model = qwen3(tied=True)
    expected = checkpoint(model)
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    shard_layers(model, mesh(size(), names=("fsdp",)), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.arange(8).view(1, 8))
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    return judge(model, expected)


def broken_forward():
    """A forward that raised leaves its module gathered; that is said, not described."""

    class Breaks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, 4))

        def forward(self):
            raise KeyError("no batch")

    model = fully_shard(Breaks(), mesh=mesh(size(), names=("fsdp",)), reshard_after_forward=False)
    with contextlib.suppress(KeyError):
        model()
    try:
        FsdpAdapter(model, rank=dist.get_rank(), size=size()).prepare()
    except LayoutError as error:
        return [] if "FSDPBreaks can't be resharded" in str(error) else [str(error)]
    return ["prepare() said nothing"]


def wrapped():
    """FSDP2 inside torch.compile's wrapper, checkpoint wrappers and a bare `module` wrapper: names stay clean."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = qwen3(experts=4)
    expected = checkpoint(model)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    shard_layers(model, mesh(size(), names=("fsdp",)))

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    return judge(torch.compile(Wrapper(model), backend="eager"), expected)


def offloaded():
    """Storage that moves away and comes back elsewhere changes the identity, and is described anew."""
    model = qwen3()
    shard_layers(model, mesh(size(), names=("fsdp",)))
    adapter = FsdpAdapter(model, rank=dist.get_rank(), size=size())
    adapter.describe()
    identity = adapter.identity()
    old = model.model.norm.weight._local_tensor
    model.model.norm.weight._local_tensor = old + 1
    if old.numel() and adapter.identity() == identity:
        return ["the identity didn't change"]
    expected = checkpoint(qwen3())
    expected["model.norm.weight"] = expected["model.norm.weight"] + 1
    return problems(adapter, expected)


CASES = {
    "fsdp": fsdp,
    "fsdp-uneven": lambda: fsdp(vocab=61, inter=13),
    "fsdp-empty": lambda: fsdp(inter=5),
    "fsdp-tied": lambda: fsdp(tied=True, vocab=61),
    "fsdp-last-dim": fsdp_last_dim,
    "fsdp-experts": lambda: fsdp(experts=4),
    "fsdp-every-class": fsdp_every_class,
    "hsdp": hsdp,
    "fsdp-tp": fsdp_tp,
    "fsdp-tp-uneven": lambda: fsdp_tp(vocab_plan=True, vocab=61, inter=26),
    "hsdp-tp": lambda: fsdp_tp(rep=2, vocab_plan=True),
    "fsdp-tp-few-rows": fsdp_tp_few_rows,
    "ep-2d": lambda: expert_parallel(ep=2),
    "ep-2d-empty": lambda: expert_parallel(ep=2, experts=4),
    "ep-2d-inside": lambda: expert_parallel(ep=4, placement=Shard(1)),
    "ep-2d-uneven": lambda: expert_parallel(ep=4, experts=6),
    "ep-3d": lambda: expert_parallel(ep=2, rep=2),
    "experts-on-gate-up": lambda: experts_inside(1),
    "experts-on-hidden": lambda: experts_inside(2),
    "tp": tensor_parallel,
    "tp-uneven": lambda: tensor_parallel(vocab=61, inter=13),
    "by-hand": by_hand,
    "padded-strides": narrow_view_of_padding,
    "outside-the-mesh": outside_the_mesh,
    "refused": refused,
    "plain-in-fsdp": plain_in_fsdp,
    "trained": trained,
    "trained-tied": lambda: trained(tied=True),
    "trained-experts": lambda: trained(experts=4),
    "described-unsharded": described_unsharded,
    "broken-forward": broken_forward,
    "wrapped": wrapped,
    "offloaded": offloaded,
}


def run(rank, world, store, names, results):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        for name in names:
            results.put((name, rank, attempt(CASES[name])))
    finally:
        dist.destroy_process_group()


def attempt(case):
    try:
        return case()
    except Exception:  # noqa: BLE001 - told to the test
        return [traceback.format_exc()]


if __name__ == "rank":
    run(*arguments)  # noqa: F821 - given by runpy
