"""The model registry: register a model and its twins, list models, create a model by name."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers.helpers import to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, get_pretrained_cfg, register_model
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from inline_attention.models.checkpoints import open_checkpoint, read_position_grids
from inline_attention.models.hub_layout import CONFIG, PREPARATION, SOURCES, fetch, split_source, weights_in
from inline_attention.models.reading import Checkpoint
from inline_attention.ops.reference import AttentionKind
from inline_attention.support.text import did_you_mean, page_of_docs, printable

SHIPPED = Path(__file__).parents[1] / "weights"  # a folder NAME.TAG in the hub's layout for each model
PAPER = "https://arxiv.org/abs/2412.06590"
_NOT_OF_THE_MODEL = ("pretrained_cfg", "pretrained_model_args", "cache_dir", "features_only")
ATTENTIONS: tuple[AttentionKind, ...] = ("inline", "softmax", "linear")  # the first part of a model's name
FAMILIES = ("deit", "pvt", "swin", "cswin")


class NoPretrainedWeightsError(RuntimeError):
    """`pretrained=True` without a file. This library hosts no weights."""


class FeatureBackbone(FeatureGetterNet):
    """timm's `features_only` wrapper with support for unequal images."""

    def forward(self, x: Tensor, image_sizes: Any = None, pixel_mask: Tensor | None = None) -> list[Tensor]:
        """Return features `[B, C, h, w]` at each stride of `feature_info.reduction()`. Arguments: the model's."""
        wanted = {"indices": self.out_indices, "norm": self.norm, "output_fmt": self.output_fmt}
        return self.model.forward_intermediates(  # pyright: ignore[reportCallIssue]
            x, **wanted, intermediates_only=True, image_sizes=image_sizes, pixel_mask=pixel_mask
        )


def register_family(
    model_class: type[nn.Module], variants: Mapping[str, Mapping[str, Any]], *, first_conv: str = "embeddings.0.proj"
) -> None:
    """Register each variant `inline_NAME` with timm, and its twins `softmax_NAME` and `linear_NAME`.

    `variants` are arguments of the class by model name. The module of the class gets their entry points and
    `default_cfgs`, as timm's modules have. timm adapts the input channels of `first_conv`.
    """
    module = sys.modules[model_class.__module__]
    configs: dict[str, dict[str, Any]] = vars(module).setdefault("default_cfgs", {})
    for variant, defaults in variants.items():
        for attention in ATTENTIONS:
            entry_point = _entry_point(model_class, variant, {"attention": attention, **defaults})
            config = _pretrained_config(model_class, first_conv, defaults)
            configs[entry_point.__name__] = _with_shipped_tags(entry_point.__name__, config)
            setattr(module, entry_point.__name__, register_model(entry_point))


def _entry_point(model_class: type[nn.Module], variant: str, defaults: Mapping[str, Any]) -> Callable[..., nn.Module]:
    def create(pretrained: bool = False, **arguments: Any) -> nn.Module:
        stored = _described(arguments.get("pretrained_cfg"))
        # timm puts the classes of a folder's model into its configuration: they come before the variant's own.
        classes = {key: stored[key] for key in ("num_classes",) if stored.get("source") in SOURCES and key in stored}
        return _build(model_class, variant, pretrained, **{**defaults, **classes, **arguments})

    create.__name__ = create.__qualname__ = variant.replace("inline_", f"{defaults['attention']}_", 1)
    create.__module__ = model_class.__module__
    create.__doc__ = f"Build {model_class.__name__} as {create.__name__}."
    return create


def shipped_models() -> dict[str, Path]:
    """Return the folders of the models that come with the package, by name and tag. Each is in the hub's layout."""
    folders = sorted(SHIPPED.glob("*.*"))
    return {path.name: path for path in folders if (path / CONFIG).is_file() and weights_in(path) is not None}


def _with_shipped_tags(name: str, config: dict[str, Any]) -> Any:
    """Return the configuration of a model, or one for each tag if weights of it come with the package."""
    tagged: dict[str, Any] = {}
    for name_and_tag, folder in shipped_models().items():
        if name_and_tag.partition(".")[0] == name:
            own = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            taken = {key: own["pretrained_cfg"][key] for key in ("num_classes", *PREPARATION)}
            tagged[name_and_tag] = config | taken | {"file": str(folder), "label_names": own.get("label_names")}
    return generate_default_cfgs(tagged)[name] if tagged else config


