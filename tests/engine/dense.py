"""Runs of detection and segmentation small enough for a CPU."""

from inline_attention.engine.config import with_overrides
from inline_attention.recipes import get_recipe

SMALL = [
    "model.arguments={embed_dim: 16, depths: [1, 1, 1, 1], num_heads: [1, 2, 2, 2], global_blocks: [1, 1, 1, 0]}",
    "optimizer.lr=1e-3",
    "training.batch_size=4",
    "training.epochs=2",
    "training.validation_interval=2",
    "schedule.warmup_updates=0",
    "logging.tensorboard=false",
]
DETECTION = ["detection.shorter_side=64", "detection.longest_side=96", "detection.smallest_anchor=8"]
OF_TASK = {
    "mask_rcnn": ("scenes_detection", [*DETECTION, "detection.width=16", "detection.sampled_boxes=16"]),
    "faster_rcnn": (
        "scenes_detection",
        [*DETECTION, "detection.width=16", "detection.head=faster_rcnn", "detection.sampled_boxes=16"],
    ),
    "retinanet": (
        "scenes_detection",
        [*DETECTION, "detection.width=16", "detection.head=retinanet", "detection.sampled_boxes=512"],
    ),
    "semantic_fpn": ("scenes_segmentation", ["segmentation.crop=64", "segmentation.width=16"]),
    "upernet": (
        "scenes_segmentation",
        [
            "segmentation.crop=64",
            "segmentation.width=16",
            "segmentation.head=upernet",
            "segmentation.inference=sliding",
        ],
    ),
}


def dense_config(head, data, output, *overrides):
    recipe, settings = OF_TASK[head]
    fixed = [f"data.dir={data}", "data.repair=true", f"run.output={output}"]
    return with_overrides(get_recipe(recipe).config, [*SMALL, *settings, *fixed, *overrides])
