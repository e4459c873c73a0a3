"""Recipes that replace the softmax attention of a trained model by InLine: `inline linearize` uses them.

`inline train linearize_classifier --data-dir DIR --initial-checkpoint FILE`: the student learns from the logits and
tokens of the softmax model in FILE and from the labels. Choose another model than ViT-S with `--model`.
`inline train linearize_features --data-dir DIR --initial-checkpoint FILE` needs no labels: it matches tokens and
outputs on any folder of pictures.

Class and register tokens keep softmax: their queries are few, and InLine explains little of what a class token attends
to. Ten epochs are a thirtieth of what training a ViT on ImageNet takes. There is no warm-up, since the weights start
where the teacher's are. Augmentation is light, since teacher and student see the same view.
"""

from __future__ import annotations

from typing import Any

from inline_attention.recipes.recipe import Recipe

_LINEARIZE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "vit_small_patch16_224", "attention": "inline", "require_checkpoint": True, "drop_path": 0.0,
        "conversion_options": {"softmax_prefix": True},
    },
    "augmentation": {
        "scale": (0.35, 1.0), "auto_augment": None, "color_jitter": 0.2, "reprob": 0.0, "mixup": 0.0, "cutmix": 0.0
    },
    "optimizer": {"lr": 5e-4, "lr_base_size": None, "weight_decay": 0.02},
    "schedule": {"warmup_epochs": 0, "min_lr": 1e-6},
    "loss": {"smoothing": 0.0},
    "training": {"epochs": 10, "batch_size": 128, "clip_grad": 1.0},
}  # fmt: skip
LINEARIZE_CLASSIFIER = Recipe(
    "linearize_classifier",
    "softmax to InLine attention in a trained classifier",
    {**_LINEARIZE, "distillation": {"match": "logits"}},
)
LINEARIZE_FEATURES = Recipe(
    "linearize_features",
    "softmax to InLine attention in a trained backbone, without labels",
    {**_LINEARIZE, "data": {"dataset": "pictures"}, "distillation": {"match": "features"}},
)
RECIPES = (LINEARIZE_CLASSIFIER, LINEARIZE_FEATURES)
