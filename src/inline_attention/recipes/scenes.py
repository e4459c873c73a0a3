"""A small detector and a small segmenter on generated scenes, for a CPU: what `make demo-dense` trains.

    inline data scenes --output DIR --images 600 --size 128
    inline train scenes_segmentation --data-dir DIR --experiment pixels
    inline train scenes_detection --data-dir DIR \\
        --initial-checkpoint out/train/pixels/checkpoints/last/model.safetensors

Two minutes each on a core or two. The segmenter starts from random weights and learns to tell backgrounds, and objects
by their colours more than by their outlines. The detector starts from the segmenter's backbone, finds most objects and
names most of those rightly, with boxes that are none too tight; from random weights it finds fewer. Raise `--epochs`,
and the size of scenes, for more: outlines take longer to learn. `--model softmax_swin_tiny` and `--model
linear_swin_tiny` train their twins by the same recipes. Scenes are no experiment of the paper: nothing is published to
compare with.
"""

from __future__ import annotations

from typing import Any

from inline_attention.engine.config import (
    CheckpointsSection,
    DataSection,
    DetectionSection,
    LoggingSection,
    ModelSection,
    OptimizerSection,
    ScheduleSection,
    SegmentationSection,
    TaskSection,
    TrainConfig,
    TrainingSection,
)
from inline_attention.recipes.recipe import Recipe

BACKBONE = ModelSection(
    name="inline_swin_tiny",
    arguments={"embed_dim": 32, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "global_blocks": (1, 1, 2, 0)},
    drop_path=0.0,
)
SHARED: dict[str, Any] = {
    "model": BACKBONE,
    "optimizer": OptimizerSection(lr=2e-3, lr_base_size=None),
    "schedule": ScheduleSection(warmup_updates=50, warmup_lr=1e-5, min_lr=1e-5),
    "checkpoints": CheckpointsSection(keep_last=1),
    "logging": LoggingSection(interval=20),
}

DETECTION = Recipe(
    "scenes_detection",
    "a small Mask R-CNN on generated scenes, within minutes on a CPU",
    TrainConfig(
        task=TaskSection(name="detection"),
        data=DataSection(dataset="coco", workers=0),
        detection=DetectionSection(width=32, sampled_boxes=32, shorter_side=96, longest_side=128, smallest_anchor=12),
        training=TrainingSection(epochs=4, batch_size=8, amp="off", clip_grad=5.0, validation_interval=4),
        **SHARED,
    ),
)
SEGMENTATION = Recipe(
    "scenes_segmentation",
    "a small Semantic FPN on generated scenes, within minutes on a CPU",
    TrainConfig(
        task=TaskSection(name="segmentation"),
        data=DataSection(dataset="pairs", reduce_zero_label=True, workers=0),
        segmentation=SegmentationSection(width=64, crop=96, scale=(0.8, 1.25)),
        training=TrainingSection(epochs=8, batch_size=8, amp="off", clip_grad=5.0, validation_interval=8),
        **SHARED,
    ),
)
RECIPES = (DETECTION, SEGMENTATION)
