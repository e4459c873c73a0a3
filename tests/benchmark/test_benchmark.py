"""Benchmarks check before they time, survive a broken contestant and keep what they have. Nothing asserts on time."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from inline_attention.benchmark import attention, environment, models, results, tables, timing
from inline_attention.benchmark.attention import AttentionCase, AttentionSettings, CaseResult
from inline_attention.benchmark.models import ModelCase, ModelSettings
from inline_attention.benchmark.results import Measurement, WrongResultError
from inline_attention.benchmark.timing import Timing, Work
from inline_attention.ops import dispatch
from ops.calls import use_backends

CPU = torch.device("cpu")
EAGER = next(backend for backend in dispatch.AUTO_BACKENDS if backend.name == "eager")
TINY = AttentionCase(tokens=12, channels=8, head_dim=4, batch=2)
SECOND = AttentionCase(tokens=7, channels=8, head_dim=8, batch=1)


def attention_settings(*cases, **options):
    return AttentionSettings(CPU, torch.float32, cases, latency_case=None, seconds=0, **options)


def broken(run):
    """A backend that claims to run everything and does not."""
    return dispatch.Backend("broken", EAGER.unsupported_reason, run)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(attention, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(models, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(models, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(timing, "CPU_COPY_BYTES", 1 << 16)


@pytest.fixture
def backends(monkeypatch):
    """Put backends before eager in the dispatch table, alone: fused ones would run in Triton's interpreter here."""

    def install(*extra):
        use_backends(monkeypatch, *extra, EAGER)

    install()
    return install


def outcomes(report, pass_="forward"):
    return {item.contestant: item for item in report.results[0].measurements[pass_]}


@pytest.mark.usefixtures("backends")
def test_every_contestant_is_checked_and_timed_and_the_report_grows():
    lines, lengths = [], []
    settings = attention_settings(TINY, SECOND)

    def note(so_far, line):
        lines.append(line)
        lengths.append(len(so_far.results))

    report = attention.measure_attention(settings, note)
    assert len(lines) == attention.count_steps(settings)
    assert lengths == sorted(lengths)
    assert lengths[-1] == 2
    for result in report.results:
        assert list(result.measurements) == ["forward", "forward+backward"]
        for items in result.measurements.values():
            assert [item.contestant for item in items] == ["sdpa", "eager", "auto"]
            assert all(item.status == "timed" and item.milliseconds > 0 for item in items)
            assert [item.error is None for item in items] == [True, False, False]
            assert all(item.error < 1e-4 for item in items[1:])
    content = json.loads(json.dumps(report.as_json()))
    assert content["environment"]["torch"] == torch.__version__
    assert content["cases"][0]["grid_size"] == [3, 4]
    row = content["cases"][0]["passes"]["forward"][-1]
    assert row["timing"]["method"] == "clock"
    assert row["times_faster_than_best_softmax"] > 0
    assert row["over_floor"] > 0


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (lambda call: EAGER.run(call) * 1.01, "relative error .* of the output"),
        (lambda call: EAGER.run(call).detach() + 0 * call.v + 0 * call.local_weight.sum(), "gradient of qkv"),
        (lambda call: EAGER.run(call._replace(local_weight=call.local_weight.detach()))
            + 0 * call.local_weight.sum(), "gradient of local_weight"),
        (lambda call: EAGER.run(call) * math.nan, "not finite"),
    ],
    ids=["output", "gradient", "gradient of local_weight", "NaN"],
)  # fmt: skip
def test_a_wrong_contestant_is_not_timed(backends, run, complaint):
    backends(broken(run))
    report = attention.measure_attention(attention_settings(TINY))
    wrong = outcomes(report, "forward+backward")["broken"]
    assert (wrong.status, wrong.timing) == ("WRONG", None)
    with pytest.raises(WrongResultError, match=complaint):
        raise WrongResultError(wrong.note)
    assert outcomes(report, "forward+backward")["eager"].status == "timed"
    (forward, backward) = tables.attention_tables(report)
    assert "WRONG" in backward.rows[0]
    assert any(wrong.note in note for note in backward.notes)
    assert forward.title == "forward, ms"


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "out of memory", "CUDA out of memory."),
        (RuntimeError("No available kernel"), "not available", "RuntimeError: No available kernel"),
        (ValueError("needs CUDA tensors"), "not available", "needs CUDA tensors"),
        (KeyError(), "not available", "KeyError: KeyError"),
    ],
)
def test_a_failing_contestant_leaves_the_others_alone(backends, error, status, note):
    def run(call):
        raise error

    backends(broken(run))
    report = attention.measure_attention(attention_settings(TINY, passes=("forward",)))
    failed = outcomes(report)["broken"]
    assert (failed.status, failed.note) == (status, note)
    assert outcomes(report)["auto"].status == status
    assert outcomes(report)["eager"].status == "timed"
    (table,) = tables.attention_tables(report)
    assert table.rows[0][-1] == tables.NOTHING
    assert status in tables.as_markdown([table])


