"""Learning curves: read from any run's folder, drawn as they are written there."""

import itertools

import pytest

from inline_attention.analysis.training_curves import RunFolderError, draw_training_curves, read_training_curves
from inline_attention.engine.config import to_yaml, with_overrides
from inline_attention.recipes import get_recipe

HEADER = "epoch,train_loss,lr,val_loss,top1,top5,ema_loss,ema_top1,ema_top5,skipped_updates,broken_images"


@pytest.fixture
def make_run(tmp_path):
    """The folder of a run with a given table of epochs."""

    def make(name, *rows, model="inline_deit_tiny", epochs=2):
        folder = tmp_path / name
        folder.mkdir()
        config = with_overrides(get_recipe("digits").config, [f"model.name={model}", f"training.epochs={epochs}"])
        (folder / "args.yaml").write_text(to_yaml(config), encoding="utf-8")
        (folder / "summary.csv").write_text("\n".join([HEADER, *rows]) + "\n", encoding="utf-8")
        return folder

    return make


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws runs and returns the figure, laid out."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from inline_attention.support import figures

    def draw(folders):
        saved = []
        monkeypatch.setattr(figures, "save", lambda figure, *_: saved.append(figure) or [])
        draw_training_curves(read_training_curves(folders), tmp_path)
        FigureCanvasAgg(saved[0]).draw()
        return saved[0]

    return draw


def test_reads_what_was_measured_and_leaves_out_what_was_not(make_run):
    folder = make_run("a", "1,2.5,0.1,,,,,,,0,0", "2,nan,0.1,1.5,60.0,90.0,1.4,61.5,91.0,0,0")
    (run,) = read_training_curves([folder])
    assert (run.label, run.model_name, run.dataset, run.planned_epochs) == (
        "inline_deit_tiny", "inline_deit_tiny", "digits", 2,
    )  # fmt: skip
    first, second = run.epochs
    assert (first.epoch, first.train_loss, first.validation_loss, first.top1) == (1, 2.5, None, None)
    assert (second.train_loss, second.validation_loss, second.top1, second.averaged_top1) == (None, 1.5, 60.0, 61.5)


def test_runs_of_one_model_are_labelled_by_their_folders(make_run):
    row = "1,2,0.1,2,10,50,,,,0,0"
    folders = [make_run("a", row), make_run("b", row), make_run("c", row, model="softmax_deit_tiny")]
    assert [run.label for run in read_training_curves(folders)] == ["a", "b", "softmax_deit_tiny"]


@pytest.mark.parametrize(
    "text", [f"{HEADER}\none,2\n", f"{HEADER}\n1,much\n", "step,loss\n1,2\n"], ids=["epoch", "loss", "other columns"]
)
def test_a_damaged_table_is_named(make_run, text):
    folder = make_run("a")
    (folder / "summary.csv").write_text(text, encoding="utf-8")
    with pytest.raises(RunFolderError, match=r"summary\.csv cannot be read"):
        read_training_curves([folder])


def test_a_run_that_has_just_begun_has_nothing_to_draw(make_run):
    folder = make_run("a")
    for _ in range(2):  # an empty table, then none
        with pytest.raises(RunFolderError, match="has not finished an epoch"):
            read_training_curves([folder])
        (folder / "summary.csv").unlink(missing_ok=True)


def test_a_folder_that_is_no_run_says_what_was_expected(tmp_path):
    with pytest.raises(RunFolderError, match="`inline train`"):
        read_training_curves([tmp_path])


def test_lines_are_the_numbers_of_the_table(make_run, drawn):
    figure = drawn([make_run("a", "1,2,0.1,1.8,40,90,,,,0,0", "2,1,0.1,0.9,70,95,,,,0,0")])
    accuracy, loss = figure.axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[2, 1], [1.8, 0.9]]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[40, 70]]
    assert loss.get_yscale() == "linear"


def test_a_loss_that_falls_far_is_drawn_on_a_logarithmic_axis(make_run, drawn):
    figure = drawn([make_run("a", "1,2,0.1,1.8,40,90,,,,0,0", "2,0.01,0.1,0.9,70,95,,,,0,0")])
    assert figure.axes[1].get_yscale() == "log"


def test_close_accuracies_do_not_lie_on_each_other(make_run, drawn):
    models = ("inline_deit_tiny", "softmax_deit_tiny", "linear_deit_tiny", "resnet18")
    folders = [
        make_run(model, "1,2,0.1,2,10,50,,,,0,0", f"2,1,0.1,1,{88 + 0.1 * number},95,,,,0,0", model=model)
        for number, model in enumerate(models)
    ]
    figure = drawn(folders)
    labels = figure.axes[0].texts
    assert sorted(label.get_text() for label in labels) == ["88.0", "88.1", "88.2", "88.3"]
    boxes = [label.get_window_extent() for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(box.x1 <= figure.bbox.x1 for box in boxes)
    assert len({line.get_color() for line in figure.axes[0].lines}) == len(models)


def test_unfinished_and_unevaluated_runs_say_so(make_run, drawn):
    figure = drawn([make_run("a", "1,2,0.1,,,,,,,0,0", epochs=30)])
    assert "inline_deit_tiny after 1 of 30 epochs" in figure.get_supxlabel()
    assert [text.get_text() for text in figure.axes[0].texts] == ["not evaluated yet"]


def test_averaged_weights_have_a_line_of_their_own(make_run, drawn):
    figure = drawn([make_run("a", "1,2,0.1,2,10,50,2,30,60,0,0")])
    assert sorted(line.get_ydata()[0] for line in figure.axes[0].lines) == [10, 30]
    assert "moving average" in figure.get_supxlabel()


def test_files_are_written(make_run, tmp_path):
    pytest.importorskip("matplotlib")
    runs = read_training_curves([make_run("a", "1,2,0.1,2,10,50,,,,0,0")])
    files = draw_training_curves(runs, tmp_path, name="mine")
    assert [file.name for file in files] == ["mine.png", "mine.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG")
