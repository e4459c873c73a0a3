"""InLine-CSWin-B at 224² on ImageNet-1K, 300 epochs: the paper reports 84.5 % top-1.

`inline train cswin_base --data-dir DIR`
"""

from __future__ import annotations

from inline_attention.recipes.imagenet import CSWIN_EMA, CSWIN_SCHEDULE, imagenet_recipe

RECIPE = imagenet_recipe(
    "cswin_base",
    "InLine-CSWin-B at 224² on ImageNet-1K",
    total_batch_size=512,
    drop_path=0.5,
    schedule=CSWIN_SCHEDULE,
    weight_decay=0.1,
    ema=CSWIN_EMA,
)
