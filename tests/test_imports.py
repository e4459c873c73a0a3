"""What is imported when: nothing heavy for help, no timm for the op, no extras unless a command needs one."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import inline_attention
import warm
from inline_attention.cli.group import EXTRAS

SOURCE = Path(inline_attention.__file__).parent
PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
IMPORT_NAMES = {
    "pillow": "PIL", "pyyaml": "yaml", "faster-coco-eval": "faster_coco_eval", "openslide-python": "openslide",
    "openslide-bin": "openslide", "huggingface-hub": "huggingface_hub",
}  # fmt: skip
PART_OF_TORCH = {"triton"}  # where it exists; everything works without
HEAVY = ("torch", "torchvision", "timm", "matplotlib", "numpy", "PIL", "safetensors")


def run(program, python=subprocess):
    done = python.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_after_torch(program):
    """Run a program in a process that has imported torch and torchvision, which neither know of timm nor of extras."""
    known = {"timm", "inline_attention", *OPTIONAL} - {"defusedxml"}  # Pillow imports it where it is
    return run(f"import sys\nassert not [name for name in {known!r} if name in sys.modules]\n{program}", warm)


def imported_packages(*names):
    return {IMPORT_NAMES.get(name, name) for requirement in names for name in [re.split(r"[\[<>=!~ ]", requirement)[0]]}


REQUIRED = imported_packages(*PROJECT["dependencies"])
OPTIONAL = {
    package: extra
    for extra, names in PROJECT["optional-dependencies"].items()
    if extra not in ("dev", "docs")  # tools, which no code of the package imports
    for package in imported_packages(*names)
}


def test_help_and_usage_errors_import_nothing_heavy():
    program = f"""
import sys
from typer.main import get_command
from typer.testing import CliRunner
from inline_attention.cli.main import app

def commands(group, path=()):
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))

