"""Train the small model that comes with the package, and put it there: `inline_deit_micro.cifar10`.

    python benchmarks/shipped_model.py --data-dir DIR [--runs out/shipped] [--set training.epochs=50]

DIR contains cifar-10-binary.tar.gz, packed or unpacked, or a folder of pictures per class in `train` and `test`. The
recipe is `cifar10_micro`. A run that was stopped is resumed by the same command. The model is
installed to src/inline_attention/weights only if its accuracy on the 10,000 test images is at least 90 % and its file
has at most 8 MB. From then on `inline_deit_micro.cifar10` is a pretrained tag, and `inline predict` uses it by default.
Commit the folder, with its model card.
"""

from __future__ import annotations

import math
import shutil
from csv import DictReader
from pathlib import Path
from typing import Annotated

import typer

from inline_attention.benchmark.environment import describe_environment
from inline_attention.benchmark.results import write_json, write_markdown
from inline_attention.engine.config import with_overrides
from inline_attention.engine.evaluate import evaluate_checkpoint
from inline_attention.engine.train import train
from inline_attention.models.hub import ModelCard, save_pretrained
from inline_attention.models.reading import find_weights
from inline_attention.models.registry import SHIPPED
from inline_attention.recipes import get_recipe
from inline_attention.tasks.classification.prediction import ImageClassifier
from inline_attention.tasks.task import DataSection

RECIPE, NAME = "cifar10_micro", "inline_deit_micro.cifar10"
EXAMPLES = "examples"  # pictures, kept from the model before
LEAST_TOP1, MOST_BYTES = 90.0, 8_000_000
RESULTS = Path(__file__).parent / "results"


def install(weights: Path, top1: float, settings: dict[str, object], target: Path) -> None:
    """Write a trained model to a folder in the hub's layout, with its model card."""
    classifier = ImageClassifier.from_checkpoint(weights, device="cpu")
    card = ModelCard(
        license="apache-2.0",
        description="A small InLine-DeiT for 32×32 pictures, trained from scratch by this library's own engine. It "
        "knows the ten classes of CIFAR-10 and nothing else: a demonstration, not a product.",
        datasets=["uoft-cs/cifar10"],
        figures={"CIFAR-10 test images, top-1": f"{top1:.2f} %"},
        training=settings,
    )
    unfinished = target.with_name(f"{target.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    crop_pct = classifier.preparation["crop_pct"]
    save_pretrained(classifier.model, unfinished, class_names=classifier.class_names, crop_pct=crop_pct, card=card)
    size = (unfinished / "model.safetensors").stat().st_size
    if size > MOST_BYTES:
        raise typer.BadParameter(f"the weights have {size:,} bytes, at most {MOST_BYTES:,} are shipped")
    if (target / EXAMPLES).is_dir():
        shutil.copytree(target / EXAMPLES, unfinished / EXAMPLES)
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def main(
    data_dir: Annotated[Path, typer.Option(help="Folder of CIFAR-10.", exists=True, file_okay=False)],
    runs: Annotated[Path, typer.Option(help="Folder of the run. An existing one is resumed.")] = Path("out/shipped"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="Setting as key=value; repeatable.")] = None,
) -> None:
    overrides = [f"data.dir={data_dir}", f"run.output={runs}", f"run.experiment={RECIPE}", "run.resume=auto"]
    overrides += ["training.compile=true", *(set_ or [])]
    config = with_overrides(get_recipe(RECIPE).config, overrides)
    train(config)
    weights = find_weights(runs / RECIPE)
    metrics = evaluate_checkpoint(weights, DataSection("cifar10", str(data_dir)))
    top1 = math.nan if metrics is None else metrics.figures["top1"]
    if not top1 >= LEAST_TOP1:
        raise typer.BadParameter(f"{top1:.2f} % on the test images, expected {LEAST_TOP1:g} %; train longer")
    command = " ".join([f"inline train {RECIPE}", *(f"--set {override}" for override in set_ or [])])
    environment = describe_environment()
    settings: dict[str, object] = {
        "recipe": f"`{command}`",
        "epochs": config.training.epochs,
        "seed": config.training.seed,
    }
    install(weights, top1, settings | environment, SHIPPED / NAME)
    with (runs / RECIPE / "summary.csv").open(encoding="utf-8") as file:
        epochs = [{name: row[name] for name in ("epoch", "train_loss", "val_loss", "top1")} for row in DictReader(file)]
    content = {"environment": environment, "command": command, "top1": top1, "epochs": epochs}
    write_json(RESULTS / f"{RECIPE}.json", content)
    last = float(epochs[-1]["top1"])
    body = (
        f"`{command}`: **{top1:.2f} %** of the 10,000 test images. The weights are the best of all evaluations on "
        f"these; the last epoch has {last:.2f} %. Every epoch: [{RECIPE}.json]({RECIPE}.json)."
    )
    write_markdown(RESULTS / f"{RECIPE}.md", f"{NAME}, the model in the package", environment, body)
    print(f"{top1:.2f} %: {SHIPPED / NAME}")


if __name__ == "__main__":
    typer.run(main)
