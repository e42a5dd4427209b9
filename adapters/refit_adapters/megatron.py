"""`megatron`: models of Megatron-core as source: every tensor, pipeline, expert and data parallelism, nothing gathered.

1. The model is a module, the list of a rank's virtual pipeline chunks, or these wrapped in DDP. Its Hugging Face config
   hangs on it as `hf_config`, or comes with it in a `MegatronModel`.
2. What each rank holds is Megatron's own word, `sharded_state_dict` (`_megatron_entries`); names are the architecture's
   (`architectures`); fused rows, padding and parts are taken apart by plain arithmetic (`_megatron_boxes`).
3. Before values are read, a parameter all-gather that was put off is completed (`_megatron_sync`). Before the first
   push, and after a change of storage on the first of them, all ranks compare what they own (`_megatron_coverage`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import msgspec
from attrs import field, frozen

from refit_adapters import _megatron_sync, _megatron_version
from refit_adapters._hf_config import read
from refit_adapters._megatron_boxes import Heads, Model, Owned, owned
from refit_adapters._megatron_bridge import names_from_bridge
from refit_adapters._megatron_chunks import Chunk, chunks_of, hf_config_of, is_megatron
from refit_adapters._megatron_coverage import SHOWN, Sum, drifted, violations
from refit_adapters._megatron_entries import entries_of
from refit_adapters._megatron_groups import gather
from refit_adapters._walk import Walked, walk
from refit_adapters._watch import Watch
from refit_adapters.architectures import names_for
from refit_adapters.architectures.roles import sizes_of
from refit_sdk.adapter import Architecture, Fragment, SourceAdapter
from refit_sdk.bits import host_bits
from refit_sdk.box import Box
from refit_sdk.errors import LayoutError
from refit_sdk.hookspecs import hookimpl
from refit_sdk.manifest import decode, encode, fold
from refit_sdk.verify import digest


@frozen(eq=False)
class MegatronModel:
    """A Megatron model with what it doesn't say itself: give this to `RefitSession.source`.

    `chunks` is the model, or the list of this rank's chunks. `hf_config`: a path to a `config.json` or its directory, a
    `transformers` config, or a mapping. `check_replicas`: before every push, compare all copies by digest; it reads all
    weights once.
    """

    chunks: Any
    hf_config: Any = None
    check_replicas: bool = field(default=False, kw_only=True)


class MegatronAdapter:
    """A Megatron-core model, a list of its chunks, either in DDP, or a `MegatronModel`."""

    name: ClassVar[str] = "megatron"

    def __init__(self, model: Any, *, rank: int, size: int) -> None:
        given = model if isinstance(model, MegatronModel) else MegatronModel(model)
        self._rank = rank
        self._chunks = chunks_of(given.chunks)
        self._check_replicas = given.check_replicas
        _megatron_sync.check(self._chunks)
        self._model = _model(self._chunks, given.hf_config)
        self._owned: tuple[Owned, ...] = ()
        self._watches: list[Watch] = []
        self._compared = False

    @classmethod
    def accepts(cls, model: Any) -> bool:
        """Whether every chunk has a class of Megatron's, and the model doesn't describe itself."""
        return isinstance(model, MegatronModel) or (not hasattr(model, "refit_fragments") and is_megatron(model))

    @classmethod
    def missing(cls) -> str | None:
        """Why it can't be used here: no megatron-core, or one that is too old."""
        return _megatron_version.missing()

    @classmethod
    def about(cls) -> str:
        """What of the installed megatron-core is understood."""
        return _megatron_version.about()

    def prepare(self) -> None:
        """Complete parameter all-gathers that were put off. The first time, compare with all ranks who owns what; each
        time, if asked for, whether copies are equal. `LayoutError`, the same on every rank, if not."""
        _megatron_sync.complete(self._chunks)
        if not self._compared:
            self._compare()
            self._compared = True
        if self._check_replicas:
            self._compare_copies()

    def describe(self) -> Sequence[Fragment]:
        """This rank's shards and copies: views of live parameters and buffers, under checkpoint names."""
        self._watches = [Watch(walked) for walked in self._walked()]
        entries = [entry for chunk in self._chunks for entry in entries_of(chunk)]
        self._owned = owned(entries, self._model)
        return tuple(each.fragment for each in self._owned if each.offered)

    def identity(self) -> Hashable:
        """Changes when a parameter, a buffer or a submodule is rebound or reshaped."""
        if not self._watches:
            self._watches = [Watch(walked) for walked in self._walked()]
        return tuple(watch.look() for watch in self._watches)

    @property
    def uncovered(self) -> tuple[str, ...]:
        """Names of non-persistent buffers: they aren't in checkpoints, so no push carries them."""
        return tuple(name for walked in self._walked() for name in walked.uncovered)

    def _walked(self) -> list[Walked]:
        return [walk(chunk.module) for chunk in self._chunks]

    def _compare(self) -> None:
        if not self._owned:
            self.describe()
        mine = encode(fold([each.fragment for each in self._owned if each.is_owner]))
        found = gather(msgspec.msgpack.encode((self._rank, mine)), self._chunks[0].groups)
        owners = {}
        for rank, manifest in (msgspec.msgpack.decode(each, type=tuple[int, bytes]) for each in found):
            if rank in owners:
                raise LayoutError(f"two ranks of the Megatron job are rank {rank} of the session; give each its own")
            owners[rank] = decode(manifest)
        config = self._chunks[0].config
        names = [name for role, name in self._model.names.items() if role.startswith("expert.")]
        wrong = violations(
            owners,
            layers=self._model.layers + (getattr(config, "mtp_num_layers", None) or 0),
            experts=getattr(config, "num_moe_experts", None),
            expert_names=names,
        )
        _raise("what the ranks own isn't the checkpoint, each element once", wrong)

    def _compare_copies(self) -> None:
        sums = [
            (f.name, f.box.start, f.box.stop, digest(host_bits(f.view), box=f.box, shape=f.shape), each.is_owner)
            for each in self._owned
            for f in [each.fragment]
        ]
        found = gather(msgspec.msgpack.encode((self._rank, sums)), self._chunks[0].groups)
        by_rank = [msgspec.msgpack.decode(each, type=_Sums) for each in found]
        told = {rank: [Sum(n, Box(a, b), number, own) for n, a, b, number, own in each] for rank, each in by_rank}
        _raise("copies that should be equal aren't", drifted(told))


