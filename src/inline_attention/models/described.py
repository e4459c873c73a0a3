"""The one door between data from files and model construction.

Files describe an *architecture*: a registered name, and plain numbers, flags and words from the lists below, each with
a bound. Anything else is refused by name, above all what timm would obey: addresses, paths, caches, weights.
No other code passes data from a file to `create_model`; `tests/security/test_door.py` checks that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import timm
import torch
from torch import Tensor, nn

from inline_attention.layers.attention import InLineAttention, LinearAttention, TokenAttention
from inline_attention.layers.conversion import convert_attention
from inline_attention.models.checkpoints import CONVERSION, number_of_classes
from inline_attention.models.reading import Checkpoint, CheckpointError
from inline_attention.models.registry import ATTENTIONS, FAMILIES, create_model, list_models
from inline_attention.models.running_cost import RunningCostError, check_running_cost
from inline_attention.ops.dispatch import BACKEND_NAMES
from inline_attention.ops.feature_maps import FEATURE_MAPS
from inline_attention.support.text import did_you_mean, printable, shortened, some_of
from inline_attention.support.untrusted import UntrustedDataError, parse_json

MAX_PIXELS = 2**26  # of `img_size`: 8192², less than Pillow's limit
MAX_RESIZED_PIXELS = 2**27  # of the picture that an image is cropped from
MAX_PARAMETERS = 20_000_000_000
MAX_TOKENS = 2**22
MAX_SOFTMAX_TOKENS = 2**16
MAX_BUFFER_BYTES = 2**30  # masks and indices of windows, which no file of weights holds
MAX_NOTE_BYTES = 2**24  # of an entry of metadata; ImageNet-21k's class names take 1 MB
_CANNOT_RUN = (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError, LookupError)
_NAME = re.compile(r"[A-Za-z0-9_]{1,100}(\.[A-Za-z0-9_]{1,100})?")  # a model, perhaps with timm's tag


class ModelDescriptionError(ValueError):
    """A file describes a model that cannot or must not be built."""


@dataclass(frozen=True)
class Conversion:
    """Attention that replaces the softmax attention of a model: arguments of `convert_attention`, as plain data."""

    attention: str = "inline"  # or "linear"
    keep_softmax: tuple[int, ...] = ()  # numbers of the attentions that stay softmax
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the layer, such as `local_residual`

    def __post_init__(self) -> None:
        if problems := conversion_problems(self.attention, self.keep_softmax, self.options):
            raise ModelDescriptionError(next(iter(problems.values())))
        object.__setattr__(self, "keep_softmax", tuple(self.keep_softmax))
        object.__setattr__(self, "options", dict(self.options))

    def apply(self, model: nn.Module) -> list[str]:
        """Replace the model's attention in place. Returns and errors: see `convert_attention`."""
        layer = CONVERTED_ATTENTIONS[self.attention]
        return convert_attention(model, attention=layer, keep_softmax=self.keep_softmax, **self.options)


@dataclass(frozen=True)
class Description:
    """What a file of weights says about its classifier, checked."""

    name: str  # a registered model
    arguments: dict[str, Any]
    class_names: list[str] | None = None  # one for each class; None if the file has none
    crop_pct: float | None = None  # share of the resized image's side that evaluation keeps; None for the model's own
    conversion: Conversion | None = None  # of its attention; None if the model has its own
    preparation: dict[str, Any] = field(default_factory=dict[str, Any])  # mean, std, interpolation that the file gives

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of the images that the model was trained on, if the file says."""
        size = self.arguments.get("img_size")
        return None if size is None else (size, size) if isinstance(size, int) else (size[0], size[1])

    def classes_in(self, file: Checkpoint, **own: Any) -> int | None:
        """Return the number of classes of the head in a file's weights, None without a head.

        `own` arguments of the model come before the file's.
        """
        with torch.device("meta"):
            model = create_described_model(self.name, self.arguments, self.conversion, **own)
        return number_of_classes(file.weights, model)

    def needed_classes_in(self, file: Checkpoint) -> int:
        """Return the number of classes of the head in a file's weights. `CheckpointError` without a head."""
        if (classes := self.classes_in(file)) is None:
            advice = "`inline train finetune --initial-checkpoint FILE --data-dir DIR` gives it one"
            raise CheckpointError(f"{file.path} has no head to classify with; {advice}")
        return classes

    def note_preparation(self, model: nn.Module) -> None:
        """Note on a model how its images are prepared, where timm looks for it."""
        note_preparation(model, self.preparation)