@pytest.mark.usefixtures("backends")
def test_inputs_that_do_not_fit_are_said_so(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(attention, "_input_sets", fail)
    report = attention.measure_attention(attention_settings(TINY, passes=("forward",)))
    assert {item.status for item in outcomes(report).values()} == {"out of memory"}


@pytest.mark.usefixtures("backends")
def test_single_image_and_host_overhead_have_tables():
    settings = attention_settings(TINY, passes=("forward",))
    report = attention.measure_attention(dataclasses.replace(settings, latency_case=SECOND))
    report.host_overhead = attention._measure_host_overheads(settings)
    assert list(report.host_overhead) == ["sdpa", "auto"]
    _, single, host = tables.attention_tables(report)
    assert single.title == "one image of 7 tokens, forward, ms of GPU time"
    assert [row[0] for row in host.rows] == ["softmax, SDPA", "InLine"]
    assert json.dumps(report.as_json())


@pytest.mark.slow
@pytest.mark.usefixtures("backends")
def test_compiled_plain_pytorch_takes_part_where_the_case_says_so():
    settings = attention_settings(dataclasses.replace(TINY, compiled=True), SECOND)
    report = attention.measure_attention(settings)
    assert outcomes(report, "forward+backward")[attention.COMPILED].status == "timed"
    assert attention.COMPILED not in {item.contestant for item in report.results[1].measurements["forward"]}


def test_fused_backends_take_part_as_they_appear(backends):
    backends(broken(EAGER.run))
    gpu = torch.device("cuda")
    names = ["sdpa-flash", "sdpa-cudnn", "eager", "eager-compiled", "broken", "auto"]
    assert attention.contestants_of(gpu) == names


def test_default_cases_of_a_gpu():
    cases = attention.default_cases(torch.device("cuda"))
    assert len(cases) == 20
    assert {case.tokens for case in cases if case.compiled} == {196, 784, 3136, 16384, 65536}
    assert {(case.channels, case.head_dim) for case in cases if case.compiled} == {(192, 32)}
    assert all(abs(case.elements / 25e6 - 1) < 0.05 or case.batch == 1 for case in cases)
    assert cases[0].batch == 664
    assert AttentionCase(7, 32, 32, 1).grid_size == (1, 7)


def test_settings_refuse_what_cannot_be():
    with pytest.raises(ValueError, match=r"divisible .* try a head dim of 4"):
        attention_settings(AttentionCase(16, 12, 8, 1))
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16"):
        AttentionSettings(CPU, torch.float64, (TINY,))
    with pytest.raises(ValueError, match="no InLine model 'resnet50'"):
        ModelCase("resnet50", 224, 1)


def test_best_softmax_ignores_what_was_not_timed():
    measurements = [
        Measurement("sdpa-flash", "timed", Timing(2.0, 2.0, 2.0, 3, "graph")),
        Measurement("sdpa-cudnn", "not available", note="no"),
        Measurement("auto", "timed", Timing(1.0, 1.0, 1.5, 3, "events")),
    ]
    result = CaseResult(TINY, 0.5, {"forward": measurements})
    assert result.best_softmax("forward") == 2.0
    assert result.best_softmax("forward+backward") is None
    assert result.milliseconds("forward", "sdpa-cudnn") is None
    assert results.notes_of(measurements)[0] == "sdpa-cudnn: not available: no"
    assert "could not be captured" in results.notes_of(measurements)[1]


def test_contestants_take_turns_and_medians_are_per_call():
    order = []
    works = {name: Work(lambda name=name: order.append(name), 2, CPU, "clock") for name in "ab"}
    timings = timing.interleaved_timings(works, seconds=0, at_least=3)
    assert order == ["a", "b"] * 3
    assert {item.runs for item in timings.values()} == {3}
    assert timing.interleaved_timings({}, seconds=1) == {}
    summary = timing._summary([5.0, 1.0, 2.0, 4.0, 3.0, 6.0, 7.0, 8.0, 9.0, 10.0, 100.0], "graph")
    assert (summary.milliseconds, summary.low, summary.high) == (6.0, 2.0, 10.0)


def test_results_replace_older_ones_whole(tmp_path):
    path = tmp_path / "made" / "results.json"
    for value in (1, 2):
        results.write_json(path, {"value": value})
    assert json.loads(path.read_text()) == {"value": 2}
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


def test_environment_takes_the_commit_from_outside_where_there_is_no_git(monkeypatch):
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "abc123")
    facts = environment.describe_environment()
    assert facts["commit"] == "abc123"
    assert set(facts) >= {"machine", "gpu", "driver", "torch", "triton", "cudnn", "commit", "date"}
    assert environment._first_line(["no-such-command"]) == environment.UNKNOWN


