"""A tensor of a plan as a picture: what each rank holds of it, sources above, engines below. SVG text, no dependency.

1. Of the world, every rank's boxes of the tensor are taken, in the tensor's own coordinates.
2. Ranks of a side that hold the same boxes share a panel: the whole tensor as an outline, the boxes filled, in the
   colour of the first of them.
3. Two dims are drawn, those that are cut before those that aren't, the first downwards. Others are named below.

>>> text = svg("w", (4,), [[Panel("source[0]", (Box((0,), (2,)),), 0)]])
>>> text[:4], text.count("<rect")
('<svg', 3)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from attrs import frozen

from refit_sdk.aliases import member
from refit_sdk.box import Box
from refit_sdk.errors import RefitError

if TYPE_CHECKING:
    from refit_sdk.plan import Plan
    from refit_sdk.world import Manifest, World

COLOURS: Final = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bb5500", "#777777")
"""Told apart also by people who see few colours; they repeat after eight ranks."""

_LONGEST: Final = 132
_SHORTEST: Final = 20
_GAP: Final = 28
_LINE: Final = 18
_IN_A_ROW: Final = 6


@frozen
class Panel:
    """One drawing of the tensor: whose it is, the boxes that are held, and the number of the colour."""

    label: str
    boxes: tuple[Box, ...]
    colour: int


@frozen
class _Scale:
    """Which dims run down and across (None: the tensor has no second one), and their lengths on paper."""

    down: int | None
    across: int | None
    height: int
    width: int


def draw(plan: Plan, name: str) -> str:
    """The picture of one tensor of a plan, by its checkpoint name. `RefitError` if nobody holds it."""
    rows: dict[str, list[tuple[str, int, tuple[Box, ...]]]] = defaultdict(list)
    shapes = set()
    for seat in sorted(plan.world.seats):
        found = list(_held(plan.world.manifest(seat), name))
        shapes |= {shape for shape, _ in found}
        if found:
            rows[seat.engine].append((str(seat), seat.rank, tuple(sorted({box for _, box in found}))))
    if not shapes:
        raise RefitError(f"no rank of the plan holds {name!r}; {_some_names(plan.world)}")
    return svg(name, max(shapes), [_panels(row) for row in rows.values()])


def _held(manifest: Manifest, name: str) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The tensor's shape and each box of it that a rank holds, under this name or one that this is an alias of."""
    template, index = member(dict(manifest.aliases).get(name, name))
    for part in manifest.parts:
        for region in part.regions if part.spec.name == template else ():
            members, box = region.box.split_dims(part.spec.num_stacked)
            if members.contains(index) and not region.box.is_empty:
                yield part.spec.shape, box


def _some_names(world: World) -> str:
    names = sorted({part.spec.name for manifest in world.manifests for part in manifest.parts})
    return f"it has {', '.join(names[:6])}{', …' if len(names) > 6 else ''}"


def _panels(row: Sequence[tuple[str, int, tuple[Box, ...]]]) -> list[Panel]:
    """Ranks with equal boxes share a panel."""
    alike: dict[tuple[Box, ...], list[tuple[str, int]]] = defaultdict(list)
    for label, rank, boxes in row:
        alike[boxes].append((label, rank))
    return [Panel(_together(who), boxes, who[0][1]) for boxes, who in alike.items()]


def _together(who: Sequence[tuple[str, int]]) -> str:
    side = who[0][0].rpartition("[")[0]
    numbers = [str(rank) for _, rank in who]
    shown = numbers if len(numbers) < 5 else [*numbers[:3], "…", numbers[-1]]
    return f"{side}[{', '.join(shown)}]"


def svg(name: str, shape: tuple[int, ...], rows: Sequence[Sequence[Panel]]) -> str:
    """The picture: a title, and under it a row of panels for each side."""
    scale = _scale(shape, [box for row in rows for panel in row for box in panel.boxes])
    lines = [line for row in rows for line in _lines(row)]
    step = scale.height + _LINE + _GAP
    width = max(420, _GAP + max(len(line) for line in lines) * (max(scale.width, 96) + _GAP))
    height = 2 * _LINE + len(lines) * step + _LINE
    parts = [
        _text(_GAP, _LINE + 4, f"{name}  {'×'.join(map(str, shape)) or 'scalar'}", bold=True),
        *(each for number, line in enumerate(lines) for each in _line(line, scale, shape, 2 * _LINE + number * step)),
        _text(_GAP, height - 8, _caption(shape, scale)),
    ]
    size = f'width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join((head, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>\n"))


def _lines(row: Sequence[Panel]) -> Iterator[Sequence[Panel]]:
    for first in range(0, len(row), _IN_A_ROW):
        yield row[first : first + _IN_A_ROW]


def _scale(shape: tuple[int, ...], boxes: Sequence[Box]) -> _Scale:
    whole = Box.whole(shape)
    cut = [d for d in range(len(shape)) if any((b.start[d], b.stop[d]) != (0, whole.stop[d]) for b in boxes)]
    drawn = sorted([*cut, *(dim for dim in range(len(shape)) if dim not in cut)][:2])
    if len(drawn) < 2:
        return _Scale(None, drawn[0] if drawn else None, _SHORTEST + 4, _LONGEST)
    longest = max(shape[dim] for dim in drawn)
    height, width = (max(_SHORTEST, _LONGEST * shape[dim] // max(longest, 1)) for dim in drawn)
    return _Scale(drawn[0], drawn[1], height, width)


def _line(line: Sequence[Panel], scale: _Scale, shape: tuple[int, ...], top: int) -> Iterator[str]:
    for number, panel in enumerate(line):
        left = _GAP + number * (max(scale.width, 96) + _GAP)
        yield f'<rect x="{left}" y="{top}" width="{scale.width}" height="{scale.height}" fill="#eeeeee"/>'
        for box in panel.boxes:
            x, width = _run(box, scale.across, shape, scale.width)
            y, height = _run(box, scale.down, shape, scale.height)
            yield (
                f'<rect x="{left + x}" y="{top + y}" width="{width}" height="{height}" '
                f'fill="{COLOURS[panel.colour % len(COLOURS)]}" stroke="#ffffff" stroke-width="1">'
                f"<title>{escape(f'{panel.label} {box}')}</title></rect>"
            )
        yield _text(left, top + scale.height + _LINE - 2, panel.label)


def _run(box: Box, dim: int | None, shape: tuple[int, ...], length: int) -> tuple[int, int]:
    """Where a box begins on paper, and how far it goes; a thin one is still seen."""
    if dim is None or not shape[dim]:
        return 0, length
    start, stop = (length * at // shape[dim] for at in (box.start[dim], box.stop[dim]))
    return min(start, length - 2), max(2, stop - start)


def _text(x: int, y: int, words: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}"{weight}>{escape(words)}</text>'


def _caption(shape: tuple[int, ...], scale: _Scale) -> str:
    across = "" if scale.across is None else f"dim {scale.across} runs across"
    down = "" if scale.down is None else f"dim {scale.down} runs down, "
    rest = [str(dim) for dim in range(len(shape)) if dim not in (scale.down, scale.across)]
    return down + across + (f"; dims {', '.join(rest)} aren't drawn" if rest else "")