def _pretrained_config(model_class: type[nn.Module], first_conv: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return timm's description of a model: its images, and its first and last layer."""
    size: int = defaults.get("img_size", 224)
    stride: int | None = getattr(model_class, "largest_stride", None)
    return {
        "url": "",
        "num_classes": defaults.get("num_classes", 1000),
        "input_size": (3, size, size),
        "pool_size": None if stride is None else (size // stride, size // stride),
        # The paper's evaluation: resize to 256/224 of the size, then crop the center; at 384² resize straight to 384.
        "crop_pct": 1.0 if size == 384 else 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": first_conv,
        "classifier": "head",
        "fixed_input_size": False,
        "paper_ids": "arXiv:2412.06590",
        "paper_name": "Bridging the Divide: Reconsidering Softmax and Linear Attention",
    }


def _build(
    model_class: Any, variant: str, pretrained: bool, *, attention: AttentionKind, **arguments: Any
) -> nn.Module:
    """Build a model with timm's builder; `pretrained` loads weights from the file in `pretrained_cfg_overlay`."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention must be 'inline', 'softmax' or 'linear', got {attention!r}")
    name = variant.replace("inline_", f"{attention}_", 1)
    overlay = dict(arguments.pop("pretrained_cfg_overlay", None) or {})
    grids: dict[str, tuple[int, int]] = {}
    config = arguments.get("pretrained_cfg")
    if not config or isinstance(config, str):  # a tag
        config = get_pretrained_cfg(f"{name}.{config}" if config else name)
    described = _described(config)
    if described.get("source") in SOURCES:
        _check_stored_arguments(name, arguments.get("pretrained_model_args"), described.get("num_classes"))
    if pretrained:
        source = {**described, **overlay}
        file = _pretrained_file(source, arguments.get("cache_dir"))
        if file is not None:
            overlay |= {"state_dict": file.weights, "file": str(file.path), "source": None}
            grids = read_position_grids(file.metadata)
            if described.get("source") not in SOURCES:  # the configuration of a folder says what its weights have
                overlay = _layers_in(file, source) | overlay
        elif not any(source.get(key) for key in ("state_dict", "url")):
            raise NoPretrainedWeightsError(_how_to_get_weights(name))
    levels = arguments.pop("out_indices") if "out_indices" in arguments else model_class.feature_levels(**arguments)
    model = build_model_with_cfg(
        functools.partial(model_class, attention=attention),
        name,
        pretrained,
        pretrained_cfg_overlay=overlay,
        pretrained_filter_fn=lambda state_dict, model: model.convert_state_dict(state_dict, grids),
        feature_cfg={"out_indices": levels, "feature_cls": FeatureBackbone, "output_fmt": "NCHW"},
        **arguments,
    )
    model.pretrained_cfg.pop("state_dict", None)  # the model has the weights: a second copy would stay in memory
    record_arguments(model, **{name: value for name, value in arguments.items() if name not in _NOT_OF_THE_MODEL})
    return model


def _described(config: Any) -> dict[str, Any]:
    """Return a pretrained configuration of timm as a mapping; an empty one for a tag or nothing."""
    return config if isinstance(config, dict) else getattr(config, "__dict__", {})


def record_arguments(model: nn.Module, **arguments: Any) -> None:
    """Record arguments of a model, or changes of them, where timm records them for files that describe the model."""
    place: Any = model
    place._model_args = {**getattr(model, "_model_args", {}), **arguments}
    if (size := arguments.get("img_size")) is not None:
        place._traits = {**getattr(model, "_traits", {}), "img_size": to_2tuple(size)}


@register_model
def converted_attention(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build a model of timm after `convert_attention` from its folder. `config.json` of such a folder names this.

    With the model's own name there, timm would build softmax attention.
    """
    from inline_attention.models.hub import create_from_hub  # it needs this module

    described, cache_dir = _described(arguments.pop("pretrained_cfg", None)), arguments.pop("cache_dir", None)
    if described.get("source") not in SOURCES:
        raise ValueError(
            "converted_attention stands for saved models: create one by local-dir:FOLDER or hf-hub:USER/NAME"
        )
    if stored := arguments.pop("pretrained_model_args", None):
        raise ValueError(f"config.json of a converted model has no model_args, got {', '.join(map(printable, stored))}")
    is_hub = described["source"] == "hf-hub"
    folder = fetch(described["hf_hub_id"], cache_dir) if is_hub else described["file"]
    return create_from_hub(folder, pretrained=pretrained, **arguments)


def _pretrained_file(source: Mapping[str, Any], cache_dir: Any) -> Checkpoint | None:
    """Open the weights of a pretrained configuration by our reader: timm's would unpickle the authors' files.

    A configuration that timm read from a folder or from the hub names its own place in `source`; the other addresses in
    it are a stranger's.
    """
    if source.get("source") == "hf-hub" or (source.get("hf_hub_id") and not source.get("file")):
        return open_checkpoint(fetch(source["hf_hub_id"], cache_dir))
    if source.get("file") and (not source.get("state_dict") or source.get("source") == "local-dir"):
        return source["file"] if isinstance(source["file"], Checkpoint) else open_checkpoint(source["file"])
    return None


def _how_to_get_weights(name: str) -> str:
    if not name.startswith("inline_"):
        return (
            f"there are no weights of {name}: it is for comparisons. Train it by `inline train` with --model {name}, "
            "then create_model('local-dir:RUN', pretrained=True)"
        )
    return (
        f"this library hosts no weights of {name}. The authors publish theirs with the paper, {PAPER} "
        f"({page_of_docs('checkpoints.md')} says more); download a file, "
        f"run `inline convert FILE.pth --model {name} --output {name}.safetensors`, then "
        f"create_model({name!r}, pretrained=True, pretrained_cfg_overlay=dict(file='{name}.safetensors'))"
    )


def _layers_in(file: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the classes and channels of a file. timm compares them with the model's, and adapts what differs."""
    found: dict[str, Any] = {}
    head, first = (file.weights.get(f"{config[layer]}.weight") for layer in ("classifier", "first_conv"))
    if head is not None and head.dim() > 0:
        found["num_classes"] = head.shape[0]
    if first is not None and first.dim() == 4:
        found["input_size"] = (first.shape[1], *config["input_size"][1:])
    return found


def _check_stored_arguments(name: str, arguments: Mapping[str, Any] | None, classes: Any) -> None:
    """Refuse arguments that timm took from a stranger's `config.json`, if they are more than an architecture."""
    from inline_attention.models.described import argument_problems  # it needs this module

    stored = ({} if classes is None else {"num_classes": classes}) | dict(arguments or {})
    for problem in argument_problems(name, stored).values():
        raise ValueError(f"config.json describes a model that is refused: {problem}")


def list_models(pattern: str = "*") -> list[str]:
    """Return the names of this library's models that match a glob pattern."""
    matching = set(timm.list_models(pattern))
    names = (name for family in FAMILIES for kind in ATTENTIONS for name in timm.list_models(f"{kind}_{family}_*"))
    return [name for name in names if name in matching]


def create_model(name: str, pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Create a model by name with `timm.create_model`.

    Args:
        name: Model name, such as "inline_deit_tiny". `list_models` returns all names. "local-dir:FOLDER" and
            "hf-hub:USER/NAME" are models in the hub's layout, also those that `convert_attention` converted.
        pretrained: Load weights. Needs a name with a folder, or `pretrained_cfg_overlay=dict(file=...)`: no weights of
            the published models are hosted.
        **arguments: Arguments of the model, such as `num_classes`, `in_chans`, `features_only`, `drop_path_rate`.
            `img_size` of a model of timm that takes any size is noted in its `pretrained_cfg`.

    Raises:
        ValueError: If the name is unknown; the message suggests similar names.
    """
    source, place = split_source(name)
    if source is not None:
        from inline_attention.models.hub import create_from_hub  # it needs this module

        folder = fetch(place, arguments.pop("cache_dir", None)) if source == "hf-hub" else place
        return create_from_hub(folder, pretrained=pretrained, **arguments)
    if not timm.is_model(name):
        hint = did_you_mean(name, list_models(), most=3) or "; `inline models` lists them"
        raise ValueError(f"there is no model {name!r}{hint}")
    try:
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except TypeError as error:  # convolutional networks of timm take images of any size, and no `img_size`
        size = arguments.pop("img_size", None)
        if size is None or "'img_size'" not in str(error):
            raise
    model: Any = timm.create_model(name, pretrained=pretrained, **arguments)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (arguments.get("in_chans", 3), *to_2tuple(size))}
    return model
