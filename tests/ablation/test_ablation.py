"""Ablations: grids, runs that are resumed and recognised, tables."""

import json
import signal
from dataclasses import replace

import pytest

import warm
from analysis.written_runs import small_digits_config
from inline_attention.ablation import runs as ablation_runs
from inline_attention.ablation.grid import AxisError, grid, parse_axis
from inline_attention.ablation.runs import UnusableRunError, collect, finish_run, train_cells, train_side_by_side
from inline_attention.ablation.tables import (
    AblationFile,
    RunOutcome,
    as_markdown,
    draw_ablation,
    latest_environment,
    summarize,
    text_table,
    write_ablation,
)
from inline_attention.benchmark import side_by_side
from inline_attention.engine.interruption import InterruptedBySignalError
from inline_attention.engine.trainer import DivergedError
from inline_attention.models import create_model
from inline_attention.support.untrusted import build_dataclass

ENVIRONMENT = {"machine": "a CPU", "gpu": "none", "torch": "2.11", "commit": "abc", "date": "2026-01-01 00:00 UTC"}


def outcome(top1, **fields):
    return RunOutcome(**({"top1": top1, "epochs": 1, "seconds": 2.0, "images_per_second": 100.0,
                          "environment": ENVIRONMENT} | fields))  # fmt: skip


@pytest.fixture
def config():
    config = small_digits_config(depth=1)
    training = replace(config.training, epochs=3, batch_size=256, total_batch_size=256)
    return replace(config, training=training, logging=replace(config.logging, tensorboard=False))


def test_axes_have_values_of_their_own_and_take_others():
    assert parse_axis("normalization") == ("normalization", ("divide", "subtract"))
    assert parse_axis("heads=2, 4,2") == ("heads", (2, 4))
    assert parse_axis("local_residual=false") == ("local_residual", (False,))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("feature_maps", "--axis must be one of .* did you mean feature_map"),
        ("heads=two", "heads=1,2,4,8"),
        ("local_residual=no", "true,false"),
        ("normalization=divide,magnitud", "expected one of subtract, divide, magnitude"),
    ],
)
def test_an_axis_that_does_not_exist_is_named_with_what_does(text, hint):
    with pytest.raises(AxisError, match=hint):
        parse_axis(text)


def test_a_grid_changes_what_it_names_and_nothing_else(config):
    model = replace(config.model, arguments={**config.model.arguments, "attention_options": {"scale": 1.0}})
    cells = grid(replace(config, model=model), {"feature_map": ("relu", "exp"), "local_residual": (True, False)})
    assert [tuple(cell.values.values()) for cell in cells] == [
        ("relu", True), ("relu", False), ("exp", True), ("exp", False),
    ]  # fmt: skip
    assert [cell.label for cell in cells[:2]] == ["relu, local residual", "relu, no local residual"]
    options = cells[3].config.model.arguments["attention_options"]
    assert options == {"scale": 1.0, "feature_map": "exp", "local_residual": False}
    for cell in cells:
        assert cell.problem is None
        assert replace(cell.config, model=model) == replace(config, model=model)
    names = {str(cell.run("out", seed).run.experiment) for cell in cells for seed in (0, 1)}
    assert len(names) == 8
    assert all("/" not in name and " " not in name for name in names)


def test_the_3x3_term_is_a_control_for_every_attention():
    cells = grid(small_digits_config(), {"attention": ("inline", "softmax", "linear"), "local_residual": (True, False)})
    assert [cell.problem for cell in cells] == [None] * 6
    models = [create_model(cell.config.model.name, **cell.config.model.model_arguments()) for cell in cells]
    assert [hasattr(model.blocks[0].attn.residual, "predict") for model in models] == [True, False] * 3


def test_pyramids_have_heads_per_stage():
    config = small_digits_config()
    swin = replace(config, model=replace(config.model, name="inline_swin_tiny", arguments={}, img_size=224))
    (cell,) = grid(swin, {"heads": (3,)})
    assert cell.config.model.arguments["num_heads"] == (3, 6, 12, 24)
    assert cell.problem is None


