"""Save models for the Hugging Face Hub, in the layout of timm's models, and load them back.

    config.json         architecture, arguments, classes and image preparation, for timm and for us
    model.safetensors   weights, with the same description in their metadata
    README.md           model card

Not huggingface_hub's mixin: it would build a class from whatever a stranger's `config.json` says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from timm.data.config import resolve_data_config
from timm.models import get_pretrained_cfg
from timm.models._features import FeatureGetterNet
from torch import nn

from inline_attention.models.checkpoints import (
    load_checkpoint,
    model_metadata,
    number_of_classes,
    open_checkpoint,
    save_weights,
)
from inline_attention.models.described import (
    ModelDescriptionError,
    argument_problems,
    create_described_model,
    read_description,
)
from inline_attention.models.hub_layout import (
    CARD,
    CONFIG,
    PREPARATION,
    WEIGHTS,
    CheckpointError,
    fetch,
    own_image_size,
)
from inline_attention.models.reading import find_weights
from inline_attention.models.registry import PAPER, converted_attention, list_models
from inline_attention.support.files import write_atomically
from inline_attention.support.text import printable

FEATURES = ("out_indices", "output_fmt", "norm")  # arguments of timm for features_only
# What timm notes on a model about its usual weights.
OF_OTHER_WEIGHTS = {"tag": "", "url": "", "hf_hub_id": None, "license": None}


@dataclass(frozen=True)
class ModelCard:
    """What the author says about a model. The card states nothing that is not here, or counted on the model itself."""

    license: str | None = None  # identifier, such as "apache-2.0"
    description: str = ""
    datasets: Sequence[str] = ()
    figures: Mapping[str, object] = field(default_factory=dict[str, object])  # such as {"CIFAR-10 top-1": "92.1 %"}
    training: Mapping[str, object] = field(default_factory=dict[str, object])  # such as {"epochs": 30, "seed": 0}


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    class_names: Sequence[str] | None = None,
    crop_pct: float | None = None,
    card: ModelCard | None = None,
) -> Path:
    """Write a classifier to a folder in the hub's layout, from which timm and this library create it again.

    A model card that is in the folder already is kept.

    Args:
        model: Model of timm's registry: of this library, of timm, or of timm after `convert_attention`.
        folder: Folder, created if missing.
        class_names: One name for each class.
        crop_pct: Share of the resized picture's side that evaluation keeps; by default the model's own.
        card: What the model card says.

    Returns:
        The folder.

    Raises:
        CheckpointError: If a configuration cannot describe the model, or the folder cannot be written.
    """
    folder = Path(folder)
    notes = model_metadata(model)
    name, arguments = notes.get("model"), recorded_arguments(model)
    if name is None:
        raise CheckpointError(f"{type(model).__name__} was not created by timm's registry, so no file can describe it")
    if class_names is not None and len(class_names) != arguments["num_classes"]:
        raise CheckpointError(f"expected {arguments['num_classes']} class_names, got {len(class_names)}")
    if problems := argument_problems(name, arguments):
        raise CheckpointError(f"no file can describe this model: {next(iter(problems.values()))}")
    given: dict[str, Any] = {"crop_pct": crop_pct}
    if (size := arguments.get("img_size")) is not None:
        given["input_size"] = (arguments.get("in_chans", 3), *((size, size) if isinstance(size, int) else size))
    preparation = resolve_data_config(given, model=model)  # at the model's native size
    noted = own_image_size(name, preparation) | arguments  # models that take any size do not record it
    described = {"model_arguments": noted, "class_names": None if class_names is None else list(class_names)}
    described |= {key: preparation[key] for key in PREPARATION}
    texts = {key: json.dumps(value) for key, value in described.items() if value is not None}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(model, folder / WEIGHTS, metadata=texts)
        config = _config(model, name, arguments, class_names, preparation, notes.get("conversion"))
        write_atomically(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        if not (folder / CARD).exists():
            images = "×".join(map(str, preparation["input_size"]))
            text = _card_text(model, name, notes.get("conversion"), folder, images, card or ModelCard())
            write_atomically(folder / CARD, text)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
    return folder


def push_to_hub(
    model: nn.Module,
    repository: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    commit_message: str = "Add model",
    **content: Any,
) -> str:
    """Upload a classifier to the Hugging Face Hub, and return the address of the commit.

    Args:
        model: Classifier, as `save_pretrained` takes it.
        repository: "USER/NAME", created if missing.
        private: Create it private.
        token: Access token; by default that of `hf auth login`.
        commit_message: Commit message.
        **content: Further arguments of `save_pretrained`.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with TemporaryDirectory() as folder:  # saved first: a model that cannot be described makes no repository
        save_pretrained(model, folder, **content)
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        if api.file_exists(repository, CARD):
            (Path(folder) / CARD).unlink()
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=commit_message))


