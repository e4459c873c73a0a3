"""Recipes for one machine: digits, CIFAR-10, fine-tuning and linearization on your own images, generated scenes.

`inline train digits`: a tiny InLine-DeiT on scikit-learn's handwritten digits, which come with the package. Images of
8×8 pixels are 16 tokens. `--model softmax_deit_tiny` and `--model linear_deit_tiny` train its twins. The settings were
chosen by accuracy on the 360 validation images, for lack of others: the figure does not measure generalization.

`inline train cifar10 --data-dir DIR`: a model of InLine-DeiT-T's size on CIFAR-10 from scratch, 30 epochs, 256 tokens.
The paper has no such experiment. We measured 82.6 % (InLine), 76.1 % (softmax) and 75.1 % (linear), means of three
seeds. For longer runs add `--mixup 0.8 --cutmix 1.0 --aa rand-m9-mstd0.5-inc1`; on a GPU add `--torchcompile`.
`benchmarks/cifar10.py --long` is such a run: 93.1 %.

`inline train cifar10_micro --data-dir DIR`: the small model of the package, 90.7 %. It takes three minutes on a GPU
with `--torchcompile`, and some hours on a CPU (benchmarks/results/cifar10_micro.md).

`inline train finetune --data-dir DIR --initial-checkpoint FILE`: any checkpoint on a folder of your own images, one
subfolder per class. The model is the one that the file describes; for a file without a description it is InLine-DeiT-T,
or what `--model` names. `--drop-path` is its stochastic depth (`null` for models without it).

`inline train linearize_classifier --data-dir DIR --initial-checkpoint FILE` replaces the softmax attention of the model
in FILE by InLine: the student learns from its logits and tokens, and from the labels. Choose another model than ViT-S
with `--model`. `inline train linearize_features --data-dir DIR --initial-checkpoint FILE` needs no labels: it matches
tokens and outputs on any folder of pictures. `inline linearize` uses both. Class and register tokens keep softmax:
their queries are few, and InLine explains little of what a class token attends to. Ten epochs are a thirtieth of what
training a ViT on ImageNet takes. There is no warm-up, since the weights start where the teacher's are. Augmentation is
light, since teacher and student see the same view.

A small segmenter and a small detector on generated scenes, two minutes each on a CPU (`make demo-dense`):

    inline data scenes --output DIR --images 600 --size 128
    inline train scenes_segmentation --data-dir DIR --experiment pixels
    inline train scenes_detection --data-dir DIR \\
        --initial-checkpoint out/train/pixels/checkpoints/last/model.safetensors

The detector starts from the segmenter's backbone. Outlines take longer to learn than colors: raise `--epochs` and the
size of the scenes for tighter boxes. `--model softmax_swin_tiny` and `--model linear_swin_tiny` train the twins.
"""

from __future__ import annotations

from typing import Any

from inline_attention.recipes.recipe import Recipe