@pytest.mark.parametrize(
    ("name", "axes", "reason"),
    [
        ("inline_deit_tiny", {"heads": (3,)}, "divisible"),
        ("inline_deit_tiny", {"window": (7,)}, "inline_deit_tiny has no windows"),
        ("inline_swin_tiny", {"attention": ("softmax",), "window": (0,)}, "cannot be built"),
        ("softmax_deit_tiny", {"feature_map": ("relu",)}, "has no feature_map"),
        ("inline_deit_tiny", {"attention": ("softmax",), "normalization": ("divide",)}, "has no normalization"),
        ("softmax_swin_tiny", {"local_residual": (True,)}, "has no local_residual"),
    ],
)
def test_combinations_that_cannot_be_trained_say_why(name, axes, reason):
    (cell,) = grid(small_digits_config(name), axes)
    assert cell.problem is not None
    assert reason in cell.problem


def test_mean_spread_and_notes(config):
    first, second = grid(config, {"normalization": ("divide", "subtract")})
    good = summarize(first, {0: outcome(50.0), 1: outcome(54.0, images_per_second=300.0)})
    bad = summarize(second, {0: outcome(None, failure="NaN", images_per_second=None)})
    assert good.top1_mean == 52.0
    assert good.top1_std == pytest.approx(8**0.5)
    assert good.images_per_second == 200.0
    assert bad.top1_mean is bad.top1_std is bad.images_per_second is None
    header, rows = text_table([good, bad])
    assert rows[0][:3] == ["divide", "52.00 ± 2.83", "2"]
    assert rows[1][-1] == "seed 0: NaN"
    assert "note" not in text_table([good])[0]
    assert "| subtract | – | 0 |" in as_markdown([good, bad])
    assert len(header) == len(rows[0])


def test_files_name_every_place_the_runs_were_made(config, tmp_path):
    (cell,) = grid(config, {"heads": (2,)})
    later = ENVIRONMENT | {"gpu": "H200", "date": "2026-01-02 00:00 UTC"}
    result = summarize(cell, {0: outcome(50.0, environment=later), 1: outcome(51.0)})
    assert latest_environment([result])["gpu"] == "none, then H200"
    write_ablation(tmp_path / "new", "ablation", [result], title="T", about="How.", settings={"recipe": "digits"})
    content = json.loads((tmp_path / "new" / "ablation.json").read_text())
    assert content["results"][0]["values"] == {"heads": 2}
    assert content["results"][0]["heads"] == 2
    assert content["results"][0]["runs"]["1"]["top1"] == 51.0
    assert build_dataclass(AblationFile, content).results == [result]
    columns = "heads,top1_mean,top1_std,seeds,parameters,macs,images_per_second,note\n"
    assert (tmp_path / "new" / "ablation.csv").read_text().startswith(columns)
    assert "50.50 ± 0.71" in (tmp_path / "new" / "ablation.md").read_text()


def test_a_stopped_run_resumes_and_a_finished_one_is_recognized(config, tmp_path, monkeypatch):
    (cell,) = grid(config, {"heads": (2,)})
    run = cell.run(str(tmp_path / "stopped"), 0)
    epochs, handler = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(InterruptedBySignalError):
        finish_run(run, stop_at=0.0, on_epoch=lambda row: epochs.append(row["epoch"]))
    assert signal.getsignal(signal.SIGTERM) is handler
    assert epochs == [1]
    assert collect([cell], [0], tmp_path / "stopped")[0].runs == {}
    ended = finish_run(run, on_epoch=lambda row: epochs.append(row["epoch"]))
    assert epochs == [1, 2, 3]
    assert ended.images_per_second is not None
    assert ended.images_per_second > 0
    whole = finish_run(cell.run(str(tmp_path / "whole"), 0))
    assert ended.top1 == whole.top1
    monkeypatch.setattr(ablation_runs, "train", lambda *_, **__: pytest.fail("trained again"))
    ((_, _, again),) = train_cells([cell], [0], tmp_path / "stopped")
    assert again == ended


def test_a_folder_with_other_settings_is_refused_and_one_that_moved_is_not(config, tmp_path, monkeypatch):
    (cell,) = grid(config, {"heads": (2,)})
    run = cell.run(str(tmp_path), 0)
    run = replace(run, training=replace(run.training, epochs=1))
    finish_run(run)
    monkeypatch.setattr(ablation_runs, "train", lambda *_, **__: pytest.fail("trained again"))
    moved = replace(run, data=replace(run.data, dir="elsewhere", workers=3), run=replace(run.run, device="cpu"))
    assert finish_run(moved).epochs == 1
    with pytest.raises(UnusableRunError, match=r"training\.epochs was 1, now 3"):
        finish_run(cell.run(str(tmp_path), 0))


