"""A model of InLine-DeiT-T's size on CIFAR-10 from scratch, 30 epochs of 32×32 pictures as 256 tokens.

`inline train cifar10 --data-dir DIR`

`--model softmax_deit_tiny` and `--model linear_deit_tiny` train its twins by the same recipe. CIFAR-10 is no experiment
of the paper: nothing is published to compare with. We measured 82.6 % (InLine), 76.1 % (softmax) and 75.1 % (linear),
means of three seeds. Thirty epochs are few: pictures are cropped, flipped and partly erased, and no more. For a hundred
and more do more to them, on the device as well: `--mixup 0.8 --cutmix 1.0 --aa rand-m9-mstd0.5-inc1`. On a GPU add
`--torchcompile-mode reduce-overhead`. `benchmarks/cifar10.py --long` is such a run: 93.1 %.
"""

from __future__ import annotations

from inline_attention.engine.config import (
    AugmentationSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

RECIPE = Recipe(
    "cifar10",
    "a model of InLine-DeiT-T's size on CIFAR-10",
    TrainConfig(
        model=ModelSection(
            name="inline_deit_tiny", arguments={"patch_size": 2}, num_classes=10, img_size=32, drop_path=0.1
        ),
        # On the device, since preparing 50,000 pictures an epoch would keep it waiting.
        data=DataSection(dataset="cifar10", in_memory=True, crop_pct=1.0),
        augmentation=AugmentationSection(
            crop="padded", crop_padding=4, auto_augment=None, color_jitter=0.0, reprob=0.25, mixup=0.0, cutmix=0.0
        ),
        optimizer=OptimizerSection(lr=1e-3, lr_base_size=512),
        schedule=ScheduleSection(warmup_epochs=4, warmup_lr=1e-6, min_lr=1e-5),
        training=TrainingSection(epochs=30, batch_size=512, total_batch_size=512, clip_grad=5.0),
    ),
    measured=82.6,
)
