"""Exactly one adapter must recognise a model; anything else is an error that says what to pass."""

from types import SimpleNamespace
from typing import Any

import pytest

from refit_sdk import plugins
from refit_sdk.errors import PluginError
from refit_sdk.hookspecs import hookimpl
from refit_sdk.plugins import Candidate, Origin, Registry, choose_adapter


def adapter(name: str, accepted: type, reason: str | None = None) -> type[Any]:
    class Adapter:
        @classmethod
        def accepts(cls, model: object) -> bool:
            return isinstance(model, accepted)

        @classmethod
        def missing(cls) -> str | None:
            return reason

        def prepare(self) -> None: ...
        def describe(self) -> list[Any]:
            return []

        def identity(self) -> int:
            return 0

    Adapter.name = name  # type: ignore[attr-defined]
    return Adapter


def registered(*classes: type[Any], distributions: tuple[str, ...] = ("acme",)) -> Registry:
    plugin = SimpleNamespace(refit_register_source_adapters=hookimpl(lambda: list(classes)))
    return plugins.load([Candidate(Origin("x", "x", d, "1"), lambda: plugin) for d in distributions], environ={})


def test_the_one_that_accepts() -> None:
    numbers, words = adapter("numbers", int), adapter("words", str)
    registry = registered(numbers, words)
    assert choose_adapter(registry, "source_adapter", 3) is numbers
    assert choose_adapter(registry, "source_adapter", "three") is words


def test_a_name_decides_without_asking() -> None:
    numbers = adapter("numbers", int)
    assert choose_adapter(registered(numbers), "source_adapter", "three", "numbers") is numbers


def test_none_accepts() -> None:
    registry = registered(adapter("numbers", int), adapter("words", str))
    with pytest.raises(
        PluginError, match=r"must accept a builtins\.list, but none did\n  pass adapter= .*numbers, words"
    ):
        choose_adapter(registry, "source_adapter", [])


def test_none_is_installed() -> None:
    with pytest.raises(PluginError, match="none is installed") as caught:
        choose_adapter(Registry(()), "target_adapter", [])
    assert caught.value.plugin == "target_adapter"


def test_several_accept() -> None:
    registry = registered(adapter("numbers", int), adapter("things", object))
    with pytest.raises(PluginError, match="but 'numbers' of acme and 'things' of acme did\n  pass adapter="):
        choose_adapter(registry, "source_adapter", 3)


def test_those_that_share_a_name_are_not_asked_and_the_error_says_so() -> None:
    registry = registered(adapter("numbers", int), distributions=("acme", "emca"))
    with pytest.raises(PluginError, match=r"not asked: source adapter 'numbers' is offered by .*acme.*emca"):
        choose_adapter(registry, "source_adapter", 3)


def test_the_one_that_accepts_cannot_be_used_here() -> None:
    registry = registered(adapter("numbers", int, reason="install abacus"), adapter("words", str))
    with pytest.raises(PluginError, match="source adapter 'numbers' can't be used here: install abacus"):
        choose_adapter(registry, "source_adapter", 3)


def test_an_adapter_that_fails_when_asked_is_named() -> None:
    faulty = adapter("faulty", int)
    faulty.accepts = classmethod(lambda cls, model: model.no_such_attribute)
    with pytest.raises(PluginError, match=r"'faulty' of x .*failed when asked .*no_such_attribute") as caught:
        choose_adapter(registered(faulty), "source_adapter", 3)
    assert isinstance(caught.value.__cause__, AttributeError)