def from_pretrained(source: str | os.PathLike[str], *, cache_dir: str | None = None, **arguments: Any) -> nn.Module:
    """Create a model with its weights from a folder or file, or from "USER/NAME" on the Hugging Face Hub.

    Args:
        source: Folder, such as one of `save_pretrained` or a run of `inline train`, file of weights, or repository.
        cache_dir: Folder of downloads; by default huggingface_hub's.
        **arguments: Arguments of the model that replace the stored ones, such as `num_classes`.
    """
    is_here = isinstance(source, os.PathLike) or Path(source).exists()
    return create_from_hub(source if is_here else fetch(str(source), cache_dir), pretrained=True, **arguments)


def create_from_hub(folder: str | os.PathLike[str], *, pretrained: bool = False, **own: Any) -> nn.Module:
    """Create the model that a folder in the hub's layout, or the best checkpoint of a run of `inline train`, describes.

    `own` arguments of the caller replace the stored ones. With `pretrained` the weights are loaded; a head for another
    `num_classes` is new. `CheckpointError` if the folder cannot be read, or describes something else than a model.
    """
    file = open_checkpoint(find_weights(Path(folder)))
    described = read_description(file)
    prepared = described.preparation | ({} if described.crop_pct is None else {"crop_pct": described.crop_pct})
    usual: Any = get_pretrained_cfg(described.name)
    size = described.image_size or usual.input_size[1:]
    stored: dict[str, Any] = {"input_size": (described.arguments.get("in_chans", 3), *size)}
    stored["num_classes"] = described.arguments.get("num_classes", usual.num_classes)
    overlay = stored | prepared | dict(own.pop("pretrained_cfg_overlay", None) or {})
    try:
        if described.name in list_models():  # timm's builder adapts our weights to other channels and heads
            overlay |= {"file": file} if pretrained else {}
            return create_described_model(
                described.name, described.arguments, pretrained=pretrained, pretrained_cfg_overlay=overlay, **own
            )
        overlay = OF_OTHER_WEIGHTS | overlay
        # timm wraps a model for its features when it builds it, before the conversion and our weights.
        wraps, features = own.pop("features_only", False), {key: own.pop(key) for key in FEATURES if key in own}
        model = create_described_model(
            described.name, described.arguments, described.conversion, pretrained_cfg_overlay=overlay, **own
        )
    except ModelDescriptionError as error:
        raise CheckpointError(f"{file.path} cannot be used: {error}") from error
    if pretrained:
        other_classes = "num_classes" in own and number_of_classes(file.weights, model) != own["num_classes"]
        load_checkpoint(model, file, reinitialize_head=other_classes)
    if wraps and not hasattr(model, "forward_intermediates"):
        raise CheckpointError(f"{file.path} is of {described.name}, which gives no features; leave features_only out")
    return FeatureGetterNet(model, **{"out_indices": 3, **features}) if wraps else model