class _Rule(NamedTuple):
    """The values that an argument may have, and their description in a message."""

    accepts: Callable[[Any], bool]
    expected: str


def _integer(low: int, high: int) -> _Rule:
    return _Rule(lambda value: type(value) is int and low <= value <= high, f"a whole number from {low} to {high}")


def _real(low: float, high: float) -> _Rule:  # NaN is in no range
    rule = f"a number from {low:g} to {high:g}"
    return _Rule(lambda value: type(value) in (int, float) and low <= value <= high, rule)


def _word(*words: str) -> _Rule:
    return _Rule(lambda value: isinstance(value, str) and value in words, f"one of {', '.join(map(repr, words))}")


def _list_of(rule: _Rule, *lengths: int) -> _Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, (list, tuple)) and len(value) in lengths and all(map(rule.accepts, value))  # pyright: ignore[reportUnknownArgumentType]

    count = " or ".join(map(str, lengths)) if len(lengths) < 9 else f"{min(lengths)} to {max(lengths)}"
    return _Rule(accepts, f"a list of {count} values, each {rule.expected}")


def _one_or_more(rule: _Rule, most: int = 8) -> _Rule:
    """One value or a list of them, as timm's pyramids take."""
    several = _list_of(rule, *range(1, most + 1))
    return _Rule(
        lambda value: rule.accepts(value) or several.accepts(value), f"{rule.expected}, or up to {most} of them"
    )


def _optional(rule: _Rule) -> _Rule:
    return _Rule(lambda value: value is None or rule.accepts(value), rule.expected)


def _options(rules: Mapping[str, _Rule]) -> _Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and name in rules and rules[name].accepts(item) for name, item in value.items()
        )

    return _Rule(accepts, "a mapping with " + "; ".join(f"{name}: {rule.expected}" for name, rule in rules.items()))


def _fits_image(value: Any) -> bool:
    sides = value if isinstance(value, (list, tuple)) else (value, value)
    return len(sides) == 2 and all(map(_SIDE.accepts, sides)) and sides[0] * sides[1] <= MAX_PIXELS


