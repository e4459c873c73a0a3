"""Configurations: strict reading with all errors at once, YAML there and back, overrides, flags, checks, arithmetic."""

import os
from dataclasses import fields, replace

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inline_attention.engine.config import (
    FLAGS,
    SETTINGS,
    ConfigError,
    ModelSection,
    TrainConfig,
    TrainingSection,
    check,
    from_mapping,
    from_yaml,
    read_config,
    resolve,
    to_mapping,
    to_yaml,
    with_overrides,
)


def problems_of(call, *arguments, **keywords):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    return {problem.path: problem.message for problem in caught.value.problems}


def usable(*overrides):
    """The defaults with a data folder, which need no more to be complete."""
    return with_overrides(TrainConfig(), ["data.dir=pictures", *overrides])


class TestSchema:
    def test_every_setting_is_documented(self):
        for setting in SETTINGS.values():
            assert len(setting.documentation) >= 10, setting.path
            assert setting.documentation.endswith("."), setting.path
        for section in fields(TrainConfig):
            assert type(getattr(TrainConfig(), section.name)).__doc__

    def test_defaults_are_valid(self):
        assert from_mapping(to_mapping(TrainConfig())) == TrainConfig()
        assert check(usable()) == []


class TestTypes:
    @pytest.mark.parametrize(
        ("path", "value", "expected"),
        [
            ("training.epochs", True, "expected a whole number ≥ 0, got true; give a number"),
            ("training.epochs", 1.0, "expected a whole number ≥ 0, got 1.0; write 1"),
            ("training.epochs", -1, "expected a whole number ≥ 0, got -1"),
            ("training.epochs", None, "expected a whole number ≥ 0, got null"),
            ("optimizer.lr", "1e-3", 'expected a number ≥ 0, got the text "1e-3"; write 1e-3 without quotes'),
            ("optimizer.lr", float("nan"), "expected a number ≥ 0, got NaN"),
            ("optimizer.lr", float("inf"), "expected a number ≥ 0, got Infinity"),
            ("optimizer.betas", [0.9], "expected [2 numbers ≥ 0 and < 1] or null, got [0.9]"),
            ("optimizer.betas", [0.9, 1.5], "expected [2 numbers ≥ 0 and < 1] or null, got [0.9, 1.5]"),
            ("optimizer.name", 3, 'expected text, got 3; in quotes, "3", it is text'),
            ("training.compile", 1, "expected true or false, got 1"),
            ("training.compile", "yes", 'expected true or false, got the text "yes"; write true without quotes'),
            ("training.amp", "bf61", 'expected bf16, fp16, auto or off, got the text "bf61"; did you mean bf16?'),
            ("training.amp", False, "expected bf16, fp16, auto or off, got false"),
            ("training.clip_grad", "none", 'expected a number > 0 or null, got the text "none"; write null without'),
            ("loss.smoothing", 1, "expected a number ≥ 0 and < 1, got 1"),
            ("model.img_size", [8, 8, 3], "expected a whole number ≥ 1, [2 whole numbers ≥ 1] or null, got [8, 8, 3]"),
            ("model.arguments", [1], "expected a mapping such as {depth: 4} of plain values, got [1]"),
            ("model.arguments", {"depth": {1: 2}}, "expected a mapping such as {depth: 4} of plain values"),
        ],
    )
    def test_a_bad_value_is_named_with_what_was_expected(self, path, value, expected):
        section, name = path.split(".")
        assert problems_of(from_mapping, {section: {name: value}})[path].startswith(expected)

    def test_whole_numbers_will_do_for_numbers(self):
        config = from_mapping({"optimizer": {"lr": 1, "betas": [0, 0]}})
        assert (type(config.optimizer.lr), config.optimizer.betas) == (float, (0.0, 0.0))

    @pytest.mark.parametrize(("value", "kept"), [(32, 32), ([32, 48], (32, 48)), (None, None)])
    def test_a_size_is_a_number_or_two_or_the_model_s_own(self, value, kept):
        assert from_mapping({"model": {"img_size": value}}).model.img_size == kept


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("content", "path", "hint"),
        [
            ({"optimzer": {}}, "optimzer", "did you mean optimizer?"),
            ({"optimizer": {"weight_decy": 1}}, "optimizer.weight_decy", "did you mean optimizer.weight_decay?"),
            ({"batch_size": 1}, "batch_size", "did you mean training.batch_size?"),
            ({"training": {"lr": 1}}, "training.lr", "did you mean optimizer.lr?"),
            ({"augmentation": {"aa": 1}}, "augmentation.aa", "did you mean augmentation.auto_augment?"),
            ({"ema": {"model-ema-decay": 1}}, "ema.model-ema-decay", "did you mean ema.decay?"),
            ({"loss": {"zzz": 1}}, "loss.zzz", "loss has smoothing"),
            ({"zzz": 1}, "zzz", "there are run, task, model, data"),
            ({3: 1}, "3", "there is no such section"),
            ({"loss": 3}, "loss", "expected a section with smoothing, got 3"),
        ],
    )
    def test_the_nearest_is_suggested(self, content, path, hint):
        assert hint in problems_of(from_mapping, content)[path]

    def test_all_problems_are_reported_at_once(self):
        content = {"optimizer": {"lr": "x", "lrr": 1}, "training": {"epochs": -1}, "nonsense": 1}
        with pytest.raises(ConfigError, match=r"4 problems in run\.yaml") as caught:
            from_mapping(content, source="run.yaml")
        assert [problem.path for problem in caught.value.problems] == [
            "optimizer.lr",
            "optimizer.lrr",
            "training.epochs",
            "nonsense",
        ]


