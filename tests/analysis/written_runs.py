"""Folders of runs as `inline train` leaves them, written without training."""

import json
from dataclasses import replace
from pathlib import Path

from inline_attention import create_model
from inline_attention.engine.config import TrainConfig, to_yaml
from inline_attention.models.checkpoints import save_weights
from inline_attention.recipes import get_recipe

CLASS_NAMES = tuple("0123456789")


def small_digits_config(name="inline_deit_tiny", **model) -> TrainConfig:
    """The recipe `digits` with a model that takes no time."""
    recipe = get_recipe("digits").config
    arguments = {"patch_size": 2, "embed_dim": 16, "num_heads": 2, "depth": 2, **model}
    return replace(recipe, model=replace(recipe.model, name=name, arguments=arguments))


def write_run(
    folder: Path,
    name="inline_deit_tiny",
    *,
    top1=(30.0, 60.0),
    class_names=CLASS_NAMES,
    weights=True,
    attention=None,
    classes=10,
):
    """A finished run on digits: settings, table of epochs and, unless told otherwise, weights.

    `attention` replaces that of a model of timm; with 0 classes there is no head.
    """
    config = small_digits_config(name)
    config = replace(config, model=replace(config.model, attention=attention))
    folder.mkdir(parents=True)
    (folder / "args.yaml").write_text(to_yaml(config), encoding="utf-8")
    rows = [f"{epoch},{2 / epoch},0.001,{1.9 / epoch},{value},{value}" for epoch, value in enumerate(top1, start=1)]
    summary = "\n".join(["epoch,train_loss,lr,val_loss,top1,top5", *rows]) + "\n"
    (folder / "summary.csv").write_text(summary, encoding="utf-8")
    if weights:
        arguments = config.model.model_arguments() | {"num_classes": classes}  # the digits have ten
        model = create_model(name, **arguments)
        if config.model.conversion is not None:
            config.model.conversion.apply(model)
        notes = {"model": name, "model_arguments": json.dumps(arguments), "crop_pct": "1.0"}
        notes["class_names"] = json.dumps(list(class_names))
        checkpoint = folder / "checkpoints" / "last"
        checkpoint.mkdir(parents=True)
        save_weights(model, checkpoint / "model.safetensors", metadata=notes)
    return folder
