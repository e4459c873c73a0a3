"""The documentation: notebooks run from top to bottom, and the menu of the site has every page."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
GENERATED = {"quickstart.md", "CHANGELOG.md"}  # by docs/site_hooks.py


def site():
    text = re.sub(r"!!\S+", "", (ROOT / "mkdocs.yml").read_text())
    return yaml.safe_load(text)


def pages(entry):
    if isinstance(entry, str):
        return [entry]
    return [page for item in (entry.values() if isinstance(entry, dict) else entry) for page in pages(item)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names = {"__name__": path.stem}
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs come from `make docs`, not from the repository"
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
    assert capsys.readouterr().out


def test_every_page_is_in_the_menu_and_every_entry_of_the_menu_exists():
    docs = ROOT / "docs"
    found = {path.relative_to(docs).as_posix() for ending in ("md", "ipynb") for path in docs.rglob(f"*.{ending}")}
    listed = set(pages(site()["nav"]))
    assert found <= listed, "not in mkdocs.yml"
    assert listed <= found | GENERATED, "mkdocs.yml names pages that do not exist"


def test_the_api_page_names_what_exists():
    for line in (ROOT / "docs" / "api.md").read_text().splitlines():
        if not line.startswith("::: "):
            continue
        *module, name = line.removeprefix("::: ").split(".")
        package = ROOT.joinpath("src", *module)
        if package.joinpath(f"{name}.py").exists():
            continue
        file = package.with_suffix(".py") if package.with_suffix(".py").exists() else package / "__init__.py"
        definitions = [getattr(node, "name", None) for node in ast.parse(file.read_text()).body]
        assert name in definitions, line