def model_settings(*cases, dtype=torch.float32):
    return ModelSettings(CPU, dtype, cases, seconds=0)


@pytest.fixture
def tiny_models(monkeypatch):
    """Two blocks, ten classes: what is tested is the benchmark."""
    real = models.create_model
    monkeypatch.setattr(models, "create_model", lambda name, **options: real(name, depth=2, **options))
    monkeypatch.setattr(models, "CLASSES", 10)


@pytest.mark.usefixtures("backends", "tiny_models")
def test_models_against_their_rivals_in_inference_and_training():
    cases = [
        ModelCase("inline_deit_tiny", 32, 2, "inference", ("timm", "plain", "softmax"), "eager"),
        ModelCase("inline_deit_tiny", 32, 2, "training", ("plain",), "eager"),
    ]
    settings = model_settings(*cases)
    lines, lengths = [], []

    def note(so_far, line):
        lines.append(line)
        lengths.append(len(so_far.results))

    report = models.measure_models(settings, note)
    assert lengths == [0, 0, 0, 0, 1, 1, 1, 2]
    assert len(lines) == models.count_steps(settings)
    inference, training = report.results
    assert [item.contestant for item in inference.measurements] == ["inline", "timm", "plain", "softmax"]
    assert [item.error is not None for item in inference.measurements] == [True, False, True, False]
    assert {item.status for result in report.results for item in result.measurements} == {"timed"}
    assert inference.speedup(inference.measurements[0]) == 1
    assert training.images_per_second(training.measurements[0]) > 0
    assert json.loads(json.dumps(report.as_json()))["cases"][0]["contestants"][1]["inline_times_faster"] > 0
    (table,) = tables.model_tables(report)
    assert len(table.rows) == 6


@pytest.mark.usefixtures("tiny_models")
def test_a_model_with_wrong_logits_is_not_timed(backends):
    backends(broken(lambda call: 3 * EAGER.run(call)))
    case = ModelCase("inline_deit_tiny", 32, 1, "inference", ("plain",), "eager")
    (result,) = models.measure_models(model_settings(case, dtype=torch.bfloat16)).results
    ours, plain = result.measurements
    assert (ours.status, ours.timing) == ("WRONG", None)
    assert "logits" in ours.note
    assert plain.status == "timed"
    assert result.speedup(plain) is None


@pytest.mark.usefixtures("backends")
def test_a_rival_that_does_not_exist_is_said_so(monkeypatch):
    monkeypatch.setattr(models, "create_model", lambda *_, **__: torch.nn.Identity())
    case = ModelCase("inline_pvt_tiny", 32, 1, "inference", ("timm",), "eager")
    (result,) = models.measure_models(model_settings(case)).results
    assert "timm has no model of the size of inline_pvt_tiny" in result.measurements[1].note


def test_every_timm_rival_exists():
    import timm

    from inline_attention import list_models

    assert set(models.TIMM_RIVALS) <= set(list_models("inline_*"))
    assert set(models.TIMM_RIVALS.values()) <= set(timm.list_models())


