"""Recipes: the paper's numbers, complete and constructible, each with its command."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from timm.layers import DropPath
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from inline_attention.benchmark.model_size import PUBLISHED_TOP1
from inline_attention.engine.config import (
    FLAGS,
    check,
    from_yaml,
    optimizer_arguments,
    resolve,
    schedule_arguments,
    with_overrides,
)
from inline_attention.engine.config.checks import _check_batches
from inline_attention.models import create_model, list_models
from inline_attention.recipes import UnknownRecipeError, get_recipe, imagenet, list_recipes, small

RECIPES = {recipe.name: recipe for recipe in list_recipes() if recipe.config.task.name == "classification"}
PAPER = [name.removeprefix("inline_") for name in list_models("inline_*") if not name.endswith("_micro")]
SMALL = [recipe.name for recipe in (*small.CLASSIFICATION, *small.SCENES)]
LINEARIZE = [recipe.name for recipe in small.LINEARIZATION]
UPDATES_PER_EPOCH = 10
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

# DESIGN.md §5, written out: total batch, epochs, cool-down; warm-up epochs, and rates as they are at that batch.
# name: (batch, epochs, cooldown, warmup, lr, min_lr, warmup_lr, weight_decay, clip, drop_path, ema_decay)
PUBLISHED_NUMBERS = {
    "deit_tiny": (4096, 300, 0, 20, 4e-3, 4e-5, 4e-6, 0.05, 5.0, 0.1, None),
    "deit_small": (1024, 300, 0, 20, 1e-3, 1e-5, 1e-6, 0.05, 5.0, 0.1, None),
    "deit_base": (512, 300, 0, 20, 5e-4, 5e-6, 5e-7, 0.05, 5.0, 0.1, None),
    "pvt_tiny": (1024, 300, 10, 5, 1e-3, 2e-5, 2e-6, 0.05, None, 0.1, None),
    "pvt_small": (1024, 300, 10, 5, 1e-3, 2e-5, 2e-6, 0.05, None, 0.1, None),
    "pvt_medium": (1024, 300, 10, 5, 1e-3, 2e-5, 2e-6, 0.05, 1.0, 0.3, None),
    "pvt_large": (512, 300, 10, 5, 5e-4, 1e-5, 1e-6, 0.05, 1.0, 0.3, None),
    "swin_tiny": (1024, 300, 0, 20, 1e-3, 1e-5, 1e-6, 0.05, 5.0, 0.2, None),
    "swin_small": (1024, 300, 0, 20, 1e-3, 1e-5, 1e-6, 0.05, 5.0, 0.3, None),
    "swin_base": (512, 300, 0, 20, 5e-4, 5e-6, 5e-7, 0.05, 5.0, 0.5, None),
    "swin_base_384": (512, 30, 0, 5, 2e-5, 2e-7, 2e-8, 1e-8, 5.0, 0.5, None),
    "cswin_tiny": (1024, 300, 10, 20, 1e-3, 2e-5, 2e-6, 0.05, None, 0.2, 0.9996**0.25),
    "cswin_small": (1024, 300, 10, 20, 1e-3, 2e-5, 2e-6, 0.05, None, 0.4, 0.9996**0.25),
    "cswin_base": (512, 300, 10, 20, 5e-4, 1e-5, 1e-6, 0.1, None, 0.5, 0.9996**0.125),
    "cswin_base_384": (512, 20, 10, 0, 5e-6, 5e-7, 1e-6, 1e-8, None, 0.7, 0.9996**0.125),
}


def complete(recipe):
    """The settings with what the user is to supply."""
    return with_overrides(recipe.config, ["data.dir=pictures", "model.initial_checkpoint=weights.safetensors"])


def meta_model(config):
    with torch.device("meta"):
        return create_model(config.model.name, **config.model.model_arguments(num_classes=10))


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def recipe(request):
    return request.param


def test_every_published_model_has_a_recipe():
    assert len(PAPER) == 15
    assert set(RECIPES) == {*PAPER, "digits", "cifar10", "cifar10_micro", "finetune", *LINEARIZE}


@pytest.mark.parametrize("name", PAPER)
def test_the_paper_s_numbers(name):
    config = RECIPES[name].config
    for devices in (1, 8, 64):
        resolved = resolve(config, devices)
        rates = (resolved.lr, resolved.min_lr, resolved.warmup_lr)
        batch, epochs, cooldown, warmup, *expected_rates, decay, clip, drop_path, ema = PUBLISHED_NUMBERS[name]
        assert (resolved.total_batch_size, config.training.epochs) == (batch, epochs)
        assert (config.schedule.cooldown_epochs, config.schedule.warmup_epochs) == (cooldown, warmup)
        assert rates == pytest.approx(expected_rates)
        assert (config.optimizer.weight_decay, config.training.clip_grad) == (decay, clip)
        assert config.model.drop_path == drop_path
        assert resolved.ema_decay == (ema if ema is None else pytest.approx(ema, rel=1e-12))
    assert config.training.batch_size * 8 == batch
    assert (config.optimizer.name, config.optimizer.betas, config.optimizer.eps) == ("adamw", (0.9, 0.999), 1e-8)
    augmentation = config.augmentation
    assert (augmentation.auto_augment, augmentation.color_jitter) == ("rand-m9-mstd0.5-inc1", 0.4)
    assert (augmentation.reprob, augmentation.remode, augmentation.mixup, augmentation.cutmix) == (
        0.25,
        "pixel",
        0.8,
        1,
    )
    assert (config.loss.smoothing, config.schedule.name) == (0.1, "cosine")
    assert config.model.require_checkpoint == name.endswith("_384")
    assert RECIPES[name].expected == PUBLISHED_TOP1.get(f"inline_{name}")


@pytest.mark.parametrize("name", [recipe.name for recipe in list_recipes() if recipe.name not in (*SMALL, *LINEARIZE)])
def test_built_models_have_the_paper_s_stochastic_depth(name):
    config = get_recipe(name).config
    with torch.device("meta"):
        if config.task.name == "classification":
            model = create_model(config.model.name, **config.model.model_arguments())
        else:
            model = create_model(config.model.name, features_only=True, drop_path_rate=config.model.drop_path)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    assert max(rates) == pytest.approx(PUBLISHED_NUMBERS[config.model.name.removeprefix("inline_")][9])


def test_small_recipes_set_their_stochastic_depth():
    rates = {name: get_recipe(name).config.model.drop_path for name in SMALL}
    assert rates == {
        "digits": 0.0, "cifar10": 0.1, "cifar10_micro": 0.0, "finetune": 0.1,
        "scenes_detection": 0.0, "scenes_segmentation": 0.0,
    }  # fmt: skip


def test_settings_fit_together(recipe):
    config = complete(recipe)
    assert check(config, world_size=8) == []
    for devices in (1, 2):  # which decide batches, and nothing else
        assert not list(_check_batches(resolve(config, devices)))


def test_yaml_gives_the_settings_back(recipe):
    text = recipe.to_yaml()
    assert from_yaml(text) == recipe.config
    assert recipe.command in text
    if recipe.expected is not None:
        assert f"{recipe.expected:.1f} % top-1" in text


def test_the_module_states_command_and_figure(recipe):
    module = imagenet if recipe.name in PAPER else small
    generic = recipe.command.replace(recipe.name, "NAME") if recipe.name in PAPER else recipe.command
    described = module.__doc__.replace("\n", " ")
    assert generic in described or recipe.command in described
    if recipe.expected is not None:
        assert f"The paper reports {recipe.expected:.1f} % top-1" in recipe.to_yaml()
    if recipe.measured is not None:
        assert f"{recipe.measured:.1f} %" in described
        assert f"We measured {recipe.measured:.1f} % top-1" in recipe.to_yaml()


def test_what_we_measured_is_what_the_results_have():
    document = json.loads((RESULTS / "cifar10.json").read_text(encoding="utf-8"))
    assert document["overrides"] == []
    found = {result["attention"]: round(result["top1_mean"], 1) for result in document["results"]}
    assert RECIPES["cifar10"].measured == found["inline"]
    described = small.__doc__.replace("\n", " ")
    for attention, top1 in found.items():
        assert f"{top1:.1f} % ({attention.replace('inline', 'InLine')})" in described


def test_the_command_names_all_that_the_user_must_supply(recipe):
    words = shlex.split(recipe.command)
    assert words[:3] == ["inline", "train", recipe.name]
    by_name = {name: flag for flag in FLAGS for name in flag.names}
    given = [
        override
        for name, value in zip(words[3::2], words[4::2], strict=True)
        for override in by_name[name].overrides(value)
    ]
    assert check(with_overrides(recipe.config, given)) == []


def test_twins_train_by_the_same_recipe(recipe):
    for twin in ("softmax", "linear"):
        name = recipe.config.model.name.replace("inline", twin)
        assert check(with_overrides(complete(recipe), [f"model.name={name}"])) == []


def test_weight_decay_spares_what_the_paper_spares(recipe):
    config = complete(recipe)
    model = meta_model(config)
    optimizer = create_optimizer_v2(model, **optimizer_arguments(resolve(config)))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = parameter.ndim == 1 or name in ("cls_token", "pos_embed") or name.endswith("position_bias_table")
        assert decay[id(parameter)] == (0 if spared else config.optimizer.weight_decay), name
    decayed_positions = [name for name, p in model.named_parameters() if name.endswith(".positions") and decay[id(p)]]
    assert len(decayed_positions) == (4 if "pvt" in recipe.name else 0)


def test_the_learning_rate_follows_a_cosine_with_every_update(recipe):
    config = complete(recipe)
    resolved = resolve(config)
    optimizer = create_optimizer_v2(meta_model(config), **(optimizer_arguments(resolved) | {"layer_decay": None}))
    scheduler, updates = create_scheduler_v2(optimizer, **schedule_arguments(resolved, UPDATES_PER_EPOCH))
    assert updates == resolved.total_updates(UPDATES_PER_EPOCH)

    def rate_at(update):
        scheduler.step_update(update)
        (rate,) = {group["lr"] for group in optimizer.param_groups}
        return rate

    warmup = config.schedule.warmup_epochs * UPDATES_PER_EPOCH
    last = config.training.epochs * UPDATES_PER_EPOCH
    if warmup:
        assert rate_at(0) == pytest.approx(resolved.warmup_lr)
        assert rate_at(warmup // 2) == pytest.approx((resolved.lr + resolved.warmup_lr) / 2)
    for update in (warmup, warmup + 1, (warmup + last) // 2, last - 1):
        cosine = 0.5 * (1 + math.cos(math.pi * update / last))
        assert rate_at(update) == pytest.approx(resolved.min_lr + (resolved.lr - resolved.min_lr) * cosine)
    if config.schedule.cooldown_epochs:
        assert rate_at(last + 1) == pytest.approx(resolved.min_lr)


def test_the_small_ones_see_as_many_tokens_as_they_promise():
    for name, tokens in (("digits", 16), ("cifar10", 256)):
        config = RECIPES[name].config
        model = meta_model(config)
        _, height, width = config.model.input_size(model)
        assert height * width // config.model.arguments["patch_size"] ** 2 == tokens
        assert model.pos_embed.shape[1] == tokens + 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("inline_swin_tiny", "did you mean swin_tiny"),
        ("softmax_deit_tiny", "did you mean deit_tiny"),
        ("digit", "did you mean digits?"),
        ("zzz", "`inline recipes` lists them"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name, hint):
    with pytest.raises(UnknownRecipeError, match=hint):
        get_recipe(name)


def test_names_find_their_recipes(recipe):
    assert get_recipe(recipe.name) is recipe