def test_a_run_that_diverges_is_a_result(config, tmp_path, monkeypatch):
    (cell,) = grid(config, {"heads": (2,)})

    def diverge(config, on_epoch):
        (tmp_path / config.run.experiment).mkdir()
        raise DivergedError("NaN in a row; lower optimizer.lr")

    monkeypatch.setattr(ablation_runs, "train", diverge)
    ((_, _, result),) = train_cells([cell], [0], tmp_path)
    assert result.top1 is None
    assert "NaN" in result.failure
    assert collect([cell], [0], tmp_path)[0].note == "seed 0: diverged: NaN in a row"


@pytest.fixture
def _quick_starts(monkeypatch):
    monkeypatch.setattr(side_by_side, "subprocess", warm)


@pytest.mark.usefixtures("_quick_starts")
def test_runs_side_by_side_are_those_one_after_the_other(config, tmp_path):
    config = replace(config, training=replace(config.training, epochs=1))
    cells = grid(config, {"heads": (2, 4)})
    ((_, _, alone),) = train_cells(cells[:1], [0], tmp_path / "alone")
    troubles: list[str] = []
    ended = list(train_side_by_side(cells, [0], tmp_path / "both", at_once=2, on_trouble=troubles.append))
    assert troubles == []
    assert {cell.label for cell, _, _ in ended} == {cell.label for cell in cells}
    by_label = {cell.label: outcome for cell, _, outcome in ended}
    assert by_label[cells[0].label].top1 == alone.top1
    assert by_label[cells[0].label].images_per_second is None  # it had half a machine
    config = replace(config, training=replace(config.training, epochs=2))  # the first epoch is not timed
    in_turn = train_side_by_side(
        grid(config, {"heads": (2,)}), [0], tmp_path / "turn", at_once=1, on_trouble=pytest.fail
    )
    assert next(in_turn).outcome.images_per_second is not None
    again = train_side_by_side(cells, [0], tmp_path / "both", at_once=2, on_trouble=pytest.fail)
    assert {outcome.top1 for _, _, outcome in again} == {outcome.top1 for _, _, outcome in ended}


def test_a_run_that_fails_beside_others_says_why(config, tmp_path):
    elsewhere = replace(config.data, dataset="folder", dir=str(tmp_path / "nowhere"))
    cells = grid(replace(config, data=elsewhere), {"heads": (2,)})
    troubles: list[str] = []
    assert not list(train_side_by_side(cells, [0], tmp_path / "runs", at_once=1, on_trouble=troubles.append))
    (trouble,) = troubles
    assert "failed" in trouble
    assert "nowhere" in trouble


@pytest.mark.usefixtures("_quick_starts")
def test_links_in_the_folder_of_an_ablation_are_replaced_not_followed(config, tmp_path):
    elsewhere = replace(config.data, dataset="folder", dir=str(tmp_path / "nowhere"))
    cells = grid(replace(config, data=elsewhere), {"heads": (2,)})
    precious = tmp_path / "precious"
    precious.write_text("content")
    folder = ablation_runs.run_folder(cells[0].run(str(tmp_path / "runs"), 0))
    folder.parent.mkdir(parents=True)
    for suffix in (".yaml", ".log"):
        folder.with_suffix(suffix).symlink_to(precious)
    assert not list(train_side_by_side(cells, [0], tmp_path / "runs", at_once=2, on_trouble=str))
    assert precious.read_text() == "content"


def test_forged_times_do_not_lose_a_result(config):
    assert ablation_runs._images_per_second(config, {"1": 0.0, "2": 0.0}) is None
    assert ablation_runs._images_per_second(config, {"1": -1.0}) is None


def test_nothing_is_begun_after_the_time_is_up(config, tmp_path):
    cells = grid(config, {"heads": (2,)})
    assert list(train_cells(cells, [0], tmp_path, stop_at=0.0)) == []
    assert list(tmp_path.iterdir()) == []


def test_the_picture_has_a_row_per_trained_cell(config, tmp_path):
    pytest.importorskip("matplotlib")
    trained, diverged, impossible = grid(config, {"heads": (2, 4, 3)})
    results = [
        summarize(trained, {0: outcome(50.0), 1: outcome(54.0)}),
        summarize(diverged, {0: outcome(None, failure="NaN")}),
        summarize(impossible, {}),
    ]
    files = draw_ablation(results[:2], tmp_path, "ablation", title="Heads", small_print="How.")
    assert [file.name for file in files] == ["ablation.png", "ablation.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
