import pytest
import yaml

from inline_attention.support.untrusted import UntrustedDataError, load_yaml, parse_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "nested more than 50 deep"),
        ("[" * 60 + "]" * 60, "nested more than 50 deep"),
        ("9" * 10_000, "not valid JSON"),
        (b"\xff\xfe\xfa", "not valid JSON"),
        ("{", "not valid JSON"),
        (" " * 2**21, "more than 1,048,576"),
    ],
)
def test_json_out_of_bounds(text, message):
    with pytest.raises(UntrustedDataError, match=message):
        parse_json(text)


def test_json_in_bounds():
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 5000, "nested more than 50 deep"), ("a: " + "9" * 10_000, "cannot be read"), (" " * 2**21, "more than")],
)
def test_yaml_out_of_bounds(text, message):
    with pytest.raises(UntrustedDataError, match=message):
        load_yaml(text, yaml.SafeLoader)


def test_yaml_aliases_and_code_are_refused():
    for text in ("a: &x [1]\nb: [*x, *x]", "!!python/object/apply:os.system [ls]"):
        with pytest.raises(yaml.YAMLError):
            load_yaml(text, yaml.SafeLoader)
