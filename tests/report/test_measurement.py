"""What a report gathers: runs found, measured once, and left out with a reason where that is impossible."""

import json

import pytest

from analysis.written_runs import write_run
from inline_attention.ablation.tables import AblationFile
from inline_attention.analysis.predictions import Answer
from inline_attention.benchmark.cost import CostPoint
from inline_attention.report import measurement as report_measurement
from inline_attention.report.measurement import (
    ForeignFileError,
    KeptMeasurements,
    LoadedRun,
    NoRunError,
    ShownPicture,
    find_runs,
    gather,
    shown_pictures,
)
from inline_attention.support.untrusted import build_dataclass

COST = [CostPoint("inline", tokens, 1.0, 1, 1) for tokens in (4, 16)]


@pytest.fixture(autouse=True)
def few_pictures(monkeypatch):
    sizes = {"attention": 2, "masking": 6, "answers": 12}
    monkeypatch.setattr(report_measurement, "sample_sizes", lambda tokens, device: sizes)


@pytest.fixture
def runs(tmp_path):
    return [write_run(tmp_path / "runs" / f"{kind} run", f"{kind}_deit_tiny") for kind in ("linear", "inline")]


def test_runs_are_found_in_a_folder_inline_first(runs, tmp_path):
    linear, inline = runs
    (tmp_path / "runs" / "notes").mkdir()
    assert find_runs([tmp_path / "runs"]) == [inline, linear]
    assert find_runs([linear, inline, linear]) == [linear, inline]


@pytest.mark.parametrize(("name", "message"), [("nowhere", "does not exist"), (".", "holds no run")])
def test_what_is_no_run_is_named(tmp_path, name, message):
    with pytest.raises(NoRunError, match=message):
        find_runs([tmp_path / name])


def test_everything_is_measured_once(runs, tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    first = gather(runs, KeptMeasurements(path), cost=COST, device="cpu")
    assert first.missing == {}
    for run in first.runs:
        assert len(run.confusion) == 2
        assert len(run.answers) == 12
        assert run.locality
        assert run.masking
        assert [picture.index for picture in run.pictures] == [p.index for p in first.runs[0].pictures]
    assert [run.kind for run in first.runs] == ["linear", "inline"]

    def work(*_):
        pytest.fail("measured again")

    monkeypatch.setattr(LoadedRun, "measure", work)
    monkeypatch.setattr(LoadedRun, "show", work)
    second = gather(runs, KeptMeasurements(path), cost=COST, device="cpu")
    assert second.runs == first.runs


def test_other_weights_are_measured_anew_and_old_figures_go(runs, tmp_path):
    path = tmp_path / "report.json"
    gather(runs, KeptMeasurements(path), cost=COST, device="cpu")
    before = json.loads(path.read_text())["measurements"]
    weights = [run / "checkpoints" / "last" / "model.safetensors" for run in runs]
    weights[1].unlink()
    write_run(tmp_path / "again", "inline_deit_tiny").joinpath("checkpoints/last/model.safetensors").rename(weights[1])
    gather(runs, KeptMeasurements(path), cost=COST, device="cpu")
    after = json.loads(path.read_text())["measurements"]
    kept, gone = after.keys() & before.keys(), before.keys() - after.keys()
    assert len([key for key in kept if key.startswith("confusion")]) == 1
    assert len([key for key in gone if key.startswith("confusion")]) == 1


def test_measurements_of_another_version_are_made_anew(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"format": report_measurement.KEPT_FORMAT, "version": 0, "measurements": {"a": 1}}))
    assert KeptMeasurements(path).get("a", CostPoint, lambda: COST) == COST
    assert KeptMeasurements(path).get("a", CostPoint, lambda: []) == COST


@pytest.mark.parametrize("damage", [{"tokens": "many"}, {"milliseconds": [1]}, {"kind": None}])
def test_damaged_measurements_are_made_anew(tmp_path, damage):
    path = tmp_path / "report.json"
    KeptMeasurements(path).get("a", CostPoint, lambda: COST)
    content = json.loads(path.read_text())
    content["measurements"]["a"][0] |= damage
    path.write_text(json.dumps(content))
    assert KeptMeasurements(path).get("a", CostPoint, lambda: COST[:1]) == COST[:1]


@pytest.mark.parametrize("address", ["javascript:alert(1)", "data:text/html,<script>alert(1)</script>", "x.png"])
def test_a_kept_picture_that_is_no_png_is_measured_anew(tmp_path, address):
    picture = ShownPicture(1, "a", "data:image/png;base64,AAAA", 0, (0, 0), [[1.0]])
    path = tmp_path / "report.json"
    assert KeptMeasurements(path).get("a", ShownPicture, lambda: [picture]) == [picture]
    content = json.loads(path.read_text())
    content["measurements"]["a"][0]["picture"] = address
    path.write_text(json.dumps(content))
    assert KeptMeasurements(path).get("a", ShownPicture, lambda: [picture]) == [picture]
    assert address not in path.read_text()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 1, "measurements": {}}', '{"title": "ablation"}']
)
def test_a_file_that_no_report_has_written_is_left_alone(tmp_path, content):
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ForeignFileError, match=r"is not a file of `inline report` .*; choose another --output"):
        KeptMeasurements(path)
    assert path.read_text() == content


