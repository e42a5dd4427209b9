"""Whether a class that a plug-in offers has the interface of its kind: checked once, when it registers.

1. It is a class, with a `name` that users can write and that means nothing else.
2. It has every attribute that the protocol declares, of the declared type.
3. It has every method, and each can be called as the protocol's is.

>>> from refit_sdk.adapter import Observer
>>> class Silent:
...     name = "silent"
>>> faults(Silent, Observer)
('it has no pushed(report)',)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, Final, get_args, get_origin, get_type_hints

_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]*")
_RESERVED: Final = frozenset({"auto"})


def faults(offered: object, protocol: type[Any]) -> tuple[str, ...]:
    """Everything that keeps `offered` from being a class with the protocol's interface; empty if nothing does."""
    if not isinstance(offered, type):
        return (f"it is {offered!r}, not a class",)
    return (*_name_faults(offered), *_attribute_faults(offered, protocol), *_method_faults(offered, protocol))


def _name_faults(offered: type[Any]) -> Iterator[str]:
    name = getattr(offered, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"its name is {name!r}; a name is a string of a-z, 0-9, '_', '.' and '-' that begins with a letter"
    elif name in _RESERVED:
        yield f"its name is {name!r}, which is not free: it asks the planner to choose"


def _attribute_faults(offered: type[Any], protocol: type[Any]) -> Iterator[str]:
    for name, hint in get_type_hints(protocol).items():
        (declared,) = get_args(hint)
        wanted = get_origin(declared) or declared
        found = getattr(offered, name, None)
        if name != "name" and not isinstance(found, wanted):
            yield f"its {name} is {found!r}, not a {wanted.__name__}"


def _method_faults(offered: type[Any], protocol: type[Any]) -> Iterator[str]:
    for name, declared in vars(protocol).items():
        if name.startswith("_") or not inspect.isroutine(declared):
            continue
        wanted = _signature(protocol, name)
        if inspect.getattr_static(offered, name, declared) is declared:
            yield f"it has no {name}{wanted}"
        else:
            yield from _call_faults(offered, name, wanted, on_class=isinstance(declared, classmethod))


def _call_faults(offered: type[Any], name: str, wanted: inspect.Signature, *, on_class: bool) -> Iterator[str]:
    found = inspect.getattr_static(offered, name)
    if on_class and not isinstance(found, (classmethod, staticmethod)):
        yield f"its {name} is not a classmethod"
        return
    try:
        _signature(offered, name).bind(*_positional(wanted), **_keywords(wanted))
    except (TypeError, ValueError) as error:
        yield f"its {name} can't be called as {name}{wanted}: {error}"


def _signature(owner: type[Any], name: str) -> inspect.Signature:
    """The signature of a method as its caller sees it, without annotations."""
    signature = inspect.signature(getattr(owner, name))
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    if not isinstance(inspect.getattr_static(owner, name), (classmethod, staticmethod)):
        parameters = parameters[1:]
    return inspect.Signature(parameters)


def _positional(signature: inspect.Signature) -> list[None]:
    return [None for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


def _keywords(signature: inspect.Signature) -> dict[str, None]:
    return {p.name: None for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY}
