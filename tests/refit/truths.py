"""What ranks were told, held against what their engines' bytes and fences really are.

Untouched means that the bytes are what they were; complete, that they are the new version's and that the rank serves.
Torn or in doubt means that it doesn't serve.
"""

from __future__ import annotations

from collections.abc import Mapping

from nodes import Told

KEPT_BACK = ("torn", "in doubt")


def is_target(name: str) -> bool:
    """Whether a rank is of an engine."""
    return not name.startswith("source")


def engine_of(name: str) -> str:
    """The engine in a rank's name."""
    return name.partition("[")[0]


def untruths(heard: Mapping[str, Told], *, before: Mapping[str, str], version: int) -> list[str]:
    """Everything said of an engine that the bytes or the fences of its ranks that were heard contradict."""
    found = []
    for teller, told in heard.items():
        for engine, state in told.engines.items():
            for name, rank in heard.items():
                if engine_of(name) == engine and not _is_true(state, rank, before=before[name], version=version):
                    said = f"{teller} says that {engine} is {state}"
                    found.append(f"{said}; {name} holds {rank.content}, held {before[name]}, fenced: {rank.fenced}")
    return found


def _is_true(state: str, rank: Told, *, before: str, version: int) -> bool:
    match state:
        case "untouched":
            return rank.content == before
        case "complete":
            return rank.content == str(version) and rank.fenced is None
        case _:
            return state in KEPT_BACK


def unfenced(heard: Mapping[str, Told]) -> list[str]:
    """Ranks that serve though they were told that their engine may not hold one version."""
    return [
        name
        for name, told in heard.items()
        if is_target(name) and told.engines.get(engine_of(name)) in KEPT_BACK and told.fenced is None
    ]


def silent(heard: Mapping[str, Told]) -> list[str]:
    """Ranks that raised nothing."""
    return [name for name, told in heard.items() if not told.raised]


def unnamed(heard: Mapping[str, Told], victim: str) -> dict[str, str]:
    """What was raised without naming the victim, by rank."""
    return {name: told.text for name, told in heard.items() if told.raised and victim not in told.text}
