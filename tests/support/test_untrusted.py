from dataclasses import dataclass
from typing import Literal

import pytest
import yaml

from inline_attention.support.untrusted import UntrustedDataError, build_dataclass, load_yaml, parse_json


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
        with pytest.raises(UntrustedDataError, match="not valid YAML"):
            load_yaml(text, yaml.SafeLoader)


@dataclass(frozen=True)
class Part:
    name: str
    size: float


@dataclass(frozen=True)
class Whole:
    parts: list[Part]
    pair: tuple[int, int]
    kind: Literal["a", "b"]
    notes: dict[str, str | None]
    is_open: bool = False


WHOLE = {"parts": [{"name": "x", "size": 1}], "pair": [1, 2], "kind": "a", "notes": {"n": None}}


def test_a_dataclass_is_built_from_what_fits_its_fields():
    assert build_dataclass(Whole, WHOLE | {"unknown": 1}) == Whole([Part("x", 1.0)], (1, 2), "a", {"n": None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": {}}, "it.parts must be list"),
        ({"parts": [{"name": "x"}]}, r"it\.parts\[0\] lacks 'size'"),
        ({"parts": [{"name": 1, "size": 1}]}, r"it\.parts\[0\]\.name must be str, got 1"),
        ({"parts": [{"name": "x", "size": float("nan")}]}, "size must be float, got nan"),
        ({"parts": [{"name": "x", "size": True}]}, "size must be float, got True"),
        ({"parts": [[]]}, "must be an object, got list"),
        ({"pair": [1]}, "pair must be"),
        ({"pair": [1, 2.5]}, r"pair\[1\] must be int"),
        ({"kind": "c"}, "kind must be"),
        ({"kind": []}, "kind must be"),
        ({"notes": {"n": 1}}, "notes.n must be"),
        ({"is_open": 1}, "is_open must be bool"),
        ({"notes": {"n": "x" * 100_000}, "pair": "x" * 100_000}, "pair must be"),
    ],
)
def test_what_does_not_fit_a_dataclass_is_named(change, message):
    with pytest.raises(UntrustedDataError, match=message) as raised:
        build_dataclass(Whole, WHOLE | change)
    assert len(str(raised.value)) < 300
