"""A program bound to live views: which bytes each message is read from or written to, and which copies go with it.

1. Find the views of each piece. At a source they must cover it, and of places that store the same element one is read;
   at a target they must cover it, and all are written. What passes through is kept in a slot of the relay buffer
   (`refit_sdk.relays`), which is one more view to write, and later the one to read; what a process has no use for at
   all is received, and left.
2. A piece that is one view, in the wire's dtype, needs no window buffer if it is contiguous and alone in its message,
   or if it has long runs and the fabric gathers and scatters: its own bytes are sent, or received into.
3. Every other piece gets a stretch of a window buffer; a message that isn't all in place is, where the fabric doesn't
   gather, all in the buffer. There are two buffers a side and device, used in turn, each as large as its largest window
   needs, made here once.
4. Copies between views and stretches (casts among them) are listed per window and engine, for one call each.

The result is only tensors: running it looks up no name and computes no box.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Protocol

import torch
from attrs import define, field, frozen

from refit_sdk.box import Box
from refit_sdk.device import window_buffer
from refit_sdk.dtypes import itemsize
from refit_sdk.errors import LayoutError
from refit_sdk.narrowing import Narrowed, NarrowedRun, may_overflow
from refit_sdk.program import Message, Piece, Program, Window
from refit_sdk.relays import where
from refit_sdk.runs import Runs, is_worth_leaving

Side = Literal["send", "recv"]
Found = tuple[Box, torch.Tensor]


class Finder(Protocol):
    """What this module needs of a rank's views; `refit_sdk.views.Views` has it."""

    def find(self, name: str, box: Box) -> Sequence[Found]:
        """Every view that stores a part of `box`, as (the part, the view narrowed to it)."""
        ...


@frozen(eq=False)
class Transfer:
    """One message: `buffer` is all its bytes, 1-D uint8, or where they lie; `live` says that views' are among them."""

    engine: str
    peer: int
    buffer: torch.Tensor | Runs
    live: bool


@define(eq=False)
class Copies:
    """Copies that are made together, shape by shape, casting where the dtypes differ."""

    into: list[torch.Tensor] = field(factory=list)
    out_of: list[torch.Tensor] = field(factory=list)

    def add(self, into: torch.Tensor, out_of: torch.Tensor) -> None:
        """Append one."""
        self.into.append(into)
        self.out_of.append(out_of)

    def make(self) -> None:
        """Make them. Inference tensors may be among them, so it is done in inference mode."""
        if self.into:
            with torch.inference_mode():
                torch._foreach_copy_(self.into, self.out_of, non_blocking=True)


@define(eq=False)
class Batch:
    """What one window copies for one engine: `pack` before it is sent, `local` from source to target views of this
    process, `unpack` after it arrived. `narrowed` is looked at after packing, and `narrowed_locally` before `local`.
    `live` says that target views are written."""

    pack: Copies = field(factory=Copies)
    local: Copies = field(factory=Copies)
    unpack: Copies = field(factory=Copies)
    live: bool = False
    narrowed: list[NarrowedRun] = field(factory=list)
    narrowed_locally: list[Narrowed] = field(factory=list)


@define(eq=False)
class BoundWindow:
    """A window of tensors. Transfers are in the program's order."""

    number: int
    after: int = -1
    """The place of the last window that must be complete before this one is packed and sent; -1: none."""
    sends: list[Transfer] = field(factory=list)
    recvs: list[Transfer] = field(factory=list)
    batches: dict[str, Batch] = field(factory=lambda: defaultdict(Batch))


@frozen(eq=False)
class Bound:
    """A bound program. `devices` are those of its views, `buffer_nbytes` the size of all its buffers."""

    windows: tuple[BoundWindow, ...]
    devices: frozenset[torch.device]
    buffer_nbytes: int


@frozen(kw_only=True)
class Carried:
    """What all groups of a program can do: the types of devices whose memory they read and write, and whether they take
    runs in place of buffers."""

    devices: frozenset[str] = frozenset({"cpu"})
    scatters: bool = False