class TestYaml:
    def test_the_defaults_come_back_the_same(self):
        assert from_yaml(to_yaml(TrainConfig(), header="a\n\nb")) == TrainConfig()

    @settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50, deadline=None)
    @given(
        name=st.text(),
        learning_rate=st.floats(0, 1e3),
        size=st.none() | st.integers(1, 9999) | st.tuples(st.integers(1, 99), st.integers(1, 99)),
        arguments=st.dictionaries(
            st.text(),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
                max_leaves=5,
            ),
            max_size=3,
        ),
    )
    def test_anything_comes_back_the_same(self, name, learning_rate, size, arguments):
        base = TrainConfig()
        config = replace(
            base,
            model=ModelSection(name=name, img_size=size, arguments=arguments),
            optimizer=replace(base.optimizer, lr=learning_rate),
        )
        text = to_yaml(config)
        assert from_yaml(text) == config
        plain = yaml.safe_load(text)  # what another program reads
        assert (plain["model"]["name"], plain["optimizer"]["lr"]) == (name, learning_rate)

    def test_each_setting_stands_below_its_documentation(self):
        lines = to_yaml(TrainConfig()).splitlines()
        for path, setting in SETTINGS.items():
            name = path.partition(".")[2]
            first_words = setting.documentation[:20]
            above = [lines[at - 1] for at, line in enumerate(lines) if line.startswith(f"  {name}: ")]
            assert above, path
            assert any(first_words in line for line in lines), path
            assert all(line.startswith("  # ") for line in above), path

    def test_values_are_read_as_yaml_1_2_has_them(self):
        config = from_yaml("training: {amp: off, seed: 010}\noptimizer: {lr: 1e-3, weight_decay: .5}\n")
        assert (config.training.amp, config.training.seed) == ("off", 10)
        assert (config.optimizer.lr, config.optimizer.weight_decay) == (1e-3, 0.5)

    def test_what_is_missing_comes_from_the_base(self):
        base = with_overrides(TrainConfig(), ["training.epochs=7", "optimizer.lr=1"])
        config = from_yaml("training: {seed: 3}", base=base)
        assert (config.training.epochs, config.training.seed, config.optimizer.lr) == (7, 3, 1.0)
        assert from_yaml("", base=base) == base

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a: [", "it is not valid YAML: expected the node content, but found '<stream end>', line 1"),
            ("loss: {}\nloss: {}", "'loss' stands here twice, line 2"),
            ("loss: {smoothing: 0,\n smoothing: 1}", "'smoothing' stands here twice, line 2"),
            ("a: &x [*x]", "aliases (*name) are not supported, line 1"),
            ("[a]: 1", "it is not valid YAML"),
            ("a: !!python/object/apply:os.system [echo]", "it is not valid YAML"),
            ("- 1", "expected sections (run, task"),
            ("text", "expected sections (run, task"),
            ("a: \x00", "it is not valid YAML"),
        ],
    )
    def test_what_is_no_configuration_is_refused_with_its_place(self, text, message):
        assert message in problems_of(from_yaml, text)[""]

    def test_files(self, tmp_path):
        file = tmp_path / "args.yaml"
        file.write_text(to_yaml(TrainConfig()), encoding="utf-8")
        assert read_config(file) == TrainConfig()
        file.write_bytes(b"\xff\xfe")
        for path, reason in (
            (file, "UTF-8"),
            (tmp_path / "missing.yaml", "No such file"),
            (tmp_path, "not a regular file"),
        ):
            with pytest.raises(ConfigError, match=reason) as caught:
                read_config(path)
            assert str(path) in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("model:\n  arguments: " + "[" * 5000 + "]" * 5000, "nested more than 50 deep"),
            ("training:\n  epochs: " + "9" * 10_000, "cannot be read"),
            ("training:\n  epochs: " + "9" * 400, "expected a whole number"),
            ("optimizer:\n  lr: " + "9" * 400, "expected a number"),
            ("a: " + "x" * 2_000_000, "more than"),
            ("a: &x 1\nb: *x", "aliases"),
        ],
        ids=["deep", "digits", "large", "large float", "long", "alias"],
    )
    def test_hostile_text_is_refused_in_a_sentence(self, tmp_path, text, message):
        file = tmp_path / "args.yaml"
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_config(file)

    def test_a_pipe_in_the_place_of_a_file_is_refused(self, tmp_path):
        os.mkfifo(tmp_path / "args.yaml")
        with pytest.raises(ConfigError, match="not a regular file"):
            read_config(tmp_path / "args.yaml")


