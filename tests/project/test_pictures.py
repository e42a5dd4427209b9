"""The pictures in the documentation are what the project draws."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "explanation" / "pictures"
CHAPTER = FOLDER.parent / "layouts.md"


def drawn() -> dict[str, str]:
    """What the script beside the pictures draws now."""
    spec = importlib.util.spec_from_file_location("pictures_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, str] = module.pictures()
    return made


def test_every_picture_is_the_projects_own() -> None:
    kept = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    assert kept == drawn(), "run docs/explanation/pictures/make.py"


def test_every_picture_is_shown() -> None:
    text = CHAPTER.read_text()
    assert [name for name in drawn() if f"](pictures/{name})" not in text] == []