everything = [(), *commands(get_command(app))]
assert len(everything) > 20
for path in everything:
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0 and "Usage" in result.output, path
for arguments in (["--version"], [], ["nonsense"], ["predict"], ["train"], ["bench", "models", "--sizes", "x"],
                  ["predict", "a.jpg", "-c", "b", "--size", "x"], ["analyze", "locality", "--sides", "4"],
                  ["data", "check", "--task", "nonsense"], ["--show-completion", "bash"]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (0, 1, 2), (arguments, result.output)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(program) == "[]\n"


def test_completion_is_offered_and_light():
    program = f"""
import os, sys
os.environ.update(_INLINE_COMPLETE="complete_bash", COMP_WORDS="inline pre", COMP_CWORD="1")
sys.argv = ["inline"]
from inline_attention.__main__ import main
try:
    main()
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(program).split() == ["predict", "[]"]


def test_checking_data_needs_no_model():
    program = """
import sys
from typer.testing import CliRunner
from inline_attention.cli.main import app
assert CliRunner().invoke(app, ["data", "check", "absent", "--task", "detection"]).exit_code == 1
print([name for name in sys.modules if name.startswith(("inline_attention.models", "inline_attention.ops"))])
"""
    assert run(program) == "[]\n"


def test_training_imports_the_compiler_only_where_it_compiles(tmp_path):
    program = f"""
import sys
from typer.testing import CliRunner
from inline_attention.cli.main import app
small = ["training.updates=1", "logging.tensorboard=false", "run.output={tmp_path}"]
result = CliRunner().invoke(app, ["train", "digits", *(word for setting in small for word in ("--set", setting))])
assert result.exit_code == 0, result.output
print([name for name in ("torch._inductor.compile_fx", "torch._functorch.aot_autograd") if name in sys.modules])
"""
    assert run_after_torch(program) == "[]\n"


def test_the_package_is_imported_at_once_and_its_names_on_demand():
    program = f"""
import sys
import inline_attention
assert inline_attention.__version__
assert set(inline_attention.__all__) <= set(dir(inline_attention))
assert not [name for name in {HEAVY!r} if name in sys.modules]
from inline_attention import InLineAttention, inline_attention as op
op(*__import__("torch").randn(3, 1, 4, 2, 8))
assert "torch" in sys.modules and not [name for name in ("timm", "torch._dynamo", "sympy") if name in sys.modules]
assert inline_attention.ops.inline_attention is op is inline_attention.inline_attention
try:
    inline_attention.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
names = {{}}
exec("from inline_attention import *", names)
assert set(inline_attention.__all__) <= set(names)
assert inline_attention.models.create_model is inline_attention.create_model
"""
    run(program)


@pytest.mark.parametrize(
    "imports",
    [
        "import timm\nimport inline_attention",
        "import inline_attention\nimport timm",
        "import inline_attention.models\nimport timm",
        "from inline_attention import inline_attention\nfrom timm import create_model\nimport timm",
    ],
    ids=["timm first", "timm second", "models first", "the op first"],
)
def test_timm_knows_the_models_in_either_order(imports):
    program = f"""
{imports}
import pickle, sys
names = timm.list_models("inline_*")
assert len(names) == 16, names
model = timm.create_model("inline_deit_tiny", depth=1)
assert type(pickle.loads(pickle.dumps(model))) is type(model)
assert timm.is_model("softmax_swin_tiny")
assert not [finder for finder in sys.meta_path if getattr(finder, "theirs", None) == "timm.models"]
"""
    run_after_torch(program)


def test_timm_knows_the_models_in_threads_and_in_spawned_processes(tmp_path):
    (tmp_path / "script.py").write_text("""
import multiprocessing
import threading
import inline_attention

def build(name="inline_deit_tiny"):
    import timm
    return len(list(timm.create_model(name, depth=1).parameters()))

def unpickled(model):
    return len(list(model.parameters()))

if __name__ == "__main__":
    found = []
    threads = [threading.Thread(target=lambda: found.append(build())) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert len(found) == 8 and len(set(found)) == 1, found
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(build) == found[0]
        assert pool.apply(unpickled, (inline_attention.create_model("inline_deit_tiny", depth=1),)) == found[0]
""")
    warm.run([sys.executable, tmp_path / "script.py"], check=True)


def test_a_timm_that_does_not_fit_is_still_imported():
    program = """
import sys, warnings
import inline_attention
sys.modules["inline_attention.models"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import timm
assert any("not registered with timm" in str(warning.message) for warning in caught)
assert timm.create_model("vit_tiny_patch16_224", depth=1)
"""
    run_after_torch(program)


def test_everything_imported_is_declared():
    known = REQUIRED | set(OPTIONAL) | PART_OF_TORCH | {"inline_attention"} | sys.stdlib_module_names
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                assert module.partition(".")[0] in known, f"{file.relative_to(SOURCE)} imports {module}"


def test_the_command_line_knows_the_extra_of_every_optional_package():
    assert EXTRAS == OPTIONAL


WITHOUT_EXTRAS = f"""
import sys
from importlib.machinery import PathFinder

class WithoutExtras:
    find_distributions = staticmethod(PathFinder.find_distributions)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {sorted(OPTIONAL)!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras()
"""


def test_every_module_is_imported_without_the_extras():
    """Or asks for one of them by name, as what draws does."""
    program = f"""{WITHOUT_EXTRAS}
import importlib, pkgutil
import inline_attention
for module in pkgutil.walk_packages(inline_attention.__path__, "inline_attention."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        print("missing", error.name.partition(".")[0])
"""
    missing = {line.split()[1] for line in run_after_torch(program).splitlines() if line.startswith("missing ")}
    assert missing <= {package for package, extra in OPTIONAL.items() if extra == "plots"}, missing


def test_a_missing_extra_is_named_at_the_command(tmp_path):
    common = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out")]
    commands = {
        "plots": ["demo", "--no-train", "--output", str(tmp_path / "demo")],
        "detection": ["train", "scenes_detection", *common],
        "segmentation": ["train", "scenes_segmentation", *common],
        "hub": ["train", "digits", "--dataset", "hfds/some/thing", *common],
        "wandb": ["train", "digits", "--set", "logging.wandb=true", *common[2:]],
    }
    program = f"""{WITHOUT_EXTRAS}
from typer.testing import CliRunner
from inline_attention.cli.main import app
from inline_attention.support.text import install_command
for extra, arguments in {commands!r}.items():
    result = CliRunner().invoke(app, arguments)
    output = " ".join(result.output.split())
    assert result.exit_code == 1 and "error: " in output, (extra, output)
    assert install_command(extra) in output, (extra, output)
    assert "Traceback" not in output
"""
    run_after_torch(program)