class TestOverrides:
    def test_values_are_taken_by_the_type_of_the_setting(self):
        config = with_overrides(
            TrainConfig(),
            [
                "optimizer.lr=1e-3",
                "augmentation.mixup=0",
                "augmentation.auto_augment=null",
                "training.amp=off",
                "optimizer.betas=[0.8, 0.9]",
                "run.experiment=123",
                "run.output=C: {odd} = name",
                "model.arguments.depth=4",
                "model.arguments.depths=[1, 2]",
            ],
        )
        assert (config.optimizer.lr, config.optimizer.betas) == (1e-3, (0.8, 0.9))
        assert (config.augmentation.mixup, config.augmentation.auto_augment) == (0.0, None)
        assert (config.training.amp, config.run.experiment, config.run.output) == ("off", "123", "C: {odd} = name")
        assert config.model.arguments == {"depth": 4, "depths": (1, 2)}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("photos #2", "photos #2"),
            ("  a b\t", "  a b\t"),
            ("~", "~"),
            ("a: b", "a: b"),
            ("[1, 2]", "[1, 2]"),
            ("first\nsecond", "first\nsecond"),
            ("it's", "it's"),
            ('"a" and "b"', '"a" and "b"'),
            ("&anchor", "&anchor"),
            ("null", None),
            ('"null"', "null"),
            ("'a # b'", "a # b"),
            ("'it''s'", "it's"),
            ('"tab\\t"', "tab\t"),
            ("'", "'"),
            ('"', '"'),
        ],
    )
    def test_text_is_taken_as_it_is_but_for_quotes_around_it(self, text, expected):
        assert with_overrides(TrainConfig(), [f"data.dir={text}"]).data.dir == expected

    def test_null_is_text_where_nothing_is_no_value(self):
        assert with_overrides(TrainConfig(), ["run.output=null"]).run.output == "null"

    def test_one_of_several_words_is_text_too(self):
        assert "training.amp" in problems_of(with_overrides, TrainConfig(), ["training.amp=off # not now"])

    @pytest.mark.parametrize("text", ["[" * 5000 + "]" * 5000, "9" * 10_000, "{a: " * 60 + "}" * 60])
    def test_deep_and_endless_values_are_refused(self, text):
        assert "model.arguments" in problems_of(with_overrides, TrainConfig(), [f"model.arguments={text}"])

    def test_the_last_one_wins_and_the_original_is_untouched(self):
        base = with_overrides(TrainConfig(), ["model.arguments={depth: 3, patch_size: 2}"])
        config = with_overrides(base, ["training.seed=1", "training.seed=2", "model.arguments.depth=5"])
        assert config.training.seed == 2
        assert config.model.arguments == {"depth": 5, "patch_size": 2}
        assert base.model.arguments == {"depth": 3, "patch_size": 2}
        assert with_overrides(base, ["model.arguments={}"]).model.arguments == {}

    def test_all_problems_are_reported_at_once(self):
        overrides = ["nothing", "optimizer.lr=abc", "lr=3", "model.arguments.depth=[", "loss=1", "optimizer.lr.x=1"]
        problems = problems_of(with_overrides, TrainConfig(), overrides)
        assert set(problems) == {"", "optimizer.lr", "lr", "model.arguments.depth", "loss", "optimizer.lr.x"}
        assert "expected key=value, such as optimizer.lr=1e-3, got 'nothing'" in problems[""]
        assert "did you mean optimizer.lr?" in problems["lr"]

    def test_a_section_given_as_a_value_does_not_hide_the_rest(self):
        assert "schedule" in problems_of(with_overrides, TrainConfig(), ["schedule=cosine", "schedule.min_lr=0"])


