"""Plug-ins are found by their entry points; what is wrong with one is kept, told, and keeps no other from working."""

import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from refit_sdk import plugins
from refit_sdk.errors import PluginError
from refit_sdk.hookspecs import hookimpl
from refit_sdk.plugins import Candidate, Origin, Registry

OBSERVERS = """
    from refit_sdk.hookspecs import hookimpl

    class Watch:
        name = "{name}"
        def pushed(self, report): ...

    @hookimpl
    def refit_register_observers():
        return [Watch]
"""


def install(folder: Path, distribution: str, modules: dict[str, str], version: str = "1.0") -> None:
    """A distribution as an installer would leave it: its modules, and metadata with an entry point each."""
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    metadata.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    entries = "\n".join(f"{module}-plugin = {module}" for module in modules)
    metadata.joinpath("entry_points.txt").write_text(f"[refit_sdk]\n{entries}\n\n[other]\nstranger = nowhere\n")
    for module, text in modules.items():
        folder.joinpath(f"{module}.py").write_text(textwrap.dedent(text))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    return tmp_path


def loaded(*folders: Path, **environ: str) -> Registry:
    return plugins.load(plugins.discover([str(folder) for folder in folders]), environ=environ)


def in_body(plugin: object, name: str = "here", distribution: str = "tests") -> Candidate:
    return Candidate(Origin(name, "test", distribution, "0"), lambda: plugin)


class Watch:
    name = "watch"

    def pushed(self, report: object) -> None: ...


def observers(*classes: object) -> SimpleNamespace:
    return SimpleNamespace(refit_register_observers=hookimpl(lambda: list(classes)))


def test_finds_a_distributions_plugins_and_their_origin(site: Path) -> None:
    install(site, "Acme_Watch", {"acme_watch": OBSERVERS.format(name="acme")}, version="2.5")
    registry = loaded(site)
    assert registry.problems == ()
    assert registry.names("observer") == ("acme",)
    assert registry.get("observer", "acme") is sys.modules["acme_watch"].Watch
    assert registry.offer("observer", "acme").origin == Origin("acme_watch-plugin", "acme_watch", "acme-watch", "2.5")


def test_the_first_of_a_distribution_found_twice_counts(site: Path) -> None:
    install(site / "a", "acme", {"acme": OBSERVERS.format(name="acme")}, version="1.0")
    install(site / "b", "acme", {"acme": OBSERVERS.format(name="acme")}, version="2.0")
    assert [candidate.origin.version for candidate in plugins.discover([str(site / "b"), str(site / "a")])] == ["2.0"]


def test_a_failing_import_is_kept_and_raised_with_its_cause(site: Path) -> None:
    install(site, "acme", {"acme_bad": "import a_module_that_is_not_there", "acme_good": OBSERVERS.format(name="good")})
    registry = loaded(site)
    assert registry.names("observer") == ("good",)
    (problem,) = registry.problems
    assert problem.origin.plugin == "acme_bad-plugin"
    with pytest.raises(PluginError, match=r"acme_bad-plugin .*a_module_that_is_not_there") as caught:
        registry.get("fabric", "anything")
    assert caught.value.plugin == "anything"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('no device')", "RuntimeError: no device"),
        ("class Broken(", "SyntaxError"),
        ("x = 1", "implements no hook"),
        ("def refit_register_observers(): return []", "implements no hook"),
        ("from refit_sdk.hookspecs import hookimpl\n@hookimpl\ndef refit_register_observers(): ...", "returned None"),
        ("from refit_sdk.hookspecs import hookimpl\n@hookimpl\ndef refit_register_observers(): return 3", "returned 3"),
        (
            "from refit_sdk.hookspecs import hookimpl\n@hookimpl\ndef refit_register_observer(): return []",
            "unknown hook",
        ),
        ("from refit_sdk.hookspecs import hookimpl\n@hookimpl\ndef refit_register_observers(x): return []", "Argument"),
        ("from refit_sdk.hookspecs import hookimpl\n@hookimpl\ndef refit_register_observers(): 1 / 0", "ZeroDivision"),
    ],
    ids=["raises", "syntax", "nothing", "unmarked", "none", "no list", "slip in the name", "argument", "hook raises"],
)
def test_what_a_module_gets_wrong_is_told(site: Path, text: str, reason: str) -> None:
    install(site, "acme", {"acme_odd": text})
    (problem,) = loaded(site).problems
    assert reason in problem.reason


def test_an_unknown_name_lists_those_that_exist() -> None:
    registry = plugins.load([in_body(observers(Watch))], environ={})
    with pytest.raises(PluginError, match="no observer named 'wach'; installed are: watch"):
        registry.get("observer", "wach")


def test_an_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(PluginError, match="no kind of plug-in named 'engine'; kinds are transport, fabric"):
        Registry(()).names("engine")


def test_a_class_that_does_not_fit_is_raised_when_its_name_is_asked_for() -> None:
    class Deaf:
        name = "deaf"

    registry = plugins.load([in_body(observers(Deaf, Watch))], environ={})
    assert registry.names("observer") == ("watch",)
    with pytest.raises(PluginError, match=r"Deaf is no observer: it has no pushed\(report\)"):
        registry.get("observer", "deaf")


