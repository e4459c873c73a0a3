"""README and docs are true: Python runs, links, files and commands exist. They use plain words."""

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import warm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SOURCE = ROOT / "src" / "inline_attention"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# Phrases that readers stumble over, with what to write instead.
ODD_PHRASES = {
    r"\bwhoever\b": "name the reader or the caller",
    r"\bsomebody\b": "name the reader or the caller",
    r"\botherwise than\b": "differently from",
    r"\bgoes on where\b": "resumes",
    r"\bbore out\b": "confirmed",
    r"\b(is|are|was|were) told\b": "gets, knows",
    r"\bdealt out\b": "assigned",
    r"\bsee there\b": "say it here, or link to it",
    r"\bas there\b": "say it here, or link to it",
    r"\bwhat is to be\b": "a noun",
    r"\blikewise\.": "repeat the noun",
    r"\bin work:": "nothing: docs say what there is",
}
ARGUMENT_WITHOUT_NOUN = re.compile(r"^ +\*{0,2}\w+: (Of|As|See) .*", flags=re.MULTILINE)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet_runs(index, tmp_path):
    if "load_checkpoint" in SNIPPETS[index]:
        from inline_attention import create_model
        from inline_attention.models.checkpoints import save_weights

        save_weights(create_model("inline_deit_tiny"), tmp_path / "inline_deit_tiny.safetensors")
    program = tmp_path / "snippet.py"
    program.write_text(SNIPPETS[index])
    warm.run([sys.executable, program], cwd=tmp_path, check=True)


def anchors_of(page: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings, and explicit ones."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        linked = (page.parent / target) if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(linked), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md"],  # which names files of earlier versions
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_source_files_exist(page):
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|cu))\b", page.read_text()):
        assert (ROOT / name).exists() or (SOURCE / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_pages_parses(page):
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        ast.parse(snippet)


def commands_of(page: Path) -> list[list[str]]:
    """Arguments of every `inline …` line in the code blocks of a page."""
    text = page.read_text()
    blocks = re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"^    (inline .*)$", text, flags=re.MULTILINE)
    found = (re.match(r"(?:inline|torchrun .* -m inline_attention) (.*)", line) for line in lines)
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_commands_exist(page):
    from typer.main import get_command

    from inline_attention.cli.main import app
    from inline_attention.engine.config import FLAGS
    from inline_attention.recipes import get_recipe

    for arguments in commands_of(page):
        command, names = get_command(app), []
        while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
            assert arguments[0] in command.commands, f"{page.name}: inline {' '.join([*names, arguments[0]])}"
            names.append(arguments.pop(0))
            command = command.commands[names[-1]]
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        if names in (["train"], ["ablate"], ["linearize"]):
            flags |= {name for flag in FLAGS for name in flag.names}
            if names != ["linearize"] and arguments[0].islower() and not arguments[0].endswith(".yaml"):
                get_recipe(arguments[0])
        given = {argument for argument in arguments if re.fullmatch(r"--?[a-z][a-z-]*", argument)}
        assert given <= flags | {"--help"}, f"{page.name}: inline {' '.join(names)} has no {given - flags}"


def odd_phrases(text: str) -> list[str]:
    """One line per odd phrase of a text."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}; better: {advice}"
        for phrase, advice in ODD_PHRASES.items()
        for match in re.finditer(phrase, text, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_plain_words(page):
    assert odd_phrases(page.read_text()) == []


@pytest.mark.parametrize("package", sorted({file.relative_to(SOURCE).parts[0] for file in SOURCE.rglob("*.py")}))
def test_sources_use_plain_words(package):
    root = SOURCE / package
    problems = []
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        text = file.read_text()
        problems += [f"{file.relative_to(SOURCE)} {line}" for line in odd_phrases(text)]
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                documentation = ast.get_docstring(node, clean=False) or ""
                for match in ARGUMENT_WITHOUT_NOUN.finditer(documentation):
                    problems.append(f"{file.relative_to(SOURCE)}: {match.group().strip()!r}; an argument is a noun")
    assert not problems, "\n".join(problems)


def test_every_command_is_named():
    from typer.main import get_command

    from inline_attention.cli.main import app

    for command in get_command(app).commands:
        assert f"`inline {command}`" in README or f"`{command}`" in README or f"inline {command} " in README