def recorded_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the arguments that describe a model as it is now: those recorded by timm, and what has changed since."""
    recorded: dict[str, Any] = dict(getattr(model, "_model_args", {}))
    recorded.pop("attention", None)  # part of the name of our models
    current = {name: getattr(model, name, None) for name in ("num_classes", "in_chans", "global_pool")}
    recorded |= {name: value for name, value in current.items() if isinstance(value, (int, str))}
    return {name: value for name, value in recorded.items() if "drop" not in name}


def _config(
    model: nn.Module,
    name: str,
    arguments: Mapping[str, Any],
    class_names: Sequence[str] | None,
    preparation: Mapping[str, Any],
    conversion: str | None,
) -> dict[str, Any]:
    """Return the content of `config.json`, as `timm.models.save_for_hf` writes it."""
    own: Mapping[str, Any] = getattr(model, "pretrained_cfg", {})
    pretrained = {key: own[key] for key in ("first_conv", "classifier", "paper_ids", "paper_name") if key in own}
    pretrained |= {key: preparation[key] for key in ("input_size", "crop_mode", *PREPARATION)}
    pretrained |= {"num_classes": arguments["num_classes"], "pool_size": None, "custom_load": False}
    pretrained["fixed_input_size"] = own.get("fixed_input_size", False)
    labels = {} if class_names is None else {"label_names": list(class_names)}
    return {
        # The weights describe a converted model, for `converted_attention`. timm knows only the original.
        "architecture": name if conversion is None else converted_attention.__name__,
        "num_classes": arguments["num_classes"],
        "num_features": getattr(model, "num_features", None),
        **labels,
        # Not twice: transformers passes `num_classes` of its own beside these.
        "model_args": {key: value for key, value in arguments.items() if conversion is None and key != "num_classes"},
        "pretrained_cfg": pretrained,
    }


def _card_text(model: nn.Module, name: str, conversion: str | None, folder: Path, images: str, card: ModelCard) -> str:
    """Return the model card: YAML for the hub, then Markdown."""
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="timm",
        pipeline_tag="image-classification",
        tags=["image-classification", "timm", "inline-attention"],
        license=card.license,
        datasets=list(card.datasets) or None,
    )
    facts: dict[str, object] = {"architecture": f"`{name}`"}
    if conversion is not None:
        noted: Mapping[str, Any] = json.loads(conversion)
        attention = "InLine" if noted["attention"] == "inline" else noted["attention"]
        kept = f"; softmax is kept in blocks {', '.join(map(str, noted['keep_softmax']))}"
        facts["attention"] = f"{attention}, by `convert_attention`" + kept * bool(noted["keep_softmax"])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts |= {
        "parameters": f"{parameters / 1e6:.2f} M",
        "weights": f"{(folder / WEIGHTS).stat().st_size / 2**20:.1f} MiB, {next(model.parameters()).dtype}",
        "images": images,
        "classes": getattr(model, "num_classes", None),
        "license": card.license or "not stated",
        **({"datasets": ", ".join(card.datasets)} if card.datasets else {}),
    }
    parts = [f"---\n{data.to_yaml()}\n---\n", f"# {name}\n", card.description, _table(facts)]
    sections = {"Results": card.figures, "Training": card.training}
    parts += [f"## {title}\n\n{_table(rows)}" for title, rows in sections.items() if rows]
    parts.append(
        "## Use\n\n```python\nfrom inline_attention import create_model\n\n"
        'model = create_model("hf-hub:USER/NAME", pretrained=True)  # or "local-dir:FOLDER"\n```\n\n'
        "After `import inline_attention`, `timm.create_model` takes the same names. `inline predict PICTURES "
        f"-c FOLDER` prints classes.\n\nInLine attention: [Bridging the Divide]({PAPER}), NeurIPS 2024.\n"
    )
    return "\n".join(part for part in parts if part)


def _table(rows: Mapping[str, object]) -> str:
    cells = ([printable(cell).replace("|", "\\|") for cell in row] for row in rows.items())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)]) + "\n"
