from pathlib import Path

import pytest

from inline_attention.support import text
from inline_attention.support.text import counted, did_you_mean, install_command, printable, show_difference, some_of


def test_suggestions():
    assert did_you_mean("digts", ["digits", "cifar10"]) == "; did you mean digits?"
    assert did_you_mean("nothing", ["digits"]) == ""


@pytest.mark.parametrize(
    ("plural", "one"),
    [
        ("faults", "1 fault"),
        ("boxes that leave their image", "1 box that leaves its image"),
        ("categories without an object", "1 category without an object"),
        ("classes without a pixel", "1 class without a pixel"),
        ("XML files that are empty", "1 XML file that is empty"),
    ],
)
def test_one_is_singular(plural, one):
    assert counted(1, plural) == one
    assert counted(2000, plural) == f"2,000 {plural}"


def test_long_lists_are_shortened():
    assert some_of("abc", 2) == "a, b and 1 more"


def test_control_characters_and_surrogates_are_escaped():
    assert printable("a\x1b[31m\u202eb\udcff é") == r"a\x1b[31m\u202eb\udcff é"
    printable("\udcff").encode()


def test_lists_are_shown_from_their_first_difference():
    names = [f"class {number}" for number in range(80)]
    other = [*names[:70], "hat", *names[71:]]
    shown, expected = show_difference(other, names)
    assert shown == "…, hat, class 71, class 72, class 73, class 74 and 5 more"
    assert expected.startswith("…, class 70, ")
    assert show_difference(["a", "b"], ["c"]) == ("a, b", "c")
    assert show_difference(["a", "b"], ["a"]) == ("…, b", "nothing after 1")
    assert len(show_difference(["a" * 10_000], ["b"])[0]) == 60


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ("clone/src", "pip install -e '{root}/clone[plots]'"),
        ("site-packages", "pip install 'inline-attention[plots]'"),
        ("other/src", "pip install 'inline-attention[plots]'"),
    ],
)
def test_the_command_that_installs_an_extra_fits_how_the_package_was_installed(tmp_path, monkeypatch, source, command):
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "pyproject.toml").touch()
    monkeypatch.setattr(text, "__file__", str(tmp_path / source / "inline_attention" / "support" / "text.py"))
    assert install_command("plots") == command.format(root=tmp_path)
    monkeypatch.chdir(tmp_path / "clone")
    assert install_command("plots") == (command if "inline-attention" in command else "pip install -e '.[plots]'")


def test_from_a_clone_the_command_names_the_clone(monkeypatch):
    root = Path(text.__file__).parents[3]
    monkeypatch.chdir(root)
    expected = "-e '.[plots]'" if (root / "pyproject.toml").is_file() else "'inline-attention[plots]'"
    assert install_command("plots") == f"pip install {expected}"
