from inline_attention.support.text import did_you_mean, printable, show_difference, some_of


def test_suggestions():
    assert did_you_mean("digts", ["digits", "cifar10"]) == "; did you mean digits?"
    assert did_you_mean("nothing", ["digits"]) == ""


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
