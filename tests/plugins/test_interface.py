"""A class that doesn't fit its kind is refused when it registers, with everything that is wrong with it."""

from typing import Any, ClassVar

import pytest

from refit_sdk.adapter import EngineControl, Observer, PaperLayout, SourceAdapter, TargetAdapter
from refit_sdk.fabric import Fabric
from refit_sdk.interface import faults
from refit_sdk.transport import Capabilities, Moves, Steps, Topology, Transport


class Sound:
    name = "sound"
    capabilities = Capabilities()

    def steps(self, moves: Moves, topology: Topology) -> Steps:
        raise AssertionError


def test_accepts_a_class_with_the_interface() -> None:
    assert faults(Sound, Transport) == ()


def test_accepts_another_spelling_that_can_be_called_the_same_way() -> None:
    class Wide(Sound):
        def steps(self, these: Any, where: Any, *more: Any, extra: int = 0) -> Any:
            return None

    assert faults(Wide, Transport) == ()


@pytest.mark.parametrize("offered", [Sound(), "sound", None], ids=["instance", "string", "none"])
def test_refuses_what_is_not_a_class(offered: object) -> None:
    (fault,) = faults(offered, Transport)
    assert fault.endswith("not a class")


@pytest.mark.parametrize("name", [None, "", "Loud", "two words", 3, "-minus", "a,b"], ids=repr)
def test_refuses_a_name_that_users_cannot_write(name: object) -> None:
    odd = type("Odd", (Sound,), {"name": name})
    (fault,) = faults(odd, Transport)
    assert repr(name) in fault


def test_refuses_a_class_without_a_name() -> None:
    class Nameless:
        def pushed(self, report: Any) -> None: ...

    (fault,) = faults(Nameless, Observer)
    assert fault.startswith("its name is None")


def test_refuses_the_name_that_asks_the_planner_to_choose() -> None:
    (fault,) = faults(type("Auto", (Sound,), {"name": "auto"}), Transport)
    assert "not free" in fault


def test_refuses_an_attribute_of_another_type() -> None:
    class Dictionary(Sound):
        capabilities: ClassVar[Any] = {"max_ndim": 2}

    assert faults(Dictionary, Transport) == ("its capabilities is {'max_ndim': 2}, not a Capabilities",)


def test_names_every_method_that_is_missing() -> None:
    class Empty:
        name = "empty"

    assert faults(Empty, EngineControl) == (
        "it has no pause(*, mode)",
        "it has no update(*, version, info)",
        "it has no finish(*, version)",
        "it has no resume()",
        "it has no fence(reason)",
    )


def test_does_not_take_the_protocols_own_empty_body_for_a_method() -> None:
    class Heir(Observer):
        name = "heir"

    assert faults(Heir, Observer) == ("it has no pushed(report)",)


@pytest.mark.parametrize(
    "method",
    [lambda self: None, lambda self, moves, topology, price: None, lambda self, *, moves, topology: None, 7],
    ids=["too few", "one more without default", "keywords only", "not callable"],
)
def test_refuses_a_method_that_cannot_be_called_as_the_protocols(method: object) -> None:
    (fault,) = faults(type("Bent", (Sound,), {"steps": method}), Transport)
    assert fault.startswith("its steps can't be called as steps(moves, topology)")


def test_refuses_an_instance_method_where_the_class_is_asked() -> None:
    class Late:
        name = "late"

        def missing(self) -> str | None: ...
        def connect(self, *, group: str, members: Any, process: int, store: Any, timeout: float) -> Any: ...

    assert faults(Late, Fabric) == ("its missing is not a classmethod",)


@pytest.mark.parametrize(
    "protocol", [Transport, Fabric, SourceAdapter, TargetAdapter, EngineControl, PaperLayout, Observer]
)
def test_every_protocol_has_something_to_check(protocol: type[Any]) -> None:
    assert any(fault.startswith("it has no ") for fault in faults(type("Bare", (), {"name": "bare"}), protocol))