_SIDE = _integer(1, MAX_PIXELS)
_IMAGE_SIZE = _Rule(_fits_image, f"one or two whole numbers ≥ 1 with a product of at most {MAX_PIXELS:,}")
_FLAG = _Rule(lambda value: isinstance(value, bool), "true or false")
_RATE = _real(0.0, 0.99)
_CROP = _real(0.05, 1.0)
_WIDTH = _integer(1, 16_384)
_HEADS = _integer(1, 1024)
_DEPTH = _integer(1, 512)
_COUNT = _integer(0, 512)  # of something that may be absent, such as global blocks
_WINDOW = _integer(1, 64)  # indices of a window take the fourth power of its side
_RATIO = _real(0.01, 64.0)
_PREPARATION = {
    "mean": _list_of(_real(-1e3, 1e3), 1, 3),
    "std": _list_of(_real(1e-4, 1e3), 1, 3),
    "interpolation": _word("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"),
}
_EVERY_MODEL: dict[str, _Rule] = {
    "num_classes": _integer(0, 1_000_000),
    "in_chans": _integer(1, 1024),
    "img_size": _optional(_IMAGE_SIZE),
    "global_pool": _word("", "token", "avg", "avgmax", "max", "map"),
    **dict.fromkeys(("drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"), _RATE),
}
_LAYER: dict[str, _Rule] = {
    "feature_map": _word(*FEATURE_MAPS),
    "normalization": _word("subtract", "divide", "magnitude"),
    **dict.fromkeys(("local_residual", "static_local", "softmax_prefix", "prefix_gain"), _FLAG),
    "scale": _optional(_real(1e-6, 1e6)),
    "backend": _word(*BACKEND_NAMES),
}
_ATTENTION = _options({**_LAYER, "qkv_bias": _FLAG, "proj_bias": _FLAG})
CONVERTED_ATTENTIONS: dict[str, type[TokenAttention]] = {"inline": InLineAttention, "linear": LinearAttention}
_CONVERSION: dict[str, _Rule] = {
    "attention": _word(*CONVERTED_ATTENTIONS),
    "keep_softmax": _list_of(_integer(-512, 511), *range(513)),
    "options": _options({**_LAYER, "num_prefix_tokens": _COUNT, "drop_position_bias": _FLAG}),
}
_OURS: dict[str, _Rule] = {**_EVERY_MODEL, "attention_options": _optional(_ATTENTION)}
_PYRAMID: dict[str, _Rule] = {
    **_OURS,
    "embed_dim": _WIDTH,
    "depths": _list_of(_DEPTH, 4),
    "num_heads": _list_of(_HEADS, 4),
    "mlp_ratio": _RATIO,
}
_FAMILY_RULES: dict[str, dict[str, _Rule]] = {
    "deit": {
        **_OURS,
        "embed_dim": _WIDTH,
        "num_heads": _HEADS,
        "depth": _DEPTH,
        "patch_size": _integer(1, 1024),
        "stem": _list_of(_list_of(_WIDTH, 2), *range(9)),
        "mlp_ratio": _RATIO,
    },
    "pvt": {**_OURS, "depths": _list_of(_DEPTH, 4)},
    "swin": {**_PYRAMID, "global_blocks": _list_of(_COUNT, 4), "window_size": _WINDOW},
    "cswin": {**_PYRAMID, "global_stages": _integer(0, 4), "stripe_widths": _list_of(_integer(1, 256), 3)},
}
# Arguments that many of timm's models share. The others can be given on the command line only.
_TIMM_RULES: dict[str, _Rule] = {
    **_EVERY_MODEL,
    **dict.fromkeys(("embed_dim", "embed_dims", "dims", "dim", "width"), _one_or_more(_WIDTH)),
    **dict.fromkeys(("depth", "depths", "layers"), _one_or_more(_DEPTH)),
    "num_heads": _one_or_more(_HEADS),
    "patch_size": _one_or_more(_integer(1, 1024), 2),
    "window_size": _one_or_more(_WINDOW, 2),
    **dict.fromkeys(("mlp_ratio", "mlp_ratios"), _one_or_more(_RATIO)),
    **dict.fromkeys(("reg_tokens", "num_reg_tokens"), _COUNT),
    **dict.fromkeys(("pos_drop_rate", "patch_drop_rate", "proj_drop", "drop_block_rate"), _optional(_RATE)),
    **dict.fromkeys(("init_values", "layer_scale_init_value", "ls_init_value"), _optional(_real(0.0, 100.0))),
    **dict.fromkeys(
        ("class_token", "qkv_bias", "qk_norm", "no_embed_class", "pre_norm", "final_norm", "dynamic_img_size"), _FLAG
    ),
    **dict.fromkeys(("dynamic_img_pad", "strict_img_size", "always_partition"), _FLAG),
    "fc_norm": _optional(_FLAG),
}


