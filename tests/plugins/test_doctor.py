"""`refit doctor` shows every plug-in and what keeps it from being used; `refit` itself ends as it should."""

import json
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from refit_sdk import cli, plugins
from refit_sdk.cli import app, doctor
from refit_sdk.errors import PlanError
from refit_sdk.plugins import Offer, Origin, Problem, Registry

ORIGIN = Origin("acme", "refit_acme", "refit-acme", "1.2")


class Absent:
    name = "nccl"

    @classmethod
    def missing(cls) -> str | None:
        return "no CUDA device; install a CUDA build of torch"


class Present:
    name = "gloo"


class Telling:
    name = "telling"

    @classmethod
    def about(cls) -> str:
        return "libfoo 3: all but bars"


class Stumbling:
    name = "stumbling"

    @classmethod
    def about(cls) -> str:
        raise RuntimeError("no bars")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*offers: Offer, **rest: Any) -> None:
        monkeypatch.setattr(doctor, "registry", lambda: Registry(offers, **rest))

    monkeypatch.setenv("COLUMNS", "200")
    return install


def offer(offered: type[Any], kind: str = "fabric", distribution: str = "refit-acme") -> Offer:
    return Offer(kind, offered.name, offered, Origin("acme", "refit_acme", distribution, "1.2"))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_what_only_lacks_a_device_is_no_fault(use: Any) -> None:
    use(offer(Absent), offer(Present))
    code, output = run()
    assert code == 0
    lines = output.splitlines()
    row = next(number for number, line in enumerate(lines) if "nccl" in line)
    assert "not usable" in lines[row]
    assert "acme (refit_acme, of refit-acme 1.2)" in lines[row]
    assert "install a CUDA build" in lines[row + 1]
    assert "usable" in next(line for line in output.splitlines() if "gloo" in line)


def test_what_a_plugin_says_of_itself_is_shown_where_it_is_usable(use: Any) -> None:
    use(offer(Telling), offer(Stumbling), offer(Absent))
    code, output = run()
    assert code == 0
    assert "libfoo 3: all but bars" in output
    assert "what it says of itself failed: RuntimeError: no bars" in output
    rows = {row["name"]: row["about"] for row in json.loads(run("--json")[1])["plugins"]}
    assert (rows["telling"], rows["nccl"]) == ("libfoo 3: all but bars", "")


def test_broken_plugins_are_a_fault(use: Any) -> None:
    use(offer(Present), problems=(Problem(ORIGIN, "ImportError: no libfoo"),))
    code, output = run()
    assert code == 1
    assert "ImportError: no libfoo" in output


def test_two_of_one_name_are_a_fault(use: Any) -> None:
    use(offer(Present), offer(Present, distribution="emca"))
    code, output = run("--json")
    assert code == 1
    rows = json.loads(output)["plugins"]
    assert [(row["usable"], "neither is used" in row["why"]) for row in rows] == [(False, True)] * 2


def test_asked_for_by_name(use: Any) -> None:
    use(offer(Absent), offer(Present))
    assert run("--fabric", "gloo")[0] == 0
    code, output = run("--fabric", "nccl", "--json")
    assert code == 1
    (row,) = json.loads(output)["plugins"]
    assert row["why"] == "no CUDA device; install a CUDA build of torch"


def test_an_adapter_may_be_of_either_side(use: Any) -> None:
    use(offer(Present, "target_adapter"), offer(Absent, "source_adapter"))
    assert run("--adapter", "gloo")[0] == 0
    assert run("--adapter", "nccl")[0] == 1


def test_an_unknown_name_is_an_error_of_ours(use: Any) -> None:
    use(offer(Present))
    code, output = run("--transport", "gloo")
    assert code == 2
    assert output.startswith("refit: there is no transport named 'gloo'")


def test_what_is_turned_off_is_shown(use: Any) -> None:
    use(turned_off=(ORIGIN,), unmatched=("watsch",))
    code, output = run()
    assert code == 0
    assert "turned off by REFIT_PLUGINS" in output
    assert "REFIT_PLUGINS names 'watsch', which is no plug-in here" in output


def test_json_says_everything_the_table_does(use: Any) -> None:
    use(offer(Absent))
    report = json.loads(run("--json")[1])
    assert set(report["versions"]) == {"refit_sdk", "Python", "torch"}
    (row,) = report["plugins"]
    assert row["origin"] == {"plugin": "acme", "module": "refit_acme", "distribution": "refit-acme", "version": "1.2"}
    assert set(row) == {"kind", "name", "origin", "usable", "broken", "why", "about"}


def test_everything_that_comes_with_us_is_sound() -> None:
    ours = [f for f in plugins.registry().findings() if f.origin.distribution == "refit-sdk"]
    assert {(f.kind, f.name) for f in ours} >= {("transport", "reshard"), ("fabric", "gloo"), ("fabric", "inproc")}
    assert [str(finding) for finding in ours if finding.broken] == []


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [(PlanError(["a.weight: nobody"]), 2, "a.weight: nobody"), (KeyboardInterrupt(), 130, "")],
    ids=["ours", "interrupt"],
)
def test_how_commands_end(monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str) -> None:
    def fail() -> Registry:
        raise raised

    monkeypatch.setattr(doctor, "registry", fail)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "registry", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(cli.app, ["doctor"], catch_exceptions=False)


def test_the_console_script_loads_no_torch() -> None:
    script = """if True:
        import sys
        from refit_sdk.cli import app
        app(["--help"], standalone_mode=False)
        print("torch" in sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"
    assert "doctor" in result.stdout
