"""Tables fit the terminal: columns that do not are left out, and named."""

import pytest

from inline_attention.cli.printing import make_console, make_table

HEADER = ["model", "multiply-adds (GMACs)", "top-1 (paper)", "images per second", "memory", "a note in several words"]
ROW = ["inline_deit_tiny", "1,234,567.8", "12.34 ± 0.56", "1,234.5", "12.3", "some words that can be wrapped anywhere"]


@pytest.mark.parametrize(("columns", "left_out"), [(140, 0), (80, 1), (60, 3)])
def test_a_table_fits_and_says_what_is_missing(columns, left_out, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    make_console().print(make_table(HEADER, [ROW, ROW], texts=1, caption="A caption."))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    assert text.count("A caption.") == 1
    shown = len(HEADER) - left_out
    assert all(cell in text for cell in ROW[: min(shown, 5)])  # numbers are never broken
    words = " ".join(text.split())
    assert (f"Not shown in {columns} columns: {', '.join(HEADER[shown:])}." in words) == bool(left_out)