def bind(program: Program, *, sources: Finder | None, targets: Finder | None, carried: Carried) -> Bound:
    """Bind a program to views. `LayoutError` if a piece isn't covered by views."""
    finders: dict[Side, Finder | None] = {"send": sources, "recv": targets}
    kept = _Kept(program, finders, carried)
    placer = _Placer(finders, carried, kept)
    placed = [placer.place(window, place) for place, window in enumerate(program.windows)]
    buffers = placer.buffers()
    windows = tuple(_bind_window(window, finders, messages, buffers) for window, messages in placed)
    for window, after in zip(windows, program.relays.after, strict=True):
        window.after = after
    nbytes = sum(buffer.numel() for buffer in buffers.values()) + kept.buffer.numel()
    return Bound(windows, frozenset(placer.devices | {kept.buffer.device}), nbytes)


class _Kept:
    """The relay buffer of a program: where what passes through is written to, and read from."""

    def __init__(self, program: Program, finders: dict[Side, Finder | None], carried: Carried) -> None:
        self._relays = program.relays
        home = next(_homes(program, finders), torch.device("cpu")) if self._relays.nbytes else torch.device("cpu")
        self.buffer = window_buffer(self._relays.nbytes, home if home.type in carried.devices else torch.device("cpu"))

    def slot(self, number: int) -> Found:
        """A slot as a view of its box."""
        slot = self._relays.slots[number]
        dtype: torch.dtype = getattr(torch, slot.dtype)
        return slot.box, self.buffer.narrow(0, slot.offset, slot.nbytes).view(dtype).view(slot.box.shape)

    def found(self, piece: Piece, side: Side, place: int, engine: str) -> list[Found]:
        """The slots for a piece of a window: that which keeps it, or those that feed it, which then cover it."""
        key = where(place, engine, piece)
        if side == "recv":
            return [self.slot(self._relays.kept[key])] if key in self._relays.kept else []
        parts, missing = cover(piece.box, [self._part(piece, number) for number in self._relays.feeds.get(key, ())])
        assert not missing, f"{piece} is sent on and never arrives"
        return parts

    def _part(self, piece: Piece, number: int) -> Found:
        box, view = self.slot(number)
        part = box.intersect(piece.box)
        assert part is not None
        return part, narrow(view, part, box)


def _homes(program: Program, finders: dict[Side, Finder | None]) -> Iterator[torch.device]:
    """The devices of the views that a program names, in its order."""
    for window in program.windows:
        for side, messages in (("send", window.sends), ("recv", window.recvs)):
            finder = finders[side]  # type: ignore[index]
            for piece in (piece for message in messages for piece in message.pieces if piece.own and piece.nbytes):
                yield from (view.device for _, view in finder.find(piece.name, piece.box)) if finder is not None else ()


Slot = tuple[Side, int, torch.device]
"""Which window buffer: for sends or receives, which of the two in turn, on which device."""


@frozen(eq=False)
class _Part:
    """A piece of a message, its views, and where its bytes are: in its first view, or so far into a window buffer."""

    piece: Piece
    found: list[Found]
    offset: int | None

    def stretch(self, buffer: torch.Tensor | None) -> torch.Tensor:
        """Its bytes, in its own dtype and shape."""
        if self.offset is None:
            return self.found[0][1]
        assert buffer is not None
        return buffer.narrow(0, self.offset, self.piece.nbytes).view(_dtype(self.piece)).view(self.piece.box.shape)


@frozen(eq=False)
class _Placed:
    """A message and its parts. `slot` is the window buffer of those that are in one."""

    message: Message
    side: Side
    parts: tuple[_Part, ...]
    slot: Slot

    @property
    def live(self) -> bool:
        """Whether bytes of views are among the message's: of a slot, nobody but this module reads or writes any."""
        return any(part.offset is None and part.piece.own for part in self.parts)

    def bytes_in(self, buffer: torch.Tensor | None) -> torch.Tensor | Runs:
        """All bytes of the message."""
        stretches = [part.stretch(buffer) for part in self.parts]
        if all(part.offset is not None for part in self.parts):
            assert buffer is not None
            first = self.parts[0].offset
            assert first is not None
            return buffer.narrow(0, first, self.message.nbytes)
        if len(stretches) == 1 and stretches[0].is_contiguous():
            # Of a dim of one element torch keeps any step, and then refuses to see bytes.
            return stretches[0].as_strided((stretches[0].numel(),), (1,)).view(torch.uint8)
        return Runs.of(stretches)