def check_model_name(name: object) -> str:
    """Return a name from a file if a model is registered under it; refuse `hf-hub:…`, `local-dir:…` and paths."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None or not timm.is_model(name):
        hint = did_you_mean(name, list_models()) or "; `inline models` lists them"
        raise ModelDescriptionError(f"expected the name of a registered model, got {_shown(name)}{hint}")
    return name


def argument_problems(name: str, arguments: object) -> dict[str, str]:
    """Return the problems of the arguments that a file gives for a registered model: a sentence by argument name."""
    if not isinstance(arguments, Mapping):
        return {"": f"expected a mapping of model arguments, got {_shown(arguments)}"}
    family = model_family(name)
    rules = _TIMM_RULES if family is None else _FAMILY_RULES[family]
    problems: dict[str, str] = {}
    for argument, value in arguments.items():
        if not isinstance(argument, str) or argument not in rules:
            shown = printable(argument)[:60]
            problems[shown] = (
                f"a file may not set {shown!r} of {name}: only {', '.join(sorted(rules))}; "
                f"if you trust it, pass it yourself: --set model.arguments.{shown}=…"
            )
        elif not rules[argument].accepts(value):
            problems[argument] = f"expected {rules[argument].expected} as {argument} of {name}, got {_shown(value)}"
    if "img_size" in arguments and not problems.keys() & {"img_size", "patch_size"}:
        tokens, most = _count_tokens(name, arguments), _most_tokens(name)
        if tokens > most:
            problems["img_size"] = f"this {name} would attend to {tokens:,} tokens; a file may ask for {most:,} at most"
    return problems


def _count_tokens(name: str, arguments: Mapping[str, Any]) -> int:
    """Tokens of the finest grid of an image of the described size; 224 and 16 pixels stand for what is not said."""
    size, patch = arguments["img_size"] or 224, arguments.get("patch_size", 4 if "_pvt_" in name else 16)
    sides, patches = (value if isinstance(value, (list, tuple)) else (value, value) for value in (size, patch))
    return math.prod(-(-side // step) for side, step in zip(sides, (*patches, patches[0])[:2], strict=True))


def _most_tokens(name: str) -> int:
    """Linear-time attention and windows take millions of tokens; softmax over the whole image takes their square."""
    is_linear = name.startswith(("inline_", "linear_")) or "swin" in name
    return MAX_TOKENS if is_linear else MAX_SOFTMAX_TOKENS


def describable(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a file may hold: those that describe the architecture."""
    refused = argument_problems(name, arguments)
    return {argument: value for argument, value in arguments.items() if argument not in refused}


def check_description(
    name: object,
    arguments: object,
    weights: Mapping[str, Tensor] | None = None,
    conversion: Conversion | None = None,
    **own: Any,
) -> tuple[str, dict[str, Any]]:
    """Return a model's name and arguments as a file gives them, if they describe an architecture of bearable size.

    The model is built on the meta device, which takes no memory. It is refused if it is far larger than the `weights`
    of the same file. `conversion` is that of its attention, and `own` are arguments of the caller, which are trusted.
    """
    return _build_on_meta(name, arguments, weights, conversion, own)[:2]


def _build_on_meta(
    name: object,
    arguments: object,
    weights: Mapping[str, Tensor] | None,
    conversion: Conversion | None,
    own: Mapping[str, Any],
) -> tuple[str, dict[str, Any], nn.Module]:
    checked = check_model_name(name)
    if problems := argument_problems(checked, arguments):
        raise ModelDescriptionError(next(iter(problems.values())))
    described: dict[str, Any] = dict(cast(Any, arguments))
    with torch.device("meta"):  # pretrained weights, which only a caller can ask for, are not needed to count
        model = _create(checked, described, {k: v for k, v in own.items() if not k.startswith("pretrained")})
        check_model_size(checked, model, weights)  # before the conversion, which tries single layers on the CPU
        if conversion is not None:
            _convert(checked, model, conversion)
            check_model_size(checked, model, weights)
    tokens, most = getattr(getattr(model, "patch_embed", None), "num_patches", None) or 0, _most_tokens(checked)
    if tokens > most:  # timm's models have patches of other sizes than those that were assumed
        raise ModelDescriptionError(f"this {checked} would attend to {tokens:,} tokens; a file may ask for {most:,}")
    return checked, described, model


