"""Sees every operation of an engine's loader, and writes down which elements of which checkpoint tensors go where.

Every storage that is met is a `Store`: a checkpoint tensor, a destination, or a buffer between them. What a region of
it got is one `Written`: strided copies out of checkpoint tensors, a constant, or names and the reason why it can't be
followed. A copy is resolved as it is made, so that what is written is always told in checkpoint tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from attrs import define, field, frozen
from torch.utils._python_dispatch import TorchDispatchMode

from refit_adapters._strided import Copy, Unfollowed, chained
from refit_sdk.errors import LayoutError

Checkpoint = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each checkpoint tensor, by name."""

_ATEN: Final = torch.ops.aten


@frozen(eq=False)
class Piece:
    """A strided copy out of a checkpoint tensor, and the dtypes that its values have had."""

    copy: Copy
    name: str
    dtypes: tuple[torch.dtype, ...]


@frozen(eq=False)
class Written:
    """What a region got: pieces of checkpoint tensors; or a constant; or names and why they can't be followed."""

    region: Copy
    pieces: tuple[Piece, ...] = ()
    value: Any = None
    view: torch.Tensor | None = None
    names: frozenset[str] = frozenset()
    reason: str = ""


@define(eq=False)
class Store:
    """A storage that is followed. `into` names a destination, `name` a checkpoint tensor."""

    storage: torch.UntypedStorage
    itemsize: int
    dtype: torch.dtype
    numel: int
    into: str = ""
    begin: int = 0
    name: str = ""
    written: dict[Copy, Written] = field(factory=dict)
    was_read: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The checkpoint tensors that went into it."""
        if self.name:
            return frozenset((self.name,))
        return frozenset(n for each in self.written.values() for n in (*each.names, *(p.name for p in each.pieces)))

    def take(self, written: Written) -> None:
        """Take what a region got, in place of what the same region got before."""
        if written.region.size == self.numel:
            self.written.clear()
        self.written[written.region] = written

    @property
    def whole(self) -> Written | None:
        """What all of it got at once, if that's how it was written last."""
        last = next(reversed(self.written.values()), None)
        return last if last is not None and last.region.size == self.numel else None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations of a loader; copies are written down and not made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stores: dict[int, Store] = {}

    def store_of(self, tensor: torch.Tensor) -> Store | None:
        """The store of a tensor, if it's followed."""
        return self._stores.get(tensor.untyped_storage()._cdata)

    def _new(self, tensor: torch.Tensor, **about: Any) -> Store:
        storage = tensor.untyped_storage()
        itemsize = tensor.element_size()
        made = Store(storage, itemsize, tensor.dtype, storage.nbytes() // itemsize, **about)
        self._stores[storage._cdata] = made
        return made

    @property
    def stranded(self) -> frozenset[str]:
        """Checkpoint tensors that were copied into a tensor that is no destination, and that nothing was read from."""
        ends = (store for store in self._stores.values() if not (store.into or store.name or store.was_read))
        return frozenset(piece.name for store in ends for each in store.written.values() for piece in each.pieces)

    def destination(self, name: str, tensor: torch.Tensor) -> Store:
        """Follow a destination. One that shares its storage with another is known by the first's name."""
        found = self.store_of(tensor)
        return self._new(tensor, into=name, begin=tensor.storage_offset()) if found is None else found

    def weights(self, checkpoint: Checkpoint, given: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the loader is given, one at a time."""
        for name, (shape, dtype) in checkpoint.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._new(tensor, name=name)
            given.append(name)
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write down what the operation does to what is followed; make it if it does nothing to that."""
        kwargs = kwargs or {}
        tensors = list(_tensors((*args, *kwargs.values())))
        if all(self._is_plain(tensor, func) for tensor in tensors):
            return func(*args, **kwargs)
        if func in _FACTORIES:
            return self._made(func, args, kwargs)
        if func is _ATEN.copy_.default:
            return self._copy(args[0], args[1])
        if func in _READS:
            raise LayoutError(
                f"the engine's loader reads values of {self._told(tensors)} ({func}), and decides by them"
            )
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs, tensors)
        follow = _FOLLOWED.get(func)
        return self._default(func, args, kwargs, tensors) if follow is None else follow(self, func, *args, **kwargs)

    def _is_plain(self, tensor: torch.Tensor, func: Any) -> bool:
        """Whether nothing of a tensor is followed: a destination with values that weren't loaded may be read."""
        store = self.store_of(tensor)
        return store is None or not (tensor.is_meta or store.name or store.written or func._schema.is_mutable)

    def _told(self, tensors: Sequence[torch.Tensor]) -> str:
        return ", ".join(sorted(self._names(tensors))[:4]) or "a parameter"

    def _names(self, tensors: Sequence[torch.Tensor]) -> frozenset[str]:
        stores = [store for tensor in tensors if (store := self.store_of(tensor)) is not None]
        return frozenset().union(*(store.names for store in stores))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """`copy_`, into a destination or a buffer."""
        self._write(target, source.expand(target.shape))
        return target

    def _write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        store = self.store_of(target) or self._new(target)
        origin = self.store_of(source)
        region = _region(target)
        if origin is None:
            if source.is_meta:
                raise LayoutError(f"the engine's loader fills {store.into or 'a buffer'} with values of its own making")
            store.take(Written(region, value=source.detach().clone(), view=target))
        elif origin.whole is not None and origin.whole.value is not None and is_number(origin.whole.value):
            store.take(Written(region, value=origin.whole.value, view=target))
        else:
            try:
                store.take(Written(region, self._pieces(target, source, store, origin)))
            except Unfollowed as reason:
                store.take(Written(region, names=self._names([source]), reason=str(reason)))

    def _pieces(self, target: torch.Tensor, source: torch.Tensor, store: Store, origin: Store) -> tuple[Piece, ...]:
        """What a copy brings, as copies out of checkpoint tensors."""
        origin.was_read = True
        if target.element_size() != store.itemsize or source.element_size() != origin.itemsize:
            raise Unfollowed("its bytes are read as another dtype")
        copy = Copy.between(target.shape, _place(source), _place(target))
        if origin.name and origin.written:
            raise Unfollowed("it was changed before it was copied")
        if origin.name:
            return (Piece(copy, origin.name, (origin.dtype, target.dtype)),)
        return tuple(_chain(origin, copy, target.dtype))

    def _mutate(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """An operation that changes a tensor in a way that isn't a copy."""
        changed = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor)
        ]
        constant = func in _CONSTANT
        names = frozenset() if constant else self._names(tensors)
        if not constant and not names:
            raise LayoutError(f"the engine's loader changes {self._into(changed)} by {func}, of nothing that it loads")
        value = (args[1] if len(args) > 1 else 0) if constant else None
        for each in changed:
            store = self.store_of(each) or self._new(each)
            reason = f"{func} isn't a copy" if names else ""
            store.take(Written(_region(each), value=value, view=each, names=names, reason=reason))
        return changed[0]

    def _into(self, tensors: Sequence[torch.Tensor]) -> str:
        return ", ".join(store.into for t in tensors if (store := self.store_of(t)) is not None) or "a tensor"

    def _made(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """A new tensor like one that is followed: what it's filled with is a constant."""
        made: torch.Tensor = func(*args, **{**kwargs, "device": "meta"})
        value = _FACTORIES[func](args)
        if value is not None:
            self._new(made).take(Written(_region(made), value=value, view=made))
        return made

    def _default(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """A view, or an operation whose result isn't made of elements as they were."""
        made = func(*args, **kwargs)
        new = [each for each in _tensors((made,)) if self.store_of(each) is None]
        for tensor in tensors if new else ():
            store = self.store_of(tensor)
            if store is not None:
                store.was_read = True
        for each in new:
            self._new(each).take(Written(_region(each), names=self._names(tensors), reason=f"{func} isn't a copy"))
        return made

    def _clone(self, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = kwargs.get("dtype") or tensor.dtype
        made = torch.empty(tensor.shape, dtype=dtype, device="meta")
        self._write(made, tensor)
        return made

    def _cat(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        made: torch.Tensor = func([tensor.to("meta") for tensor in tensors], dim)
        at = 0
        for tensor in tensors:
            if func is _ATEN.stack.default:
                self._write(made.select(dim, at), tensor)
                at += 1
            elif tensor.numel():
                self._write(made.narrow(dim, at, tensor.shape[dim]), tensor)
                at += tensor.shape[dim]
        return made

    def _select(self, func: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        """Rows by number, run by run."""
        rows = index.flatten().tolist()
        made = torch.empty(
            (*tensor.shape[:dim], len(rows), *tensor.shape[dim + 1 :]), dtype=tensor.dtype, device="meta"
        )
        at = 0
        while at < len(rows):
            end = at + 1
            while end < len(rows) and rows[end] == rows[end - 1] + 1:
                end += 1
            self._write(made.narrow(dim, at, end - at), tensor.narrow(dim, rows[at] % tensor.shape[dim], end - at))
            at = end
        return made

    def _index(self, func: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
        dims = [dim for dim, index in enumerate(indices) if index is not None]
        index = indices[dims[0]] if len(dims) == 1 else None
        if index is None or index.ndim != 1 or index.is_meta or self.store_of(tensor) is None:
            made: torch.Tensor = self._default(func, (tensor, indices), {}, [tensor])
            return made
        rows = index.nonzero().flatten() if index.dtype in (torch.bool, torch.uint8) else index
        return self._select(func, tensor, dims[0], rows)


_READS: Final = {_ATEN._local_scalar_dense.default, _ATEN.equal.default, _ATEN.nonzero.default}
_CONSTANT: Final = {_ATEN.fill_.Scalar, _ATEN.zero_.default}
_FACTORIES: Final[Mapping[Any, Callable[[Any], Any]]] = {
    _ATEN.empty_like.default: lambda args: None,
    _ATEN.new_empty.default: lambda args: None,
    _ATEN.new_empty_strided.default: lambda args: None,
    _ATEN.zeros_like.default: lambda args: 0,
    _ATEN.new_zeros.default: lambda args: 0,
    _ATEN.ones_like.default: lambda args: 1,
    _ATEN.new_ones.default: lambda args: 1,
    _ATEN.full_like.default: lambda args: args[1],
    _ATEN.new_full.default: lambda args: args[2],
}
"""Operations that take only shape and dtype of a tensor, and what they fill the new one with."""
_FOLLOWED: Final[Mapping[Any, Callable[..., Any]]] = {
    _ATEN.clone.default: Recorder._clone,
    _ATEN._to_copy.default: Recorder._clone,
    _ATEN.cat.default: Recorder._cat,
    _ATEN.stack.default: Recorder._cat,
    _ATEN.index_select.default: Recorder._select,
    _ATEN.index.Tensor: Recorder._index,
}
"""Operations whose results are made of elements as they were."""


def is_number(value: Any) -> bool:
    """Whether a constant is a number, not a tensor."""
    return isinstance(value, (bool, int, float))


def _region(view: torch.Tensor) -> Copy:
    """A view's region, as a copy onto itself."""
    return Copy.between(view.shape, _place(view), _place(view))


def _place(view: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return int(view.storage_offset()), view.stride()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _chain(origin: Store, copy: Copy, dtype: torch.dtype) -> Iterator[Piece]:
    """What a copy out of a buffer brings of what the buffer got."""
    if sum(piece.copy.size for each in origin.written.values() for piece in each.pieces) > origin.numel:
        raise Unfollowed("it comes from a buffer that was written in overlapping parts")
    for each in origin.written.values():
        if each.names:
            raise Unfollowed(each.reason)
        if each.value is not None:
            raise Unfollowed("it comes from a buffer that has constants as well")
        for piece in each.pieces:
            on = chained(piece.copy, copy)
            if on is not None:
                yield Piece(on, piece.name, (*piece.dtypes, dtype))
