"""The committed page, its picture's source, the committed accuracies and the README state the same numbers."""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def committed(name):
    with (ROOT / "benchmarks" / "results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def accuracies():
    return {f"{row['attention']}_deit_tiny": float(row["top1"]) for row in committed("digits_demo.csv")}


def test_the_page_states_the_committed_accuracies():
    page = (ROOT / "docs" / "report" / "digits.html").read_text(encoding="utf-8").replace("<wbr>", "")
    table = page[page.index("Runs, with the accuracy") :]
    table = table[: table.index("</table>")]
    rows = re.findall(r'<th scope="row">(\w+)</th><td class="number">([\d.]+)</td>', table)
    assert dict(rows) == {name: f"{top1:.2f}" for name, top1 in accuracies().items()}


def test_the_curves_end_at_the_committed_accuracies():
    ends = {row["model"]: float(row["top1"]) for row in committed("digits_curves.csv")}
    assert ends == accuracies()


def test_the_readme_states_no_other_accuracies_of_the_digits():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paragraph = next((part for part in text.split("\n\n") if "digits_demo.csv" in part), "")
    stated = set(re.findall(r"(\d\d\.\d) %", paragraph))
    assert stated <= {f"{top1:.1f}" for top1 in accuracies().values()}
