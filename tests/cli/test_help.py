"""Help texts are short and plain: the rules of "plain words" that a machine can check."""

import itertools
import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from inline_attention.cli.group import LINE_BREAK
from inline_attention.cli.main import app

MOST_WORDS = 12
ODD = re.compile(
    r"\b(whoever|somebody|otherwise than|with that|of which|goes on|is told|as there|see there)\b",
    re.IGNORECASE,
)


def walk(command, path=("inline",)):
    yield " ".join(path), command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


COMMANDS = dict(walk(get_command(app)))
OPTIONS = {
    f"{path} {option.name}": option
    for path, command in COMMANDS.items()
    for option in command.params
    if not option.name.startswith(("install_completion", "show_completion"))
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    text = OPTIONS[name].help
    assert text, "every option says what it is"
    assert len(text.split()) <= MOST_WORDS, text
    assert not text.startswith(("Of ", "As ", "See ", "What is to be")), text
    assert text.endswith("."), text
    assert not ODD.search(text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name):
    text = COMMANDS[name].help
    assert text, "every command says what it does"
    first = text.strip().splitlines()[0]
    assert first.endswith((".", "`.")), first
    assert not ODD.search(text), text


@pytest.mark.parametrize("name", COMMANDS)
def test_short_and_long_help_are_the_same(name):
    words = name.split()[1:]
    short, long = (CliRunner().invoke(app, [*words, flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage:" in short.output


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_have_no_type_and_paragraphs_are_wrapped(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = CliRunner().invoke(app, [*name.split()[1:], "-h"]).output
    assert "bool" not in page
    described = page.split("\n\n", 1)[-1].partition("╭")[0].splitlines()
    lines = [line.strip() for line in described]
    for line, following in itertools.pairwise(lines):
        if line and following:  # the next line's first word did not fit
            assert len(line) + 1 + len(following.split()[0]) > 78, (line, following)


def test_list_entries_and_indented_lines_stay_apart():
    assert LINE_BREAK.sub(" ", "A\nb.\n\n- c\n- d\n  e\n--f") == "A b.\n\n- c\n- d\n  e --f"


def test_commands_are_in_the_order_of_the_readme():
    page = CliRunner().invoke(app, ["-h"]).output
    listed = re.findall(r"^│ ([a-z]+) ", page, re.MULTILINE)
    readme = (Path(__file__).parents[2] / "README.md").read_text().partition("All commands;")[2]
    assert listed == re.findall(r"`inline ([a-z]+)`", readme.partition("\n## ")[0])
    assert "─ Commands ─" not in page, "each command has a panel"


def test_completion_is_offered():
    assert {"install_completion", "show_completion"} <= {option.name for option in COMMANDS["inline"].params}