DIGITS = Recipe(
    "digits",
    "a tiny InLine-DeiT on handwritten digits, within a minute on a CPU",
    {
        "model": {
            "name": "inline_deit_tiny", "img_size": 8, "drop_path": 0.0,
            "arguments": {"patch_size": 2, "embed_dim": 64, "num_heads": 4, "depth": 3, "mlp_ratio": 2.0},
        },
        "data": {"dataset": "digits", "workers": 0, "in_memory": True, "crop_pct": 1.0},
        # Digits change their meaning when flipped or mixed.
        "augmentation": {
            "crop": "padded", "crop_padding": 1, "hflip": 0.0, "auto_augment": None, "color_jitter": 0.0,
            "reprob": 0.0, "mixup": 0.0, "cutmix": 0.0,
        },
        "optimizer": {"lr": 5e-3, "lr_base_size": None},
        "schedule": {"warmup_epochs": 4, "warmup_lr": 1e-5, "min_lr": 1e-5},
        "loss": {"smoothing": 0.0},
        "training": {"epochs": 60, "batch_size": 128, "total_batch_size": 128, "amp": "off", "clip_grad": 1.0},
        "logging": {"interval": 5},
    },
    data="in the package",
)  # fmt: skip
# On the device: preparing 50,000 images per epoch on the host would keep it waiting.
_CIFAR10_DATA = {"dataset": "cifar10", "in_memory": True, "crop_pct": 1.0}
_CIFAR10_AUGMENTATION = {
    "crop": "padded", "crop_padding": 4, "auto_augment": None, "color_jitter": 0.0, "reprob": 0.25, "mixup": 0.0
}  # fmt: skip
_CIFAR10_TRAINING = {"batch_size": 512, "total_batch_size": 512, "clip_grad": 5.0}
CIFAR10 = Recipe(
    "cifar10",
    "a model of InLine-DeiT-T's size on CIFAR-10",
    {
        "model": {"name": "inline_deit_tiny", "arguments": {"patch_size": 2}, "img_size": 32, "drop_path": 0.1},
        "data": _CIFAR10_DATA,
        "augmentation": {**_CIFAR10_AUGMENTATION, "cutmix": 0.0},
        "optimizer": {"lr": 1e-3},
        "schedule": {"warmup_epochs": 4, "warmup_lr": 1e-6, "min_lr": 1e-5},
        "training": {**_CIFAR10_TRAINING, "epochs": 30},
    },
    measured=82.6,
    data="CIFAR-10",
)
CIFAR10_MICRO = Recipe(
    "cifar10_micro",
    "the small model that comes with the package, on CIFAR-10",
    {
        "model": {"name": "inline_deit_micro", "img_size": 32, "drop_path": 0.0},
        "data": _CIFAR10_DATA,
        "augmentation": {**_CIFAR10_AUGMENTATION, "cutmix": 1.0, "mixup_prob": 0.8, "mixup_off_epoch": 45},
        "optimizer": {"name": "muon", "lr": 5e-3, "lr_base_size": None},
        "schedule": {"warmup_epochs": 1, "warmup_lr": 1e-4, "min_lr": 1e-5},
        "training": {**_CIFAR10_TRAINING, "epochs": 50, "validation_interval": 5},
    },
    measured=90.7,
    data="CIFAR-10",
)
FINETUNE = Recipe(
    "finetune",
    "any checkpoint on a folder of your own pictures",
    {
        "model": {"name": "inline_deit_tiny", "drop_path": 0.1, "require_checkpoint": True},
        "augmentation": {"mixup": 0.0, "cutmix": 0.0},
        "optimizer": {"layer_decay": 0.75},
        "schedule": {"warmup_epochs": 2, "warmup_lr": 5e-7, "min_lr": 5e-6},
        "training": {"epochs": 20, "batch_size": 64, "clip_grad": 5.0},
    },
)
_LINEARIZE: dict[str, dict[str, Any]] = {
    "model": {
        "name": "vit_small_patch16_224", "attention": "inline", "require_checkpoint": True, "drop_path": 0.0,
        "conversion_options": {"softmax_prefix": True},
    },
    "augmentation": {
        "scale": (0.7, 1.0), "auto_augment": None, "color_jitter": 0.0, "reprob": 0.0, "mixup": 0.0, "cutmix": 0.0
    },
    "optimizer": {"name": "muon", "lr": 2e-3, "lr_base_size": None, "weight_decay": 0.02},
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
_SCENES: dict[str, dict[str, Any]] = {
    "model": {
        "name": "inline_swin_tiny", "drop_path": 0.0,
        "arguments": {
            "embed_dim": 32, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "global_blocks": (1, 1, 2, 0)
        },
    },
    "optimizer": {"lr": 2e-3, "lr_base_size": None},
    "schedule": {"warmup_updates": 50, "warmup_lr": 1e-5, "min_lr": 1e-5},
    "checkpoints": {"keep_last": 1},
    "logging": {"interval": 20},
}  # fmt: skip
SCENES_DETECTION = Recipe(
    "scenes_detection",
    "a small Mask R-CNN on generated scenes, within minutes on a CPU",
    {
        **_SCENES,
        "task": {"name": "detection"},
        "data": {"dataset": "coco", "workers": 0},
        "detection": {
            "width": 32, "sampled_boxes": 32, "shorter_side": 96, "longest_side": 128, "smallest_anchor": 12
        },
        "training": {"epochs": 4, "batch_size": 8, "amp": "off", "clip_grad": 5.0, "validation_interval": 4},
    },
    data="generated scenes",
)  # fmt: skip
SCENES_SEGMENTATION = Recipe(
    "scenes_segmentation",
    "a small Semantic FPN on generated scenes, within minutes on a CPU",
    {
        **_SCENES,
        "task": {"name": "segmentation"},
        "data": {"dataset": "pairs", "reduce_zero_label": True, "workers": 0},
        "segmentation": {"width": 64, "crop": 96, "scale": (0.8, 1.25)},
        "training": {"epochs": 8, "batch_size": 8, "amp": "off", "clip_grad": 5.0, "validation_interval": 8},
    },
    data="generated scenes",
)
CLASSIFICATION = (DIGITS, CIFAR10, CIFAR10_MICRO, FINETUNE)
LINEARIZATION = (LINEARIZE_CLASSIFIER, LINEARIZE_FEATURES)
SCENES = (SCENES_DETECTION, SCENES_SEGMENTATION)