def test_batches_keep_the_pixels():
    gpu = torch.device("cuda")
    assert [models.constant_pixel_batch(size, gpu) for size in (224, 512, 1024, 2048)] == [256, 49, 12, 3]
    cases = models.default_cases(CPU, modes=models.MODES, executions=models.EXECUTIONS)
    assert [(case.mode, case.execution) for case in cases] == list(itertools.product(models.MODES, models.EXECUTIONS))


class TestPictures:
    @pytest.fixture
    def plots(self):
        pytest.importorskip("matplotlib")
        from inline_attention.benchmark import plots

        return plots

    facts = {"machine": "some machine", "gpu": "some GPU", "torch": "2.11", "date": "today"}  # noqa: RUF012

    def test_attention(self, plots, tmp_path):
        gpu = torch.device("cuda")
        settings = AttentionSettings(gpu, torch.bfloat16, attention.default_cases(gpu))
        report = attention.AttentionReport(self.facts, settings, 4e12)
        for case in settings.cases:
            items = [
                Measurement(name, "timed", Timing(index + 0.1, 1, 1, 3, "graph"))
                for index, name in enumerate(attention.contestants_of(gpu))
            ]
            items[0] = Measurement(items[0].contestant, "out of memory", note="no room")
            report.results.append(CaseResult(case, 0.05, dict.fromkeys(settings.passes, items)))
        plots.draw_attention(report, tmp_path / "attention.png")
        assert (tmp_path / "attention.png").stat().st_size > 10_000

    def test_models(self, plots, tmp_path):
        gpu = torch.device("cuda")
        cases = models.default_cases(gpu, modes=("inference",)) + models.default_cases(
            gpu, modes=("training",), quick=True
        )
        report = models.ModelReport(self.facts, ModelSettings(gpu, torch.bfloat16, cases))
        for case in cases:
            items = [
                Measurement(name, "timed", Timing(2.0, 1, 1, 3, "throughput")) for name in ("inline", *case.rivals)
            ]
            report.results.append(models.ModelResult(case, items))
        plots.draw_models(report, tmp_path / "models.png")
        assert (tmp_path / "models.png").stat().st_size > 10_000

    def test_one_point_per_image_size(self, plots, monkeypatch):
        lines = []
        monkeypatch.setattr(plots, "draw_line", lambda axes, style, points: lines.append(points))
        settings = ModelSettings(torch.device("cpu"), torch.float32, ())
        report = models.ModelReport(self.facts, settings)
        for size, batch in ((224, 1), (224, 16), (448, 1)):
            case = models.ModelCase("inline_deit_tiny", size, batch, execution="eager")
            timing_ = Timing(float(size * batch), 1, 1, 3, "throughput")
            report.results.append(models.ModelResult(case, [Measurement("inline", "timed", timing_)]))
        with plots.figures.new_figure(4, 4) as figure:
            plots._draw_speeds(figure.subplots(), report.results)
        speeds = [result.images_per_second(result.measurements[0]) for result in report.results]
        assert lines[0] == [(224, speeds[0]), (448, speeds[2])], "of the smallest batch"


@pytest.mark.gpu
def test_a_graph_is_captured_on_a_gpu_and_what_cannot_be_is_timed_by_events():
    gpu = torch.device("cuda")
    x = torch.ones(1 << 20, device=gpu)
    captured = timing.prepare_work([lambda: x + 1], gpu)
    uncapturable = timing.prepare_work([lambda: x.sum().item()], gpu)
    assert (captured.method, uncapturable.method) == ("graph", "events")
    timings = timing.interleaved_timings({"captured": captured, "uncapturable": uncapturable}, seconds=0.1)
    assert all(item.milliseconds > 0 for item in timings.values())
    assert torch.randn(3, device=gpu).isfinite().all()  # after a capture that failed there are no random numbers


def test_a_call_that_waits_for_the_gpu_is_known_before_it_is_captured(monkeypatch):
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def wait():
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    assert timing._waits_for_device(wait)
    assert not timing._waits_for_device(lambda: None)
    assert modes == [0, "error", 0, "error", 0]
