"""InLine-CSWin-S at 224² on ImageNet-1K, 300 epochs: the paper reports 83.8 % top-1.

`inline train cswin_small --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import CSWIN_EMA, CSWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "cswin_small",
    "InLine-CSWin-S at 224² on ImageNet-1K",
    total_batch_size=1024,
    drop_path=0.4,
    schedule=CSWIN_SCHEDULE,
    ema=CSWIN_EMA,
)
