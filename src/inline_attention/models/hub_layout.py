"""Read a folder in the layout of timm's models on the Hugging Face Hub: `config.json` and `model.safetensors`.

The configuration comes from a stranger. It becomes the same notes that the metadata of a weights file has, and nothing
more: `described` checks them there. Addresses, paths and all other entries are not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from timm.models import get_pretrained_cfg

from inline_attention.support.files import read_bounded
from inline_attention.support.untrusted import parse_json

CONFIG, WEIGHTS, PICKLED_WEIGHTS, CARD = "config.json", "model.safetensors", "pytorch_model.bin", "README.md"
PREPROCESSOR = "preprocessor_config.json"  # of transformers
PREPARATION = ("crop_pct", "mean", "std", "interpolation")  # of images, as timm names it
MAX_CONFIG_BYTES = 2**24  # ImageNet-21k's class names take 1 MB
SOURCES = ("local-dir", "hf-hub")  # prefixes of model names, as in timm
_REPOSITORY = re.compile(r"\w[\w.\-]*(/\w[\w.\-]*)?(@\w[\w.\-/]*)?")


class CheckpointError(RuntimeError):
    """Weights cannot be read, fetched or written, or do not fit the model."""


def split_source(name: str) -> tuple[str | None, str]:
    """Split "local-dir:FOLDER" and "hf-hub:USER/NAME" into prefix and rest; the prefix of other names is None."""
    prefix, separator, rest = name.partition(":")
    prefix = prefix.lower().replace("_", "-")
    return (prefix, rest) if separator and prefix in SOURCES else (None, name)


def weights_in(folder: Path) -> Path | None:
    """Return the weights file of a folder, safetensors first; None if there is none."""
    return next((folder / name for name in (WEIGHTS, PICKLED_WEIGHTS) if (folder / name).is_file()), None)


def read_config(path: Path) -> Mapping[str, Any]:
    """Return a JSON file that describes a model; raise `CheckpointError` if it cannot be read, or is no mapping."""
    try:
        config = parse_json(read_bounded(path, MAX_CONFIG_BYTES), max_bytes=MAX_CONFIG_BYTES)
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{path} cannot be read ({reason}); fetch it again, or name a weights file") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}; fetch it again") from error
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{path} is damaged: expected a mapping; fetch it again")
    return config


def read_notes(folder: Path) -> dict[str, str]:
    """Return what `config.json` says about the model, as notes: model, model_arguments, class_names and preparation."""
    path, config = folder / CONFIG, read_config(folder / CONFIG)
    if not isinstance(config.get("architecture"), str):
        raise CheckpointError(f"{path} does not name an architecture, expected an entry such as inline_deit_tiny")
    preparation = config.get("pretrained_cfg", config)  # timm's older files have one level
    arguments = config.get("model_args") or {}
    if not isinstance(preparation, Mapping) or not isinstance(arguments, Mapping):
        raise CheckpointError(f"{path} is damaged: expected mappings as pretrained_cfg and model_args; fetch it again")
    classes = config.get("num_classes", preparation.get("num_classes"))
    described = ({} if classes is None else {"num_classes": classes}) | dict(arguments)
    described = own_image_size(config["architecture"], preparation) | described
    names = config.get("label_names", preparation.get("label_names"))
    if isinstance(names, Mapping):  # from every index to its name
        indices = [str(index) for index in range(len(names))]
        names = [names[index] for index in indices] if set(indices) == set(names) else None
    notes: dict[str, Any] = {"model_arguments": described, "class_names": names}
    notes |= {key: preparation.get(key) for key in PREPARATION}
    texts = {key: json.dumps(value) for key, value in notes.items() if value is not None}
    return {"model": str(config["architecture"]), **texts}


def own_image_size(name: str, preparation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the image size of a model's weights as an argument, if it is not the usual one of the model."""
    size = preparation.get("input_size")
    try:
        usual = get_pretrained_cfg(name)
    except RuntimeError:  # the tag is unknown
        return {}
    if not isinstance(size, (list, tuple)) or usual is None or list(size[1:]) == list(usual.input_size[1:]):
        return {}
    return {"img_size": list(size[1:])}


def fetch(repository: str, cache_dir: str | Path | None = None) -> Path:
    """Download configuration and weights of a model on the Hugging Face Hub, and return their folder in the cache.

    `repository` is "USER/NAME" or "USER/NAME@REVISION". The cache is huggingface_hub's, unless `cache_dir` is given.
    """
    from huggingface_hub import snapshot_download

    if _REPOSITORY.fullmatch(repository) is None:
        raise CheckpointError(f"expected a model on the hub, such as hf-hub:USER/NAME, got {repository!r}")
    name, _, revision = repository.partition("@")
    try:
        for weights in (WEIGHTS, PICKLED_WEIGHTS):
            wanted = [CONFIG, PREPROCESSOR, weights]
            options = {"revision": revision or None, "cache_dir": cache_dir, "allow_patterns": wanted}
            if weights_in(folder := Path(snapshot_download(name, **options))) is not None:
                return folder
    except (OSError, ValueError, RuntimeError) as error:  # huggingface_hub's errors are kinds of these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"hf-hub:{repository} cannot be fetched ({reason}); check its name, your connection and your token"
        ) from error
    raise CheckpointError(f"hf-hub:{repository} has neither {WEIGHTS} nor {PICKLED_WEIGHTS}")