class TestFlags:
    # Values by type, for flags of one value; the rest are below.
    SAMPLES = ("0.5", "1", "pixel", "batch", "top1", "cosine", "bf16", "reduce-overhead")

    def test_names_are_unique(self):
        names = [name for flag in FLAGS for name in flag.names]
        assert len(set(names)) == len(names)

    @pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.names[0])
    def test_each_sets_what_it_names(self, flag):
        for sample in self.SAMPLES:
            try:
                config = with_overrides(TrainConfig(), flag.overrides(*[sample] * flag.num_values))
            except ConfigError:
                continue
            section, name = flag.setting.path.split(".")
            assert getattr(getattr(config, section), name) is not None
            return
        pytest.fail(f"{flag.names[0]} takes none of {self.SAMPLES}")

    def test_what_users_of_timm_type(self):
        expected = (
            "-b --batch-size --lr --opt --weight-decay --sched --epochs --warmup-epochs --model-ema --model-ema-decay "
            "--clip-grad --mixup --cutmix --smoothing --aa --reprob --drop-path --amp --torchcompile --compile "
            "--torchcompile-mode "
            "--grad-accum-steps --grad-accum --workers --seed --resume --initial-checkpoint --experiment --output "
            "--data-dir --dataset --num-classes --img-size --input-size --class-map --log-wandb --model"
        )
        assert set(expected.split()) <= {name for flag in FLAGS for name in flag.names}

    @pytest.mark.parametrize(
        "text",
        ["photos #2", "~", " a ", "'quoted'", '"quoted"', "a\nb", "{0}", "a\\nb", "\udcff", "😀", "a: [", "'", ""],
    )
    @pytest.mark.parametrize(
        ("name", "setting"), [("--data-dir", "data.dir"), ("--output", "run.output"), ("--model", "model.name")]
    )
    def test_text_is_taken_as_it_is(self, name, setting, text):
        config = with_overrides(TrainConfig(), self.flag(name).overrides(text))
        section, field = setting.split(".")
        assert getattr(getattr(config, section), field) == text

    def test_null_turns_optional_text_off(self):
        assert with_overrides(TrainConfig(), self.flag("--aa").overrides("null")).augmentation.auto_augment is None

    def flag(self, name):
        return next(flag for flag in FLAGS if name in flag.names)

    def test_a_learning_rate_of_timm_is_not_scaled(self):
        config = with_overrides(TrainConfig(), self.flag("--lr").overrides("0.001"))
        assert resolve(config).lr == 0.001

    def test_accumulation_of_timm_decides_the_total_batch(self):
        base = with_overrides(TrainConfig(), ["training.total_batch_size=4096", "training.batch_size=64"])
        assert resolve(base).grad_accum_steps == 64
        resolved = resolve(with_overrides(base, self.flag("--grad-accum").overrides(2)))
        assert (resolved.grad_accum_steps, resolved.total_batch_size) == (2, 128)

    def test_an_input_size_is_channels_and_size(self):
        config = with_overrides(TrainConfig(), self.flag("--input-size").overrides(1, 28, 32))
        assert (config.model.in_chans, config.model.img_size) == (1, (28, 32))

    def test_a_wrong_number_of_values_is_refused(self):
        with pytest.raises(ValueError, match="--lr takes 1 values, got 2"):
            self.flag("--lr").overrides(1, 2)


