"""The everyday benchmark: every kind of cell, its bounds, its budget, and failures that stay where they are."""

import json
import time
from dataclasses import replace

import pytest
import torch

from inline_attention.benchmark import attention, everyday, models, tables, timing
from inline_attention.benchmark.everyday import Bound, Cell, EverydaySettings, Row, choose_cells, measure_everyday
from inline_attention.benchmark.everyday_cells import everyday_cells, smoke_cells
from inline_attention.benchmark.side_by_side import time_limit
from inline_attention.ops import dispatch
from ops.calls import use_backends

CPU = torch.device("cpu")


class Failing(Cell):
    def measure(self, report, seconds):
        raise torch.OutOfMemoryError("no room\nfor this")


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch):
    """Plain InLine alone, two blocks, few rounds: fused backends would run in Triton's interpreter here."""
    eager = tuple(backend for backend in dispatch.AUTO_BACKENDS if backend.name == "eager")
    use_backends(monkeypatch, *eager)
    monkeypatch.setattr(attention, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(models, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(models, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(models, "CLASSES", 10)
    monkeypatch.setattr(timing, "CPU_COPY_BYTES", 1 << 16)
    real = models.create_model
    monkeypatch.setattr(models, "create_model", lambda name, **options: real(name, depth=2, **options))


def settings_of(*cells, **options):
    return EverydaySettings(CPU, torch.float32, cells, seconds=0, **options)


def test_every_kind_of_cell_is_measured_and_kept_by_a_second_run():
    lines = []
    settings = settings_of(*smoke_cells())
    report = measure_everyday(settings, lambda _, line: lines.append(line))
    assert len(lines) == everyday.count_steps(settings)
    for cell in settings.cells:
        rows = report.rows[cell.name]
        assert [row.step for row in rows] == list(cell.bounds)
        for row in rows:
            if cell.name == "cu_seqlens":
                assert (row.ours, row.note) == (None, "not available: packed sequences")
            else:
                assert (row.ours is None, row.softmax is None, row.note) == (False, False, "")
                assert row.figures["times_softmax"] is not None
    assert report.rows["tiny, mask"][0].figures["over_base"] > 0
    content = json.loads(json.dumps(report.as_json()))
    again = measure_everyday(replace(settings, budget=0), earlier=content)
    assert again.rows["DeiT-T"] == report.rows["DeiT-T"]
    assert again.rows["cu_seqlens"] == report.rows["cu_seqlens"]
    assert [len(table.rows) for table in tables.everyday_tables(report)] == [1, 4, 2]
    assert "≤ 1.65 ÷ floor" in tables.as_markdown(tables.everyday_tables(report))


def test_a_failing_cell_says_why_and_the_next_is_measured():
    failing = Failing("models", "wide", {"training": ()})
    report = measure_everyday(settings_of(failing, smoke_cells()[0]))
    assert report.rows["wide"] == [Row("wide", "training", note="no room")]
    assert report.rows["tiny"][0].ours > 0
    models_table, _ = tables.everyday_tables(report)
    assert models_table.notes == ["wide: no room"]


def test_bounds_know_their_direction():
    assert [Bound("times_softmax", 1.0, 1.2).reached(value) for value in (0.9, 1.0, 1.3)] == ["no", "accepted", "goal"]
    assert [Bound("over_floor", 1.75, 1.4).reached(value) for value in (2, 1.5, 1.4)] == ["no", "accepted", "goal"]
    assert Bound("over_floor", 5).reached(1) == "accepted"
    row = Row("both", "forward", figures={"over_floor": 1.0, "times_softmax": 0.5})
    assert replace(row, bounds=(Bound("over_floor", 2, 1), Bound("times_softmax", 1))).reached == "no"
    assert row.reached is None


def test_a_pattern_takes_along_what_its_cells_are_compared_with():
    names = [cell.name for cell in choose_cells(smoke_cells(), "mask")]
    assert names == ["tiny", "tiny, mask"]
    assert {cell.section for cell in choose_cells(everyday_cells(), "blocks")} == {"blocks"}


def test_the_cells_of_a_gpu_are_whole():
    cells = everyday_cells()
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    assert {cell.base for cell in cells} - {None} <= set(names)
    jobs = [name for cell in cells for name in cell.compile_jobs(EverydaySettings(CPU, torch.bfloat16, cells))]
    assert len(set(jobs)) == len(jobs)
    for cell in cells:
        if cell.section == "attention" and not cell.missing:
            case = cell.case
            assert case.channels % case.head_dim == 0
            assert case.batch == 1 or abs(case.elements / 25e6 - 1) < 0.06
            assert case.grid_size[0] * case.grid_size[1] == case.tokens


def test_a_time_limit_interrupts_and_leaves_no_timer():
    with pytest.raises(TimeoutError, match="took more than"), time_limit(0.05):
        time.sleep(5)
    with time_limit(0.2):
        pass
    time.sleep(0.25)
