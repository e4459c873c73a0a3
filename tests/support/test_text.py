from inline_attention.support.text import did_you_mean, printable, some_of


def test_suggestions():
    assert did_you_mean("digts", ["digits", "cifar10"]) == "; did you mean digits?"
    assert did_you_mean("nothing", ["digits"]) == ""


def test_long_lists_are_shortened():
    assert some_of("abc", 2) == "a, b and 1 more"


def test_control_characters_and_surrogates_are_escaped():
    assert printable("a\x1b[31m\u202eb\udcff é") == r"a\x1b[31m\u202eb\udcff é"
    printable("\udcff").encode()
