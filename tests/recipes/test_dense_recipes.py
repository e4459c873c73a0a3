"""Recipes of detection and segmentation: the paper's numbers, and learning rates as they follow from them."""

import pytest
import torch
from timm.scheduler import create_scheduler_v2

from inline_attention.engine.config import check, from_yaml, resolve, schedule_arguments, with_overrides
from inline_attention.engine.config.checks import _check_batches
from inline_attention.recipes import get_recipe, list_recipes

RECIPES = {recipe.name: recipe for recipe in list_recipes() if recipe.config.task.name != "classification"}
PVT, SWIN = ("tiny", "small", "medium", "large"), ("tiny", "small", "base")
BACKBONES = [*(f"inline_pvt_{size}" for size in PVT), *(f"inline_swin_{size}" for size in SWIN)]
UPDATES_PER_EPOCH = 7393  # of COCO


def rates(config, updates, updates_per_epoch=UPDATES_PER_EPOCH):
    """Learning rates before some updates."""
    resolved = resolve(config)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=resolved.lr)
    scheduler, _ = create_scheduler_v2(optimizer, **schedule_arguments(resolved, updates_per_epoch))
    found = []
    for update in updates:
        scheduler.step_update(update)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_every_combination_of_the_paper_is_there():
    expected = {"scenes_detection", "scenes_segmentation"}
    for backbone in BACKBONES:
        expected |= {f"mask_rcnn_{backbone}_1x", f"mask_rcnn_{backbone}_3x"}
        expected |= {f"faster_rcnn_{backbone}_1x", f"retinanet_{backbone}_1x"}
    expected |= {f"semantic_fpn_inline_pvt_{size}_80k" for size in PVT}
    expected |= {f"upernet_inline_swin_{size}_160k" for size in SWIN}
    assert set(RECIPES) == expected


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith(("_1x", "_3x"))])
def test_detectors_have_the_paper_s_numbers(name):
    config = RECIPES[name].config
    long = name.endswith("_3x")
    assert config.model.name in name
    assert config.detection.head in name
    assert (config.detection.shorter_side, config.detection.longest_side) == (800, 1333)
    assert config.detection.multi_scale_from == (480 if long else None)
    assert (config.training.epochs, config.optimizer.name) == (36 if long else 12, "adamw")
    for devices in (1, 8, 16):
        resolved = resolve(config, devices)
        assert (resolved.total_batch_size, resolved.lr) == (16, pytest.approx(1e-4))
    first, second = (27, 33) if long else (8, 11)
    steps = [0, 500, first * UPDATES_PER_EPOCH - 2, first * UPDATES_PER_EPOCH, second * UPDATES_PER_EPOCH]
    assert rates(config, steps) == pytest.approx([1e-7, 1e-4, 1e-4, 1e-5, 1e-6])


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("0k")])
def test_segmenters_have_the_paper_s_numbers(name):
    config = RECIPES[name].config
    resolved = resolve(config, 8)
    updates, lr, warmup, power = (80_000, 2e-4, 0, 0.9) if "pvt" in name else (160_000, 6e-5, 1500, 1.0)
    assert (config.segmentation.crop, config.data.reduce_zero_label) == (512, True)
    assert (resolved.total_batch_size, resolved.lr) == (16, pytest.approx(lr))
    assert (resolved.total_updates(1263), resolved.total_epochs(1263)) == (updates, -(-updates // 1263))
    halfway = lr * 0.5**power
    found = rates(config, [warmup // 2, updates // 2, updates - 1], 1263)
    assert found[0] == pytest.approx(lr if not warmup else lr / 2, rel=1e-3)
    assert found[1] == pytest.approx(halfway)
    assert 0 < found[2] < 1e-3 * lr


@pytest.mark.parametrize("name", [name for name in RECIPES if "tiny" in name or "scenes" in name])
def test_settings_fit_together_and_survive_yaml(name):
    recipe = RECIPES[name]
    assert get_recipe(name) is recipe
    config = with_overrides(recipe.config, ["data.dir=DIR"])
    assert check(config, world_size=8) == []
    assert not list(_check_batches(resolve(config)))  # devices decide batches, and nothing else
    assert from_yaml(recipe.to_yaml()) == recipe.config
    assert recipe.command == f"inline train {name} --data-dir DIR"
    twin = config.model.name.replace("inline", "softmax")
    assert check(with_overrides(config, [f"model.name={twin}"])) == []
