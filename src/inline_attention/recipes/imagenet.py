"""The paper's models on ImageNet-1K (arXiv 2412.06590, appendix): `inline train NAME --data-dir DIR`.

AdamW with weight decay 0.05, learning rate 5e-4 per 512 images, a cosine schedule, RandAugment, erasing, mixup, CutMix
and label smoothing are the defaults of `TrainConfig`. Batches are the paper's on eight GPUs; on fewer, gradients are
accumulated.

The models at 384² are fine-tuned from the weights at 224²: `inline train NAME --data-dir DIR --initial-checkpoint FILE`
with a file of `inline train swin_base` or `inline train cswin_base`. The paper gives no figure for swin_base_384 and no
start of its warm-up; we take a thousandth of the learning rate, as at 224². cswin_base_384 has no warm-up: its learning
rate is a hundredth of that at 224².
"""

from __future__ import annotations

from typing import Any

from inline_attention.benchmark.model_size import PUBLISHED_TOP1
from inline_attention.recipes.recipe import Recipe

GPUS = 8
SCHEDULES: dict[str, dict[str, Any]] = {
    "deit": {"warmup_epochs": 20, "warmup_lr": 5e-7, "min_lr": 5e-6},
    "pvt": {"warmup_epochs": 5, "warmup_lr": 1e-6, "min_lr": 1e-5, "cooldown_epochs": 10},
    "swin": {"warmup_epochs": 20, "warmup_lr": 5e-7, "min_lr": 5e-6},
    "cswin": {"warmup_epochs": 20, "warmup_lr": 1e-6, "min_lr": 1e-5, "cooldown_epochs": 10},
}
TITLES = {"deit": "DeiT", "pvt": "PVT", "swin": "Swin", "cswin": "CSWin"}
# name: (image size, images per update, drop path, clip gradients, weight decay)
MODELS: dict[str, tuple[int, int, float, float | None, float]] = {
    "deit_tiny": (224, 4096, 0.1, 5.0, 0.05),
    "deit_small": (288, 1024, 0.1, 5.0, 0.05),
    "deit_base": (448, 512, 0.1, 5.0, 0.05),
    "pvt_tiny": (224, 1024, 0.1, None, 0.05),
    "pvt_small": (224, 1024, 0.1, None, 0.05),
    "pvt_medium": (224, 1024, 0.3, 1.0, 0.05),
    "pvt_large": (224, 512, 0.3, 1.0, 0.05),
    "swin_tiny": (224, 1024, 0.2, 5.0, 0.05),
    "swin_small": (224, 1024, 0.3, 5.0, 0.05),
    "swin_base": (224, 512, 0.5, 5.0, 0.05),
    "swin_base_384": (384, 512, 0.5, 5.0, 1e-8),
    "cswin_tiny": (224, 1024, 0.2, None, 0.05),
    "cswin_small": (224, 1024, 0.4, None, 0.05),
    "cswin_base": (224, 512, 0.5, None, 0.1),
    "cswin_base_384": (384, 512, 0.7, None, 1e-8),
}
# name: (epochs, learning rate per 512 images, changes to the schedule)
FINE_TUNING: dict[str, tuple[int, float, dict[str, Any]]] = {
    "swin_base_384": (30, 2e-5, {"warmup_epochs": 5, "warmup_lr": 2e-8, "min_lr": 2e-7}),
    "cswin_base_384": (20, 5e-6, {"warmup_epochs": 0, "min_lr": 5e-7}),
}


def _recipe(name: str) -> Recipe:
    size, batch, drop_path, clip_grad, weight_decay = MODELS[name]
    family, letter = name.split("_")[0], name.split("_")[1][0].upper()
    epochs, lr, changes = FINE_TUNING.get(name, (300, 5e-4, {}))
    how = "fine-tuned at" if name in FINE_TUNING else "at"
    return Recipe(
        name,
        f"InLine-{TITLES[family]}-{letter} {how} {size}² on ImageNet-1K",
        {
            "model": {"name": f"inline_{name}", "drop_path": drop_path, "require_checkpoint": name in FINE_TUNING},
            "data": {"workers": 8},
            "optimizer": {"lr": lr, "weight_decay": weight_decay},
            "schedule": SCHEDULES[family] | changes,
            "ema": {"enabled": family == "cswin"},
            "training": {
                "epochs": epochs,
                "batch_size": batch // GPUS,
                "total_batch_size": batch,
                "clip_grad": clip_grad,
            },
        },
        expected=PUBLISHED_TOP1.get(f"inline_{name}"),
        data="ImageNet-1K",
    )


RECIPES = tuple(map(_recipe, MODELS))