def test_a_class_without_a_name_is_listed_when_an_unknown_one_is_asked_for() -> None:
    class Nameless(Watch):
        name = None  # type: ignore[assignment]

    registry = plugins.load([in_body(observers(Nameless))], environ={})
    with pytest.raises(PluginError, match=r"it may be one of a plug-in that failed: .*Nameless is no observer"):
        registry.get("observer", "watch")


def test_of_two_distributions_with_the_same_name_neither_is_used() -> None:
    pair = [in_body(observers(Watch), distribution=name) for name in ("acme", "emca")]
    registry = plugins.load([*pair, in_body(observers(type("Other", (Watch,), {"name": "other"})))], environ={})
    assert registry.names("observer") == ("other",)
    with pytest.raises(PluginError, match=r"of acme 0.* and .*of emca 0.*neither is used") as caught:
        registry.get("observer", "watch")
    assert caught.value.plugin == "watch"


def test_the_same_name_in_two_kinds_is_no_clash() -> None:
    class Rows:
        name = "watch"

        def manifests(self, layout: object, shapes: object, dtype: object) -> list[object]:
            return []

    both = SimpleNamespace(
        refit_register_observers=hookimpl(lambda: [Watch]), refit_register_paper_layouts=hookimpl(lambda: [Rows])
    )
    registry = plugins.load([in_body(both)], environ={})
    assert (registry.get("observer", "watch"), registry.get("paper_layout", "watch")) == (Watch, Rows)


def test_turning_one_off_resolves_a_clash() -> None:
    pair = [in_body(observers(Watch), distribution=name) for name in ("acme", "emca")]
    registry = plugins.load(pair, environ={"REFIT_PLUGINS": "-Emca"})
    assert registry.offer("observer", "watch").origin.distribution == "acme"
    assert [origin.distribution for origin in registry.turned_off] == ["emca"]


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ("", {"one", "two"}),
        ("one", {"one"}),
        ("one,two", {"one", "two"}),
        (" one , -two ", {"one"}),
        ("-one", {"two"}),
        ("first", {"one"}),
        ("one,-first", set()),
    ],
)
def test_selection_by_environment(setting: str, kept: set[str]) -> None:
    candidates = [
        in_body(observers(type("One", (Watch,), {"name": "one"})), "one", "first"),
        in_body(observers(type("Two", (Watch,), {"name": "two"})), "two", "second"),
    ]
    registry = plugins.load(candidates, environ={"REFIT_PLUGINS": setting})
    assert set(registry.names("observer")) == kept


def test_what_is_turned_off_is_not_imported() -> None:
    def refuse() -> object:
        raise AssertionError

    registry = plugins.load([Candidate(Origin("off", "off", "acme", "1"), refuse)], environ={"REFIT_PLUGINS": "-off"})
    assert registry.problems == ()
    with pytest.raises(PluginError, match=r"REFIT_PLUGINS turns off: off \(off, of acme 1\)"):
        registry.get("fabric", "nccl")


def test_a_slip_in_the_setting_is_told() -> None:
    registry = plugins.load([in_body(observers(Watch))], environ={"REFIT_PLUGINS": "-watsch"})
    assert registry.unmatched == ("watsch",)
    with pytest.raises(PluginError, match="REFIT_PLUGINS names 'watsch', which is no plug-in here"):
        registry.get("fabric", "nccl")


@pytest.mark.parametrize(("setting", "expected"), [("1", True), ("0", False), ("", False)])
def test_tracing_goes_to_stderr(setting: str, expected: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plugins.load([in_body(observers(Watch))], environ={"REFIT_TRACE": setting})
    captured = capsys.readouterr()
    assert ("refit_register_observers" in captured.err) is expected
    assert captured.out == ""


def test_a_class_that_cannot_be_used_here_says_why() -> None:
    class Absent(Watch):
        @classmethod
        def missing(cls) -> str | None:
            return "it needs a telescope; install telescope>=2"

    registry = plugins.load([in_body(observers(Absent))], environ={})
    assert registry.names("observer") == ("watch",)
    with pytest.raises(PluginError, match="observer 'watch' can't be used here: it needs a telescope"):
        registry.get("observer", "watch")


def test_a_check_that_fails_is_an_answer() -> None:
    class Faulty(Watch):
        @classmethod
        def missing(cls) -> str | None:
            raise OSError("driver asleep")

    registry = plugins.load([in_body(observers(Faulty))], environ={})
    (finding,) = registry.findings()
    assert (finding.usable, finding.why) == (False, "its own check failed: OSError: driver asleep")


def test_only_transports_are_part_of_a_plans_input(site: Path) -> None:
    versions = plugins.plugin_versions(plugins.registry())
    assert set(versions) == set(plugins.registry().names("transport"))
    assert versions["acme"] == "refit-acme 1.2.3"
    assert plugins.plugin_versions(plugins.load([in_body(observers(Watch))], environ={})) == {}


def test_the_registry_of_a_process_is_made_once() -> None:
    assert plugins.registry() is plugins.registry()
