"""Rules: patterns over full checkpoint names, and which of them each member of a family falls under.

A pattern matches as `fnmatch.fnmatchcase` does. A rule that tells members of a family apart splits it.

1. A pattern without digits, `?` and `[` can't tell members apart: only a `*` can match the numbers, whatever they are.
   So one member speaks for all. The same goes for a pattern whose literal start contradicts the family's.
2. If no rule can tell them apart, the family is one group. Otherwise every member is matched, and members under the
   same rules are folded into boxes again.
3. Every rule has to take something: one that matches no name, or only names that earlier rules take, is a violation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from fnmatch import translate
from typing import Final

from attrs import field, frozen

from refit_sdk.box import Box
from refit_sdk.tensor import merge_indices

Members = tuple[Box, ...]

LIKE: Final = 0.6
"""How like a name must be to what a pattern says to be shown as the nearest."""


@frozen
class Pattern:
    """One pattern, compiled.

    >>> Pattern("*.experts.*").tells_apart("layers.{}.experts.{}.w")
    False
    >>> Pattern("layers.[0-3].*").tells_apart("layers.{}.w"), Pattern("layers.1.*").tells_apart("head.{}.w")
    (True, False)
    """

    text: str
    _regex: re.Pattern[str] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_regex", re.compile(translate(self.text)))

    def matches(self, name: str) -> bool:
        """As `fnmatch.fnmatchcase(name, text)`."""
        return self._regex.match(name) is not None

    def tells_apart(self, template: str) -> bool:
        """Whether it may match some members of a family with this name and not others."""
        if "{}" not in template or not any(char in "0123456789?[" for char in self.text):
            return False
        literal, fixed = re.split(r"[*?\[]", self.text, maxsplit=1)[0], template.split("{}", 1)[0]
        shared = min(len(literal), len(fixed))
        return literal[:shared] == fixed[:shared]


def partition(
    patterns: Sequence[Pattern], template: str, members: Members
) -> Iterator[tuple[Members, tuple[int, ...]]]:
    """Groups of members, and the numbers of the patterns that match each group. `members` are disjoint and not empty.

    >>> rules = [Pattern("*.0.w"), Pattern("*")]
    >>> list(partition(rules, "layers.{}.w", (Box((0,), (3,)),)))
    [((Box((0,), (1,)),), (0, 1)), ((Box((1,), (3,)),), (1,))]
    """
    first = template.format(*members[0].start)
    if not any(pattern.tells_apart(template) for pattern in patterns):
        yield members, _matching(patterns, first)
        return
    groups: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for box in members:
        for index in box.points():
            groups.setdefault(_matching(patterns, template.format(*index)), []).append(index)
    for rules in sorted(groups):
        yield merge_indices(groups[rules]), rules


def _matching(patterns: Sequence[Pattern], name: str) -> tuple[int, ...]:
    return tuple(number for number, pattern in enumerate(patterns) if pattern.matches(name))


def nearest(pattern: str, names: Iterable[str]) -> str | None:
    """The name that a pattern which matches none of them may have meant, or None where none is near.

    What isn't a wildcard is compared with the part of each name that is most like it; of names that differ in numbers
    only, the first is.

    >>> nearest("visua.*", ["norm.weight", "visual.blocks.0.w"]), nearest("*.q_porj.*", ["norm", "l.q_proj.w"])
    ('visual.blocks.0.w', 'l.q_proj.w')
    """
    text = re.sub(r"\[.*?\]|[*?]", "", pattern)
    kinds = {re.sub(r"\d+", "0", name): name for name in sorted(names, reverse=True)}
    best = max(kinds, key=lambda kind: _likeness(text, kind), default="")
    return kinds[best] if best and _likeness(text, best) >= LIKE else None


def meant(pattern: str, names: Iterable[str]) -> str:
    """The nearest name as the end of a message, or nothing.

    >>> meant("*.q_porj.*", ["l.q_proj.w"]), meant("*.q_porj.*", ["norm"])
    ('; the nearest name is l.q_proj.w', '')
    """
    near = nearest(pattern, names)
    return f"; the nearest name is {near}" if near else ""


def _likeness(text: str, name: str) -> float:
    """How like a text is to the part of a name that is most like it, from 0 to 1."""
    match = SequenceMatcher(None, name, text, autojunk=False)
    first = next((block.a - block.b for block in match.get_matching_blocks() if block.size), 0)
    part = name[max(0, first) : max(0, first) + len(text)]
    return SequenceMatcher(None, part, text, autojunk=False).ratio()


@frozen
class Rules:
    """An ordered list of rules of one kind ("route", "cast", "ignore"), with what each leads to.

    >>> rules = Rules("route", ("*.norm", "*.w", "layers.*"), ("broadcast", "reshard", "reshard"))
    >>> rules.useless([(1, 2), (1,)])
    ["route '*.norm' → 'broadcast' matches no tensor", \
"route 'layers.*' → 'reshard' can never match: earlier rules take every tensor that it matches"]
    """

    kind: str
    texts: tuple[str, ...]
    values: tuple[str, ...] = ()

    @property
    def patterns(self) -> list[Pattern]:
        """The patterns, compiled."""
        return [Pattern(text) for text in self.texts]

    def label(self, number: int) -> str:
        """A rule as it is named in messages."""
        value = f" → {self.values[number]!r}" if self.values else ""
        return f"{self.kind} {self.texts[number]!r}{value}"

    def useless(self, hits: Iterable[tuple[int, ...]], *, names: Iterable[str] = ()) -> list[str]:
        """Violations: rules that are in none of the hits, or first in none. `names` may be what a rule meant."""
        matched: set[int] = set()
        taking: set[int] = set()
        for rules in set(hits):
            matched.update(rules)
            taking.update(self._takers(rules))
        known = tuple(names)
        return [
            f"{self.label(number)} matches no tensor{meant(self.texts[number], known)}"
            if number not in matched
            else f"{self.label(number)} can never match: earlier rules take every tensor that it matches"
            for number in range(len(self.texts))
            if number not in taking
        ]

    def _takers(self, rules: tuple[int, ...]) -> Iterator[int]:
        """The first rule of a hit; for casts, which are permissions, the first of each dtype."""
        seen: set[str] = set()
        for number in rules:
            key = self.values[number] if self.kind == "cast" else ""
            if key not in seen:
                seen.add(key)
                yield number