def parse_note(file: Checkpoint, key: str, expected: type | tuple[type, ...] = object) -> Any:
    """Return an entry of a file's metadata, which is JSON of the expected type; None if there is no such entry."""
    if key not in file.metadata:
        return None
    try:
        value = parse_json(file.metadata[key], max_bytes=MAX_NOTE_BYTES)
    except UntrustedDataError as error:
        raise CheckpointError(f"{file.path} has a damaged {key} in its metadata: {error}; save it again") from error
    if value is not None and not isinstance(value, expected):
        raise CheckpointError(f"{file.path} has a damaged {key} in its metadata: {_shown(value)}; save it again")
    return value


def parse_class_names(file: Checkpoint) -> list[str] | None:
    """Return the class names that a file gives, a list of texts or numbers; None if it gives none."""
    names: list[Any] | None = parse_note(file, "class_names", list)
    if names is not None and not all(isinstance(name, (str, int, float)) for name in names):
        raise CheckpointError(f"{file.path} has class_names in its metadata that are not texts; save it again")
    return None if names is None else [str(name) for name in names]


def conversion_problems(attention: object, keep_softmax: object, options: object) -> dict[str, str]:
    """Return the problems of the arguments of a conversion: a sentence by argument name."""
    given = {"attention": attention, "keep_softmax": keep_softmax, "options": options}
    return {
        name: f"expected {rule.expected} as {name} of a conversion, got {_shown(given[name])}"
        for name, rule in _CONVERSION.items()
        if not rule.accepts(given[name])
    }


def parse_conversion(content: object) -> Conversion:
    """Return the conversion that a file describes by `attention`, `keep_softmax` and `options`; refuse all else."""
    if not isinstance(content, Mapping) or not content.keys() <= _CONVERSION.keys():
        raise ModelDescriptionError(
            f"expected a mapping of {', '.join(_CONVERSION)} as conversion, got {_shown(content)}"
        )
    return Conversion(**content)


def conversion_of(file: Checkpoint) -> Conversion | None:
    """Return the conversion that a file of weights notes, if that is not refused; None if the attention is its own."""
    try:
        content = parse_note(file, CONVERSION)
        return None if content is None else parse_conversion(content)
    except ModelDescriptionError as error:
        raise CheckpointError(f"{file.path} describes a model that is refused: {error}") from error


def preparation_of(file: Checkpoint) -> dict[str, Any]:
    """Return mean, std and interpolation of the images, as far as a file gives them; refuse what is out of bounds."""
    found = {name: value for name in _PREPARATION if (value := parse_note(file, name)) is not None}
    for name, value in found.items():
        if not _PREPARATION[name].accepts(value):
            raise ModelDescriptionError(f"expected {_PREPARATION[name].expected} as {name}, got {_shown(value)}")
    return found


def note_preparation(model: nn.Module, preparation: Mapping[str, Any]) -> None:
    """Note on a model how its images are prepared, where timm looks for it."""
    setattr(model, "pretrained_cfg", {**getattr(model, "pretrained_cfg", {}), **preparation})  # noqa: B010 - timm's


def read_description(file: Checkpoint, model_name: str | None = None) -> Description:
    """Return what a file says about its classifier.

    If the user names another `model_name` than the file, the file's arguments do not apply. `CheckpointError` if no
    model is named or the file's must not be built, `ModelDescriptionError` if the user's does not exist.
    """
    noted = file.metadata.get("model")
    if not (model_name or noted):
        raise CheckpointError(f"{file.path} does not say which model it is of; give its name with --model")
    class_names, conversion = parse_class_names(file), conversion_of(file)
    if model_name is not None and model_name != noted:
        check_model_name(model_name)
        if noted and model_family(model_name) != model_family(noted):
            raise CheckpointError(
                f"{file.path} is of {printable(noted)[:60]}, not of {model_name}; leave --model out, or name one of "
                "the same family"
            )
        return Description(model_name, {}, class_names, conversion=conversion)
    crop_pct: float | None = parse_note(file, "crop_pct", (int, float))
    try:
        preparation = preparation_of(file)
        name, arguments, model = _build_on_meta(
            noted, parse_note(file, "model_arguments", dict) or {}, file.weights, conversion, {}
        )
        if crop_pct is not None and not _CROP.accepts(crop_pct):
            raise ModelDescriptionError(f"expected {_CROP.expected} as crop_pct, got {_shown(crop_pct)}")
        if arguments.get("global_pool") == "":
            raise ModelDescriptionError("a classifier with global_pool '' has scores for tokens, not for an image")
        check_image_cost(model, Description(name, arguments, crop_pct=crop_pct), file.weights)
    except ModelDescriptionError as error:
        raise CheckpointError(f"{file.path} describes a model that is refused: {error}") from error
    return Description(name, arguments, class_names, crop_pct, conversion, preparation)