_Sums = tuple[int, list[tuple[str, tuple[int, ...], tuple[int, ...], int, bool]]]


def _raise(what: str, wrong: Sequence[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise LayoutError("\n  ".join((f"{what}:", *wrong[:SHOWN], *more)))


def _model(chunks: Sequence[Chunk], given: Any) -> Model:
    """What is known of the model beside its entries. `LayoutError` if the two configs contradict each other."""
    found = given if given is not None else hf_config_of(chunks)
    if found is None:
        raise LayoutError(
            "a Megatron model has names of its own, and its Hugging Face config, which says what its checkpoint's are "
            "called, isn't known; pass MegatronModel(chunks, hf_config=path), or set model.hf_config"
        )
    hf_config, config = read(found), chunks[0].config
    architecture = names_for(hf_config) or names_from_bridge(hf_config)
    if architecture is None:
        raise LayoutError(
            f"no architecture is known for model_type {hf_config.get('model_type')!r}; "
            f"register one (refit_register_architectures), or install Megatron-Bridge if it knows the model"
        )
    tied = bool(getattr(chunks[0].module, "share_embeddings_and_output_weights", False))
    sizes = sizes_of(architecture, hf_config)
    _check_configs(architecture, sizes, hf_config, config, tied)
    return Model(
        architecture=architecture.name,
        names=architecture.names,
        sizes=sizes,
        heads=_heads(config),
        layers=int(config.num_layers),
        latent=bool(getattr(config, "multi_latent_attention", False)),
        tied=tied,
    )


def _heads(config: Any) -> Heads | None:
    queries, groups, dim = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_query_groups", "kv_channels")
    )
    return Heads(int(queries), int(groups or queries), int(dim)) if queries and dim else None


def _check_configs(
    architecture: type[Architecture], sizes: dict[str, int], hf_config: dict[str, Any], config: Any, tied: bool
) -> None:
    pairs = {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "num_attention_heads": "heads",
        "num_query_groups": "kv_heads",
    }
    if getattr(config, "multi_latent_attention", False):
        del pairs["num_query_groups"]
    wrong = [
        f"{name}={getattr(config, name)} in Megatron's, {sizes[size]} in the Hugging Face config"
        for name, size in pairs.items()
        if size in sizes and getattr(config, name, None) not in (None, sizes[size])
    ]
    says_tied = bool(hf_config.get("tie_word_embeddings", False))
    if tied != says_tied:
        head = "the head is the embedding" if tied else "the head is not the embedding"
        wrong.append(f"{head} in Megatron's model, and tie_word_embeddings={says_tied} in the Hugging Face config")
    centred = bool(getattr(config, "layernorm_zero_centered_gamma", False))
    if centred != bool(getattr(architecture, "zero_centered_norms", False)):
        wrong.append(
            f"layernorm_zero_centered_gamma={centred} in Megatron's: norms of {architecture.name} are "
            f"{'whole in a checkpoint' if centred else 'one less in a checkpoint'}"
        )
    _raise("Megatron's config and the Hugging Face config are of different models", wrong)


@hookimpl
def refit_register_source_adapters() -> list[type[SourceAdapter]]:
    """The adapter of this module."""
    return [MegatronAdapter]