class _Placer:
    """Finds the views of all messages and adds up what each window buffer must hold."""

    def __init__(self, finders: dict[Side, Finder | None], carried: Carried, kept: _Kept) -> None:
        self._finders = finders
        self._carried = carried
        self._kept = kept
        self._largest: dict[Slot, int] = {}
        self.devices: set[torch.device] = set()

    def place(self, window: Window, place: int) -> tuple[Window, list[_Placed]]:
        used: dict[Slot, int] = {}
        sides: tuple[tuple[Side, tuple[Message, ...]], ...] = (("recv", window.recvs), ("send", window.sends))
        placed = [self._place(m, side, place, used) for side, ms in sides for m in ms if m.nbytes]
        for slot, nbytes in used.items():
            self._largest[slot] = max(nbytes, self._largest.get(slot, 0))
        return window, placed

    def _place(self, message: Message, side: Side, place: int, used: dict[Slot, int]) -> _Placed:
        pieces = [(p, self._found(p, side, place, message.engine)) for p in message.pieces if p.nbytes]
        devices = [view.device for _, found in pieces for _, view in found]
        self.devices.update(devices)
        device = devices[0] if devices else self._kept.buffer.device
        slot = (side, place % 2, device if device.type in self._carried.devices else torch.device("cpu"))
        at, parts = used.get(slot, 0), []
        for piece, found in pieces:
            if self._stays(piece, found, alone=len(pieces) == 1):
                parts.append(_Part(piece, found, None))
                continue
            at += -at % itemsize(piece.dtype)
            parts.append(_Part(piece, found, at))
            at += piece.nbytes
        if at > used.get(slot, 0):
            used[slot] = at + -at % 16
        return _Placed(message, side, tuple(parts), slot)

    def _found(self, piece: Piece, side: Side, place: int, engine: str) -> list[Found]:
        """Where a piece is read from, or written to."""
        if side == "send" and piece.own:
            return _views(piece, self._finders[side], side)
        own = _views(piece, self._finders[side], side) if side == "recv" and piece.own else []
        return own + self._kept.found(piece, side, place, engine)

    def _stays(self, piece: Piece, found: list[Found], *, alone: bool) -> bool:
        """Whether a piece's bytes are sent from, or received into, its first view."""
        if not found:
            return False
        box, view = found[0]
        if box != piece.box or view.dtype != _dtype(piece) or view.device.type not in self._carried.devices:
            return False
        if self._carried.scatters and is_worth_leaving(view):
            return True
        return alone and view.is_contiguous() and not view.is_conj() and not view.is_neg()

    def buffers(self) -> dict[Slot, torch.Tensor]:
        return {slot: window_buffer(nbytes, slot[2]) for slot, nbytes in self._largest.items()}


def _dtype(piece: Piece) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, piece.dtype)
    return dtype


def _views(piece: Piece, finder: Finder | None, side: Side) -> list[Found]:
    """Detached views that make up a piece: disjoint ones to send, all there are to receive."""
    found = [(box, view.detach()) for box, view in finder.find(piece.name, piece.box)] if finder is not None else []
    if found and found[0][0] == piece.box:
        return found[:1] if side == "send" else found
    disjoint, missing = cover(piece.box, found)
    if missing:
        raise LayoutError(
            f"this process is to {side} {piece.name} {piece.box}, and its {'source' if side == 'send' else 'target'} "
            f"views have no {', '.join(map(str, missing))} of it; its tensors are not those that were planned with"
        )
    return disjoint if side == "send" else found


def cover(box: Box, found: Iterable[Found]) -> tuple[list[Found], list[Box]]:
    """Disjoint parts of what was found that make up `box`, earlier ones preferred, and what is left of it.

    >>> cover(Box((0,), (6,)), [(Box((0,), (4,)), torch.arange(4)), (Box((2,), (5,)), torch.arange(2, 5))])
    ([(Box((0,), (4,)), tensor([0, 1, 2, 3])), (Box((4,), (5,)), tensor([4]))], [Box((5,), (6,))])
    """
    parts: list[Found] = []
    missing = [box]
    for held, view in found:
        parts += [(part, narrow(view, part, held)) for hole in missing if (part := hole.intersect(held)) is not None]
        missing = [rest for hole in missing for rest in _without(hole, held)]
    return parts, missing


