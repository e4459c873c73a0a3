"""Result files: flat rows, every value, nothing JSON cannot say."""

import csv
import json
from dataclasses import dataclass

from inline_attention.analysis.masking import Hiding, MaskingResult
from inline_attention.benchmark.results import flat_row, write_results


@dataclass(frozen=True)
class Spectrum:
    label: str
    values: tuple[float, ...]

    @property
    def condition(self) -> float:
        return float("inf")


def test_rows_are_flat_and_hold_what_follows():
    row = flat_row(MaskingResult(Hiding("random", 3, "none"), 75.0, 80.0, 100))
    assert list(row) == ["where", "side", "local_term", "top1", "baseline_top1", "images", "drop", "standard_error"]
    assert row["drop"] == 5
    assert flat_row(Spectrum("a", (1.0,))) == {"label": "a", "values": (1.0,), "condition": None}


def test_one_json_and_a_csv_per_table(tmp_path):
    tables = {"first": [flat_row(Spectrum("a, b", (1.0, 2.0)))], "second": []}
    files = write_results(tmp_path, "test", tables, subjects=[{"label": "m"}], settings={"images": 3})
    assert [file.name for file in files] == ["test.json", "test.csv", "test-second.csv"]
    content = json.loads(files[0].read_text())
    assert content["tables"]["first"][0]["values"] == [1.0, 2.0]
    assert (content["analysis"], content["settings"], content["subjects"]) == ("test", {"images": 3}, [{"label": "m"}])
    assert "torch" in content["environment"]
    with files[1].open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"label": "a, b", "condition": ""}]
    assert not list(tmp_path.glob(".*"))
