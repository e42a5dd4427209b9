"""A rank's live views: found by name and box, and checked to share no storage that they shouldn't.

Two fragments may store the same element of the same tensor in one place. They may not store *different* elements in
one place: the second write would destroy the first. `check_storage` decides this exactly from addresses and strides:

1. sort the views by the range of addresses that each spans, and keep the pairs whose ranges meet;
2. solve for a common byte of each such pair (views that interleave have none);
3. for a pair of the same tensor, the elements of the box they both claim may be shared if both keep them at the same
   addresses; everything else that the pair shares is an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.errors import LayoutError

if TYPE_CHECKING:
    from refit_sdk.adapter import Fragment

_MAX_WORK: Final[Any] = 1_000_000
"""Candidate solutions that one pair of views may take; real layouts take a handful. (NumPy's stubs know two values.)"""


class Views:
    """A rank's live views by name and alias.

    >>> from refit_sdk.adapter import Fragment
    >>> import numpy as np
    >>> lower = Fragment("w", (8,), Box((4,), (8,)), np.arange(4, 8), aliases=("v",))
    >>> Views([lower]).find("v", Box((0,), (6,)))
    [(Box((4,), (6,)), array([4, 5]))]
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self._of: dict[str, list[tuple[Box, Any]]] = defaultdict(list)
        for fragment in fragments:
            for name in (fragment.name, *fragment.aliases):
                self._of[name].append((fragment.box, fragment.view))

    def __contains__(self, name: str) -> bool:
        """Whether this rank stores any of a tensor, under its name or an alias."""
        return name in self._of

    def find(self, name: str, box: Box) -> list[tuple[Box, Any]]:
        """Every view that stores a part of `box`, as (the part, the view narrowed to it); none for an unknown name.

        Parts are absolute. A part that is stored in several places is given once for each.
        """
        found: list[tuple[Box, Any]] = []
        for held, view in self._of.get(name, ()):
            part = held.intersect(box)
            if part is not None:
                found.append((part, view if part == held else view[part.relative_to(held).slices()]))
        return found


class _Addresses:
    """The addresses of a view as NumPy sees them: nothing behind them is ever read, so device memory is fine too."""

    def __init__(self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
        self.__array_interface__ = {
            "version": 3, "data": (start, True), "shape": shape, "strides": strides, "typestr": f"|V{itemsize}",
        }  # fmt: skip


@frozen(eq=False)
class _Span:
    """A fragment with its view's addresses: the first byte, one past the last, and bytes per step of each dim."""

    fragment: Fragment
    device: str
    start: int
    stop: int
    strides: tuple[int, ...]
    itemsize: int = field(repr=False)

    @classmethod
    def of(cls, fragment: Fragment) -> _Span | None:
        """The span of a fragment; None where its view has no storage (empty, or on the meta device)."""
        view: Any = fragment.view
        start, itemsize = int(view.data_ptr()), int(view.element_size())
        if not start or fragment.box.is_empty:
            return None
        strides = tuple(int(step) * itemsize for step in view.stride())
        last = sum((extent - 1) * step for extent, step in zip(fragment.box.shape, strides, strict=True))
        return cls(fragment, str(view.device), start, start + last + itemsize, strides, itemsize)

    def addresses(self, box: Box) -> npt.NDArray[np.void]:
        """The addresses of a part of the fragment's box."""
        return np.asarray(_Addresses(self.address(box), box.shape, self.strides, self.itemsize))

    def address(self, box: Box) -> int:
        """The address of the first element of a part of the fragment's box."""
        inner = box.relative_to(self.fragment.box)
        return self.start + sum(a * step for a, step in zip(inner.start, self.strides, strict=True))


def check_storage(fragments: Iterable[Fragment]) -> None:
    """`LayoutError`, naming both, if storage would be written as two different elements; or naming the one of which
    the bits that are stored don't mean themselves.

    Views are torch tensors, or anything with their `data_ptr`, `stride`, `element_size` and `device`.
    """
    fragments = list(fragments)
    for fragment in fragments:
        _check_bits(fragment)
    spans = [span for fragment in fragments if (span := _Span.of(fragment)) is not None]
    spans.sort(key=lambda span: (span.device, span.start, span.stop))
    open_spans: list[_Span] = []
    for span in spans:
        _check_itself(span)
        open_spans = [other for other in open_spans if other.stop > span.start and other.device == span.device]
        for other in open_spans:
            if _collide(other, span):
                raise LayoutError(
                    f"{_claim(other)} and {_claim(span)} are stored at the same addresses; each element needs a "
                    "place of its own, or, if they are one tensor under two names, one of them as the other's alias"
                )
        open_spans.append(span)


def _check_bits(fragment: Fragment) -> None:
    """Torch conjugates and negates complex tensors by a mark: bytes written to such a view would mean another value."""
    marks = [mark for mark in ("conj", "neg") if getattr(fragment.view, f"is_{mark}", bool)()]
    if marks:
        raise LayoutError(
            f"{fragment.name!r} {fragment.box} is a view with torch's mark {marks[0]!r}: what is stored isn't what is "
            f"read, so it can't be written in place; give what it is a view of, or resolve_{marks[0]}()"
        )


def _claim(span: _Span) -> str:
    return f"{span.fragment.name!r} {span.fragment.box}"


def _check_itself(span: _Span) -> None:
    """Each dim's step must pass over all that the smaller steps reach: true of every view that slicing makes."""
    reach = span.itemsize
    for step, extent in sorted(zip(span.strides, span.fragment.box.shape, strict=True)):
        if extent > 1 and step < reach:
            raise LayoutError(
                f"{_claim(span)} has strides {span.fragment.view.stride()} for shape {span.fragment.box.shape}: two of "
                "its elements are stored at the same address (an expanded view?); give a view of storage of its own"
            )
        reach += (extent - 1) * step


def _collide(one: _Span, two: _Span) -> bool:
    a, b = one.fragment, two.fragment
    if not _meet(one.addresses(a.box), two.addresses(b.box)):
        return False
    common = a.box.intersect(b.box) if a.name == b.name and a.shape == b.shape else None
    if common is None or not _same_places(one, two, common):
        return True
    # No element of one view is stored in another's place of that view, so what is left to meet are the rests.
    return any(_meet(one.addresses(rest), two.addresses(b.box)) for rest in _without(a.box, common))


def _same_places(one: _Span, two: _Span, box: Box) -> bool:
    """Whether both keep every element of `box`, which both have, at the same address."""
    steps = zip(box.shape, one.strides, two.strides, strict=True)
    return (
        one.itemsize == two.itemsize
        and one.address(box) == two.address(box)
        and all(extent == 1 or a == b for extent, a, b in steps)
    )


def _meet(a: npt.NDArray[np.void], b: npt.NDArray[np.void]) -> bool:
    """Whether they have a byte in common; True also where the answer takes more than `_MAX_WORK`."""
    return bool(np.may_share_memory(a, b, max_work=_MAX_WORK))


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """Disjoint boxes of what `box` has and `hole`, which lies in it, has not."""
    for dim, (start, stop) in enumerate(zip(hole.start, hole.stop, strict=True)):
        if box.start[dim] < start:
            yield box.narrow(dim, box.start[dim], start)
        if stop < box.stop[dim]:
            yield box.narrow(dim, stop, box.stop[dim])
        box = box.narrow(dim, start, stop)