def _without(box: Box, other: Box) -> Iterator[Box]:
    """Disjoint boxes of the elements that `other` doesn't have."""
    common = box.intersect(other)
    if common is None:
        yield box
        return
    for dim, (start, stop) in enumerate(zip(common.start, common.stop, strict=True)):
        if box.start[dim] < start:
            yield box.narrow(dim, box.start[dim], start)
        if stop < box.stop[dim]:
            yield box.narrow(dim, stop, box.stop[dim])
        box = box.narrow(dim, start, stop)


def narrow(view: torch.Tensor, part: Box, held: Box) -> torch.Tensor:
    """The part of a view that stores `held`."""
    return view if part == held else view[part.relative_to(held).slices()]


def _bind_window(
    window: Window, finders: dict[Side, Finder | None], messages: list[_Placed], buffers: dict[Slot, torch.Tensor]
) -> BoundWindow:
    bound = BoundWindow(window.number)
    for placed in messages:
        _bind_message(placed, buffers.get(placed.slot), bound)
    for engine, piece in window.copies:
        if piece.nbytes:
            _bind_copy(piece, finders, bound.batches[engine])
    return bound


def _bind_message(placed: _Placed, buffer: torch.Tensor | None, bound: BoundWindow) -> None:
    message = placed.message
    transfer = Transfer(message.engine, message.peer, placed.bytes_in(buffer), placed.live)
    (bound.sends if placed.side == "send" else bound.recvs).append(transfer)
    batch = bound.batches[message.engine]
    if placed.side == "recv":
        _bind_unpack(placed, buffer, batch)
    else:
        _bind_pack(placed, buffer, batch)


def _bind_unpack(placed: _Placed, buffer: torch.Tensor | None, batch: Batch) -> None:
    for part in placed.parts:
        stretch = part.stretch(buffer)
        for box, view in part.found[1:] if part.offset is None else part.found:
            batch.unpack.add(view, narrow(stretch, box, part.piece.box))
            batch.live |= part.piece.own


def _bind_pack(placed: _Placed, buffer: torch.Tensor | None, batch: Batch) -> None:
    narrowed: dict[torch.dtype, list[tuple[_Part, Narrowed]]] = {}
    for part in placed.parts:
        if part.offset is None:
            continue
        stretch = part.stretch(buffer)
        for box, view in part.found:
            batch.pack.add(narrow(stretch, box, part.piece.box), view)
            if may_overflow(view.dtype, stretch.dtype):
                about = Narrowed(part.piece.name, view, stretch.dtype)
                narrowed.setdefault(stretch.dtype, []).append((part, about))
    for dtype, pairs in narrowed.items():
        assert buffer is not None
        run = _run_of(dtype, [part for part, _ in pairs], buffer)
        batch.narrowed.append(NarrowedRun(run, tuple(about for _, about in pairs)))


def _run_of(dtype: torch.dtype, parts: list[_Part], buffer: torch.Tensor) -> torch.Tensor:
    """The stretch of a window buffer from the first of the parts, which are of one dtype, to the last."""
    first, last = parts[0], parts[-1]
    assert first.offset is not None
    assert last.offset is not None
    return buffer[first.offset : last.offset + last.piece.nbytes].view(dtype)


def _bind_copy(piece: Piece, finders: dict[Side, Finder | None], batch: Batch) -> None:
    into = _views(piece, finders["recv"], "recv")
    for box, view in _views(piece, finders["send"], "send"):
        for target_box, target in into:
            part = box.intersect(target_box)
            if part is not None:
                batch.local.add(narrow(target, part, target_box), narrow(view, part, box))
                batch.live = True
        if may_overflow(view.dtype, _dtype(piece)):
            batch.narrowed_locally.append(Narrowed(piece.name, view, _dtype(piece)))