class TestResolve:
    @pytest.mark.parametrize(
        ("batch", "total", "devices", "expected"),
        [
            (512, 4096, 8, (512, 1)),
            (512, 4096, 1, (512, 8)),
            (512, 4096, 64, (64, 1)),
            (100, 4096, 4, (64, 16)),
            (128, 64, 2, (32, 1)),
            (6, 18, 1, (6, 3)),
        ],
    )
    def test_devices_share_the_total_batch(self, batch, total, devices, expected):
        resolved = resolve(TrainConfig(training=TrainingSection(batch_size=batch, total_batch_size=total)), devices)
        assert (resolved.batch_size, resolved.grad_accum_steps) == expected
        assert resolved.total_batch_size == total

    def test_without_a_total_batches_add_up(self):
        resolved = resolve(TrainConfig(training=TrainingSection(batch_size=32, grad_accum_steps=3)), 4)
        assert (resolved.batch_size, resolved.grad_accum_steps, resolved.total_batch_size) == (32, 3, 384)

    @pytest.mark.parametrize(
        ("batch", "total", "steps", "devices", "advice"),
        [
            (64, 1024, None, 3, "try 960"),  # 3 devices cannot share it
            (128, 509, None, 1, "try 512"),  # a prime: one image at a time
            (64, 8, None, 16, "try 1024"),
            (64, 1024, 2, 1, "set one to null: --set training.total_batch_size=null"),
        ],
    )
    def test_what_cannot_be_shared_is_refused(self, batch, total, steps, devices, advice):
        training = TrainingSection(batch_size=batch, total_batch_size=total, grad_accum_steps=steps)
        message = problems_of(resolve, TrainConfig(training=training), devices)["training.total_batch_size"]
        assert str(total) in message
        assert advice in message
        assert any(
            p.path == "training.total_batch_size" for p in check(TrainConfig(training=training), world_size=devices)
        )

    def test_rates_scale_with_the_total_batch_and_the_average_too(self):
        config = with_overrides(
            TrainConfig(), ["training.total_batch_size=1024", "training.batch_size=256", "ema.enabled=true"]
        )
        resolved = resolve(config, 2)
        assert (resolved.lr, resolved.min_lr, resolved.warmup_lr) == pytest.approx((1e-3, 1e-5, 1e-6))
        assert resolved.ema_decay == pytest.approx(0.9996**0.25)
        text = "\n".join(resolved.describe())
        assert "256 images × 2 devices × 2 accumulated = 1024 per update" in text
        assert "0.001 (0.0005 × 1024/512), cosine down to 1e-05" in text
        assert "decay 0.9999 (0.9996 ^ (1024/4096))" in text

    def test_a_warm_up_longer_than_the_run_is_reported(self):
        text = "\n".join(resolve(with_overrides(TrainConfig(), ["training.epochs=1"])).describe())
        assert "20 of warm-up from 1.25e-07, longer than the run" in text

    def test_without_epochs_there_is_no_cool_down(self):
        overrides = ["schedule.cooldown_epochs=10", "training.epochs=0"]
        assert resolve(with_overrides(TrainConfig(), overrides)).total_epochs(1) == 0
        assert resolve(with_overrides(TrainConfig(), overrides[:1])).total_epochs(1) == 310


