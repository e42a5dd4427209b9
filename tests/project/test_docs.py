"""Every block of the README and of the documentation runs; every page can be reached from the index."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")] if "changelog.d" not in page.parts)
RUNNER = Path(__file__).with_name("run_page.py")
RUNS = re.compile(r"^```(python|console)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run(page: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUNNER, page], capture_output=True, text=True, timeout=240)


@pytest.mark.docs
@pytest.mark.parametrize("page", [page for page in PAGES if RUNS.search(page.read_text())], ids=name)
def test_every_block_runs(page: Path) -> None:
    result = run(page)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not page.parent.joinpath(link).exists()]
    assert broken == []


def test_every_page_is_linked_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text())}
    assert [name(page) for page in PAGES if page.name not in ("README.md", "index.md") and page not in linked] == []


@pytest.mark.docs
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nassert 1 + 1 == 2\n```\n", 0),
        ("```python\nassert 1 + 1 == 3\n```\n", 1),
        ("```python\nx = 2\n```\n```python\n>>> x\n2\n```\n", 0),
        ("```python\n>>> 1\n2\n```\n", 1),
        ('```python title="a/b.py"\nprint(7)\n```\n```console\n$ test $(python a/b.py) = 7\n7\n```\n', 0),
        ("```console\n$ false\n$ true\n```\n", 1),
        ("```bash\nfalse\n```\n", 0),
    ],
    ids=["code", "wrong code", "shared names", "wrong doctest", "file and command", "failing command", "not run"],
)
def test_the_runner_itself(tmp_path: Path, text: str, code: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert run(page).returncode == code
