"""The wheel: it is built from the source distribution, contains all files, and works in a fresh environment."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
USE = """
import inline_attention, timm, torch
from pathlib import Path
assert Path(inline_attention.__file__).is_relative_to({prefix!r}), inline_attention.__file__
assert timm.create_model("inline_deit_micro").eval()(torch.randn(1, 3, 32, 32)).shape == (1, 10)
try:
    timm.create_model("inline_deit_tiny", pretrained=True)
except RuntimeError as error:
    page = Path(str(error).partition("(")[2].partition(" says more")[0])
assert page.is_relative_to({prefix!r}) and "inline convert" in page.read_text(), page
"""


def test_built_installed_and_used(tmp_path):
    for name in ("build", "pip"):
        pytest.importorskip(name)

    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words):
        command = [str(word) for word in words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    source, fresh = tmp_path / "source", tmp_path / "fresh"
    listed = run("git", "-C", ROOT, "ls-files", "src/inline_attention", "docs/*.md").split()
    pages = [name for name in listed if name.startswith("docs/")]
    tracked = [name for name in listed if name not in pages and (ROOT / name).exists()]
    for name in (*tracked, *pages, "README.md", "LICENSE", "pyproject.toml"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    assert not {name.removeprefix("src/") for name in tracked} - names
    assert "inline_attention/py.typed" in names
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_bytes(archive.read(metadata))
    assert fields["Name"] == "inline-attention"
    assert all(fields[field] for field in ("Version", "Summary", "License-Expression", "Requires-Python"))
    assert fields["Author"] or fields["Author-email"]
    assert fields["Project-URL"]

    # The packages it depends on are those of this environment: downloading PyTorch again would take minutes.
    run(sys.executable, "-m", "venv", "--without-pip", fresh)
    python, inline = fresh / "bin" / "python", fresh / "bin" / "inline"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    (site,) = (fresh / "lib").glob("python*/site-packages")
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    run(python, "-c", USE.format(prefix=str(fresh)))
    assert run(inline, "--version").split() == ["inline-attention", fields["Version"]]
    assert "inline_deit_tiny" in [model["name"] for model in json.loads(run(inline, "models", "--json"))]
    if any("/weights/" in name for name in tracked):
        Image.new("RGB", (32, 32), "red").save(tmp_path / "picture.png")
        assert "picture.png" in run(inline, "predict", "picture.png")