def test_a_run_without_weights_or_epochs_is_left_out_of_what_needs_them(runs, tmp_path):
    bare = write_run(tmp_path / "bare", "softmax_deit_tiny", weights=False)
    (bare / "summary.csv").unlink()
    found = gather([*runs, bare], KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert found.runs[2].curves is None
    assert found.runs[2].confusion is None
    assert set(found.missing) == {"curves", "confusion", "locality", "masking", "answers", "pictures"}
    assert all(reason.startswith("softmax_deit_tiny: ") for reasons in found.missing.values() for reason in reasons)


def test_data_that_is_gone_leaves_the_curves(runs, tmp_path):
    settings = (runs[0] / "args.yaml").read_text().replace("dataset: digits", "dataset: folder")
    (runs[0] / "args.yaml").write_text(settings.replace("dir: null", f"dir: {tmp_path / 'gone'}"))
    found = gather(runs, KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert found.runs[0].curves is not None
    assert "gone" in found.missing["confusion"][0]
    assert found.runs[1].confusion


def test_damaged_weights_are_named_and_the_rest_is_measured(runs, tmp_path):
    (runs[0] / "checkpoints" / "last" / "model.safetensors").write_bytes(b"no weights")
    found = gather(runs, KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert "model.safetensors" in found.missing["masking"][0]
    assert found.runs[1].masking


def test_a_softmax_model_of_timm_is_measured_beside_its_conversion(tmp_path):
    attentions = {"teacher": None, "linearized": "inline"}
    runs = [write_run(tmp_path / name, "vit_tiny_patch16_224", attention=kind) for name, kind in attentions.items()]
    found = gather(runs, KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert found.missing == {}
    assert [run.kind for run in found.runs] == ["softmax", "inline"]
    assert all(run.confusion and run.locality and run.masking and run.answers for run in found.runs)


def test_a_model_without_a_head_is_left_out_of_what_needs_one(tmp_path):
    run = write_run(tmp_path / "features", "vit_tiny_patch16_224", attention="inline", classes=0)
    found = gather([run], KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert set(found.missing) == {"masking", "answers"}
    assert all("has no head to classify with" in reason for (reason,) in found.missing.values())
    assert found.runs[0].confusion
    assert found.runs[0].locality


def test_runs_of_one_model_get_distinct_labels(tmp_path):
    runs = [write_run(tmp_path / parent / "same", "inline_deit_tiny", weights=False) for parent in ("a", "b")]
    runs.append(write_run(tmp_path / "other", "inline_deit_tiny", weights=False))
    found = gather(runs, KeptMeasurements(tmp_path / "report.json"), cost=COST, device="cpu")
    assert [run.label for run in found.runs] == ["same", "same (#2)", "other"]
    assert len({run.label for run in found.runs}) == 3


def test_an_ablation_is_read_from_its_folder_and_anything_else_refused(runs, tmp_path):
    numbers = {"top1_mean": 70.0, "top1_std": None, "seeds": 1, "parameters": 5.0, "macs": 6.0}
    result = {"label": "relu", "values": {"feature_map": "relu"}, "images_per_second": None, "note": "", **numbers}
    run = {"top1": 70.0, "epochs": 1, "seconds": 2.0, "images_per_second": None, "environment": {}, "failure": ""}
    content = {"title": "T", "environment": {"gpu": "none"}, "results": [{**result, "runs": {"0": run}}]}
    (tmp_path / "ablation.json").write_text(json.dumps(content | {"analysis": "ablation", "settings": {}}))
    kept = KeptMeasurements(tmp_path / "report.json")
    bare = [write_run(tmp_path / "bare", weights=False)]
    assert gather(bare, kept, ablations=[tmp_path], cost=COST).ablations == [build_dataclass(AblationFile, content)]
    with pytest.raises(NoRunError, match="no result of `inline ablate`"):
        gather(bare, kept, ablations=[runs[0] / "args.yaml"], cost=COST)
    del content["results"][0]["label"]
    (tmp_path / "ablation.json").write_text(json.dumps(content))
    with pytest.raises(NoRunError, match="lacks 'label'"):
        gather(bare, kept, ablations=[tmp_path], cost=COST)


def test_the_hardest_pictures_of_all_models_together_are_shown():
    def answers(*probabilities):
        return [Answer(i, str(i), "ab"[i % 2], p, "a", 0.5, False) for i, p in enumerate(probabilities)]

    both = [answers(0.1, 0.9, 0.2, 0.8), answers(0.5, 0.9, 0.1, 0.9)]
    assert shown_pictures(both, 2) == [2, 3]  # hardest of a, then of b, before a second of a
    assert shown_pictures(both, 3) == [2, 3, 0]
