"""The wheel: it is built, contains the package data, and works in a fresh environment."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ("py.typed", "benchmark/model_sizes.json", "ops/backends/cuda/", "report/", "data/")
USE = (
    "import inline_attention, timm, torch; from pathlib import Path;"
    "assert Path(inline_attention.__file__).is_relative_to({prefix!r}), inline_attention.__file__;"
    "model = timm.create_model('inline_deit_micro').eval();"
    "assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)"
)


@pytest.mark.slow
def test_built_installed_and_used(tmp_path):
    pytest.importorskip("build")

    def run(*words):
        done = subprocess.run([str(word) for word in words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for expected in DATA:
        assert any(name.startswith(f"inline_attention/{expected}") for name in names), expected
    shipped = {path.relative_to(ROOT / "src").as_posix() for path in ROOT.glob("src/inline_attention/weights/*/*")}
    assert shipped <= set(names)
    # The packages it depends on are those of this environment: downloading PyTorch again would take minutes.
    run(sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "fresh")
    fresh = tmp_path / "fresh" / "bin" / "python"
    run(fresh, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--no-index", wheel)
    (site,) = (tmp_path / "fresh" / "lib").glob("python*/site-packages")
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    run(fresh, "-c", USE.format(prefix=str(tmp_path / "fresh")))
    assert "inline-attention" in run(tmp_path / "fresh" / "bin" / "inline", "--version")
