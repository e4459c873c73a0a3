"""InLine-CSWin-B fine-tuned at 384² on ImageNet-1K from its weights of 224², 20 + 10 epochs: the paper reports 85.7 %.

`inline train cswin_base_384 --data-dir DIR --initial-checkpoint FILE`

The checkpoint is one of `inline train cswin_base`. There is no warm-up: the learning rate is a hundredth of what the
weights have seen.
"""

from __future__ import annotations

from dataclasses import replace

from inline_attention.recipes.imagenet import CSWIN_EMA, CSWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "cswin_base_384",
    "InLine-CSWin-B fine-tuned at 384² on ImageNet-1K",
    total_batch_size=512,
    drop_path=0.7,
    schedule=replace(CSWIN_SCHEDULE, warmup_epochs=0, min_lr=5e-7),
    epochs=20,
    lr=5e-6,
    weight_decay=1e-8,
    ema=CSWIN_EMA,
    from_checkpoint=True,
)