class TestCheck:
    @pytest.mark.parametrize(
        ("override", "path", "hint"),
        [
            ("model.name=inline_deit_tinny", "model.name", "did you mean inline_deit_tiny"),
            ("model.arguments.foo=1", "model.arguments", "'foo'"),
            ("model.arguments.num_heads=5", "model.arguments", "num_heads=5"),
            ("model.arguments.img_size=32", "model.arguments.img_size", "set model.img_size=32"),
            ("model.img_size=8", "model.img_size", "at least 16 pixels"),
            ("model.require_checkpoint=true", "model.initial_checkpoint", "--initial-checkpoint FILE"),
            ("optimizer.name=adamv", "optimizer.name", "did you mean adam?"),
            ("optimizer.name=zzzzz", "optimizer.name", "adamw, lamb, lion and sgd"),
            ("augmentation.auto_augment=rnd-m9", "augmentation.auto_augment", "such as rand-m9-mstd0.5-inc1"),
            ("augmentation.scale=[1, 0.5]", "augmentation.scale", "the smaller number first"),
            ("training.batch_size=3", "training.batch_size", "try 4"),
            ("data.dataset=imagenet", "data.dataset", "--dataset folder --data-dir DIR"),
            ("data.dataset=digit", "data.dataset", "did you mean digits?"),
            ("data.dir=null", "data.dir", "--data-dir DIR"),
            ("data.in_memory=true", "augmentation.crop", "expected padded with data.in_memory"),
            ("model.in_chans=1", "model.in_chans", "read in color"),
            ("training.compile_mode=max-autotune", "training.compile_mode", "set training.compile=true"),
        ],
    )
    def test_what_does_not_fit_is_named(self, override, path, hint):
        found = {problem.path: problem.message for problem in check(usable(override))}
        assert hint in found[path]

    @pytest.mark.parametrize(
        ("device", "world_size", "overrides", "mode", "reason"),
        [
            ("cuda", 1, [], "reduce-overhead", "CUDA graphs"),
            ("cuda", 1, ["training.grad_accum_steps=2"], "default", "gradient accumulation"),
            ("cuda", 2, [], "default", "one process"),
            ("cpu", 1, [], "default", "needs a CUDA device"),
            ("cpu", 1, ["training.compile_mode=max-autotune"], "max-autotune", "as given"),
        ],
    )
    def test_the_mode_of_compilation_is_the_fastest_that_fits(self, device, world_size, overrides, mode, reason):
        resolved = resolve(usable("training.compile=true", *overrides), world_size)
        found, why = resolved.compile_mode(torch.device(device))
        assert found == mode
        assert reason in why
        assert f"torch.compile: mode {mode} ({why})" in resolved.describe(torch.device(device))
        assert not any("torch.compile" in line for line in resolve(usable()).describe(torch.device(device)))

    def test_cuda_graphs_and_accumulated_gradients_exclude_each_other(self):
        compiled = ["training.compile=true", "training.compile_mode=reduce-overhead"]
        assert check(usable(*compiled)) == []
        (problem,) = check(usable(*compiled, "training.grad_accum_steps=2"))
        assert (problem.path, "grad_accum_steps=1" in problem.message) == ("training.compile_mode", True)

    @pytest.mark.parametrize(
        "overrides",
        [
            ["optimizer.name=sgd"],
            ["optimizer.name=lion"],
            ["optimizer.layer_decay=0.7"],
            ["training.epochs=0"],
            ["training.batch_size=3", "augmentation.mixup=0", "augmentation.cutmix=0"],
            ["augmentation.auto_augment=augmix-m5-w4-d2"],
            ["augmentation.auto_augment=original-mstd0.5"],
            ["data.dir=null", "data.dataset=hfds/timm/mini-imagenet"],
            ["model.name=vit_tiny_patch16_224"],
            ["model.img_size=[32, 48]"],
        ],
        ids=" ".join,
    )
    def test_what_fits_passes(self, overrides):
        assert check(usable(*overrides)) == []

    @pytest.mark.parametrize(
        ("override", "path", "hint"),
        [
            ("data.crop_pct=0.9", "data.crop_pct", "expected 1.0 with data.in_memory, got 0.9"),
            ("augmentation.scale=[0.5, 1]", "augmentation.scale", "has no effect with data.in_memory"),
            ("augmentation.ratio=[1, 1]", "augmentation.ratio", "has no effect with data.in_memory"),
            ("augmentation.auto_augment=original", "augmentation.auto_augment", "is not RandAugment"),
            ("augmentation.auto_augment=rand-tweights", "augmentation.auto_augment", "a set of its own"),
            ("data.in_memory=false", "augmentation.crop", "data.in_memory=true"),
        ],
    )
    def test_what_has_no_effect_in_memory_is_named(self, override, path, hint):
        in_memory = ["data.in_memory=true", "data.crop_pct=1.0", "augmentation.crop=padded"]
        everything = ["augmentation.vflip=0.1", "augmentation.hflip=0.2", "augmentation.recount=3"]
        assert check(usable(*in_memory, *everything)) == []
        (problem,) = check(usable(*in_memory, override))
        assert problem.path == path
        assert hint in problem.message

    def test_all_problems_are_reported_at_once(self):
        config = with_overrides(TrainConfig(), ["model.name=x", "optimizer.name=x", "augmentation.ratio=[2, 1]"])
        paths = {problem.path for problem in check(config)}
        assert paths == {"data.dir", "model.name", "optimizer.name", "augmentation.ratio"}

    def test_types_are_checked_where_python_made_the_settings(self):
        problems = check(TrainConfig(training=TrainingSection(epochs=True)))
        assert [str(problem) for problem in problems] == [
            "training.epochs: expected a whole number ≥ 0, got true; give a number"
        ]
