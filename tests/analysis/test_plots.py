"""Pictures are written, say what was measured, and no text lies on another."""

import itertools

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from inline_attention.analysis.collision_cases import (
    QUERY_COLORS,
    draw_collision_cases,
    draw_two_queries,
    measure_injectivity,
)
from inline_attention.benchmark.cost import ATTENTIONS, CostPoint, draw_cost
from inline_attention.support.figures import KIND_LABELS, LIGHT

POINTS = [
    CostPoint(kind, tokens, milliseconds=tokens / 100, runs=3, peak_bytes=1000 * tokens)
    for tokens in (196, 784, 3136)
    for kind in ATTENTIONS
]
SKIPPED = CostPoint("softmax_explicit", 12544, None, 0, None, "skipped: its weights alone take 3.5 GiB (limit 1 GiB)")


@pytest.fixture
def figures(monkeypatch):
    """The figures saved during a test, in order, laid out and not written."""
    saved = []

    def keep(figure, path, **options):
        if figure not in saved:
            FigureCanvasAgg(figure).draw()
            saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_both_pictures_are_written(tmp_path):
    draw_collision_cases(measure_injectivity(), tmp_path / "injectivity.png")
    draw_cost([*POINTS, SKIPPED], "some machine", tmp_path)
    for name in ("injectivity.png", "cost.png"):
        height, width, _ = (pixels := imread(tmp_path / name)).shape
        assert width > height > 500
        assert pixels.std() > 0.05  # not blank


def test_titles_state_the_measured_verdict(figures, tmp_path):
    results = measure_injectivity()
    draw_collision_cases(results, tmp_path / "a.png")
    changed = [result._replace(smallest_difference=1, largest_difference=1) for result in results]
    draw_collision_cases(changed, tmp_path / "b.png")
    same = "all 4 queries get the same weights"
    assert [index for index, title in enumerate(titles(figures[0])) if title == same] == [2, 6]
    assert same not in titles(figures[1])


def test_the_picture_of_the_readme_has_few_panels_that_state_the_measured_verdict(figures, tmp_path):
    draw_two_queries(measure_injectivity(), tmp_path / "a.png")
    assert titles(figures[0]) == [
        "Softmax: different weights", "Linear: the same weights for both", "InLine: different weights",
    ]  # fmt: skip
    assert figures[0].get_figwidth() < 5  # on a phone, text is at least half as large as here


def test_queries_do_not_have_the_colors_of_attentions():
    assert not {color.lower() for color in QUERY_COLORS} & {LIGHT[kind] for kind in KIND_LABELS}


def test_no_headline_legend_or_panel_title_overlaps(figures, tmp_path):
    draw_collision_cases(measure_injectivity(), tmp_path / "a.png")
    draw_two_queries(measure_injectivity(), tmp_path / "b.png")
    draw_cost([*POINTS, SKIPPED], "some machine", tmp_path)
    for figure in figures:
        artists = [*figure.texts, *figure.legends, *(axes._left_title for axes in figure.axes)]
        boxes = [artist.get_window_extent().padded(-1) for artist in artists]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        assert all(box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 and box.y0 >= 0 for box in boxes)


def test_cost_names_machine_and_skipped_sizes(figures, tmp_path):
    draw_cost([*POINTS, SKIPPED], "some machine", tmp_path)
    small_print = " ".join(figures[0].get_supxlabel().split())
    assert "some machine" in small_print
    assert SKIPPED.note in small_print


def test_cost_without_memory_figures_still_draws_time(figures, tmp_path):
    draw_cost([point._replace(peak_bytes=None) for point in POINTS], "some machine", tmp_path)
    time_axes, memory_axes = figures[0].axes
    assert len(time_axes.lines) == len(ATTENTIONS)
    (legend,) = figures[0].legends
    assert [text.get_text() for text in legend.texts] == [attention.label for attention in ATTENTIONS.values()]
    assert [text.get_text() for text in memory_axes.texts] == ["not available on this platform"]
