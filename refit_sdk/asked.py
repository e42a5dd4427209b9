"""What users ask, looked at once at the public face, before anything is sent: a check gives the value back as it is
used from there on, or says what was asked, what was found, and what to pass.

>>> engines(["rollout-1", "rollout-0"])
('rollout-0', 'rollout-1')
>>> version(True)
Traceback (most recent call last):
...
refit_sdk.errors.RefitError: version=True is not a whole number: pass an int from 0 to 9223372036854775807
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from refit_sdk.errors import RefitError

MOST: Final = 2**63 - 1
"""The greatest version, and of any number that isn't bounded more closely: what 64 bits with a sign hold."""

LONGEST: Final = 10**9
"""The longest time, in seconds: about what waits of an operating system hold."""

NAME: Final = re.compile(r"[A-Za-z0-9_.:-]+")
"""What the name of an engine is made of."""


def whole(value: Any, name: str, *, least: int = -MOST, most: int = MOST) -> int:
    """An int from `least` to `most`, and no bool.

    >>> whole(3, "rank"), whole(512, "window_ops", least=1)
    (3, 512)
    """
    bounds = f"pass an int{f' from {least} to {most}' if least > -MOST else ''}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise RefitError(f"{name}={value!r} is not a whole number: {bounds}")
    if not least <= value <= most:
        raise RefitError(f"{name}={value} is out of range: {bounds}")
    return value


def version(value: Any) -> int:
    """A version: an int from 0 to `MOST`.

    >>> version(17)
    17
    """
    return whole(value, "version", least=0)


def require(value: Any) -> int:
    """How many engines must commit, 0 for all of them.

    >>> require("all"), require(2)
    (0, 2)
    """
    if isinstance(value, str) and value == "all":
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise RefitError(f"require={value!r} is no number of engines: pass 'all', or an int from 1 on")
    return value


def seconds(value: Any, name: str) -> float:
    """A time in seconds: more than 0, and no more than `LONGEST`.

    >>> seconds(1.5, "deadline")
    1.5
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST:
        raise RefitError(f"{name}={value!r} is no time: pass seconds, a finite number above 0, at most {LONGEST}")
    return value


def engine(value: Any, name: str = "engine") -> str:
    """The name of an engine.

    >>> engine("rollout-0")
    'rollout-0'
    """
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise RefitError(f"{name}={value!r} is no name of an engine: pass a string of letters, digits and any of _.:-")
    if value == "source":
        raise RefitError(f"{name}='source' is what the other side's ranks are called: give the engine another name")
    return value


def engines(value: Any) -> int | tuple[str, ...]:
    """How many engines to wait for, or their names, sorted.

    >>> engines(2)
    2
    """
    if isinstance(value, int):
        return whole(value, "engines", least=1)
    names = tuple(
        engine(each, "engines: engine") for each in _several(value, "engines", "how many, or a list of names")
    )
    if not names:
        raise RefitError(f"engines={value!r} names no engine: pass how many to wait for, or their names")
    twice = sorted({each for each in names if names.count(each) > 1})
    if twice:
        raise RefitError(f"engines={value!r} names {', '.join(twice)} more than once: every engine needs its own name")
    return tuple(sorted(names))


def strings(value: Any, name: str) -> tuple[str, ...]:
    """Several patterns. One string is none: it would be taken for its letters.

    >>> strings(["lm_head.*"], "frozen")
    ('lm_head.*',)
    """
    found = tuple(_several(value, name, "a list of patterns"))
    for each in found:
        if not isinstance(each, str):
            raise RefitError(f"{name}: {each!r} is not a string: pass a list of patterns")
    return found


def pairs(value: Any, name: str) -> tuple[tuple[str, str], ...]:
    """Several pairs of strings.

    >>> pairs([["*", "reshard"]], "routes")
    (('*', 'reshard'),)
    """
    found = []
    for each in _several(value, name, "a list of pairs"):
        pair = tuple(each) if isinstance(each, list | tuple) else ()
        if len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            second = {"routes": "transport", "casts": "dtype"}.get(name, "string")
            raise RefitError(f"{name}: {each!r} is not a pair of strings: pass a list of (pattern, {second})")
        found.append((pair[0], pair[1]))
    return tuple(found)


def _several(value: Any, name: str, what: str) -> Iterable[Any]:
    if isinstance(value, str | bytes):
        raise RefitError(f"{name}={value!r} is one string: put it in a list, {name}=[...]")
    if not isinstance(value, Iterable):
        raise RefitError(f"{name}={value!r} is a {type(value).__name__}: pass {what}")
    return value