def check_image_cost(model: nn.Module, described: Description, weights: Mapping[str, Tensor]) -> None:
    """Refuse a classifier on the meta device that takes far more than its weights to prepare or to run one image."""
    config: Mapping[str, Any] = getattr(model, "pretrained_cfg", {})
    size = described.image_size or tuple(config["input_size"][1:])
    resized = max(size) / (described.crop_pct or min(config.get("crop_pct", 1.0), 1.0))
    if resized**2 > MAX_RESIZED_PIXELS:
        raise ModelDescriptionError(f"images of {size} would be cut from pictures of {resized:,.0f}² pixels")
    image = torch.empty(1, described.arguments.get("in_chans", 3), *size, device="meta")
    try:
        check_running_cost(lambda: model.eval()(image), weights)
    except RunningCostError as error:
        raise ModelDescriptionError(f"this {described.name} is too costly to run: {error}") from error
    except _CANNOT_RUN:  # it cannot take images of its own size, or needs values: its tokens are bounded
        pass


def create_described_model(
    name: object, arguments: object, conversion: Conversion | None = None, **own: Any
) -> nn.Module:
    """Build the model that a file describes. Arguments and errors: see `check_description`."""
    model = _create(*check_description(name, arguments, conversion=conversion, **own), own)
    if conversion is not None:
        _convert(str(name), model, conversion)
    return model


def _convert(name: str, model: nn.Module, conversion: Conversion) -> None:
    try:
        conversion.apply(model)
    except _CANNOT_RUN as error:
        raise ModelDescriptionError(f"the attention of {name} cannot be converted: {printable(error)[:600]}") from error


def _create(name: str, described: Mapping[str, Any], own: Mapping[str, Any]) -> nn.Module:
    try:
        return create_model(name, **{**described, **own})
    except _CANNOT_RUN as error:
        reason = printable(error).strip()[:300] or type(error).__name__
        raise ModelDescriptionError(f"{name} cannot be built with {_shown(described)}: {reason}") from error


def check_model_size(name: str, model: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
    """Refuse a model on the meta device that would take far more memory than the weights of its file, if it has one."""
    most = MAX_PARAMETERS
    if weights is not None:
        # Twice: a file without its head, or with one of two sets of weights, still fits.
        most = min(most, 2 * sum(value.numel() for value in weights.values()) + 10_000_000)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if parameters > most:
        held = "" if weights is None else ", far more than the file holds"
        raise ModelDescriptionError(f"this {name} would have {parameters:,} parameters{held}; at most {most:,} can be")
    if (size := sum(buffer.nbytes for buffer in model.buffers())) > MAX_BUFFER_BYTES:
        raise ModelDescriptionError(
            f"this {name} would have {size:,} bytes of masks and indices; at most {MAX_BUFFER_BYTES:,} can be"
        )


def model_family(name: str) -> str | None:
    """Return the family of a model of this library; None for another."""
    match = re.match(rf"(?:{'|'.join(ATTENTIONS)})_({'|'.join(FAMILIES)})_", name)
    return None if match is None else match[1]


def _shown(value: object) -> str:
    """Return a short printable form of a value from a file."""
    if isinstance(value, Mapping):
        return "{" + some_of((f"{_shown(key)}: {_shown(item)}" for key, item in value.items()), 6) + "}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**15:
        return f"a number of about 10^{int(math.log10(abs(value)))}"
    return shortened(printable(repr(value)[:200] if isinstance(value, (list, tuple)) else repr(value)), 80)
