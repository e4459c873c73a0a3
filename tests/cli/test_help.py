"""Help texts are short and plain: the rules of "plain words" that a machine can check."""

import re

import pytest
from typer.main import get_command
from typer.testing import CliRunner

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


def test_completion_is_offered():
    assert {"install_completion", "show_completion"} <= {option.name for option in COMMANDS["inline"].params}
