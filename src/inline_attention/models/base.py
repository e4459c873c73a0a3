"""Base class of all models: images of any size, batches of unequal images, and timm's contract.

Shapes: `B` batch, `N` tokens, `C` channels, `h`×`w` token grid. In a batch of unequal images, each image is at the top
left of its canvas.
"""

from __future__ import annotations

import math
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from timm.layers.format import Format, nchw_to
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from inline_attention.layers.attention import InLineAttention, LinearAttention, SoftmaxAttention, TokenAttention
from inline_attention.layers.block import Block
from inline_attention.layers.grids import Grid, as_pairs, extents_of, rectangle_mask, resample_positions
from inline_attention.layers.local_weights import BlockDiagonalLinear
from inline_attention.layers.row_shards import ContextGroup, RowShards
from inline_attention.models.registry import AttentionKind
from inline_attention.ops.tracing import is_exporting, plain_sizes
from inline_attention.ops.validation import FLOATING_DTYPES, check_count, check_dense, check_rate, unknown_name

ImageSizes = Sequence[tuple[int, int]] | Tensor


class Level(NamedTuple):
    """A level of a network: an embedding, None where it takes the tokens of the level before, and blocks.

    The embedding maps `[B, C, H, W]` and a grid to tokens and their grid, coarser by `stride`. A row of its result
    depends on no pixels beyond those of `halo` rows above and below.
    """

    embed: Callable[[Tensor, Grid], tuple[Tensor, Grid]] | None
    stride: int
    halo: int
    blocks: list[Block]


class VisionModel(nn.Module):
    """Base class of the four families. A subclass defines the embedding and the levels of the network."""

    num_prefix_tokens = 0
    largest_stride: int
    norm: nn.Module  # between the last level and the head
    global_pools: tuple[str, ...] = ("avg", "")
    context_group: ContextGroup | None = None  # ranks that share the rows of each image, see `parallelize_context`

    def __init__(
        self,
        num_features: int,
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str | None = None,
        drop_rate: float = 0.0,
    ) -> None:
        """Build the head.

        Args:
            num_features: Channels of the last level.
            num_classes: Outputs of the head; 0 for none.
            in_chans: Channels of the images.
            global_pool: One of the class's `global_pools`; the first by default. "" is no pooling.
            drop_rate: Dropout rate before the head.
        """
        super().__init__()
        check_counts(in_chans=in_chans)
        check_rate("drop_rate", drop_rate)
        check_counts(least=0, num_classes=num_classes)
        self.num_features = self.head_hidden_size = self.embed_dim = num_features
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.grad_checkpointing = False
        self.global_pool = self._checked_pool(self.global_pools[0] if global_pool is None else global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._new_head()
        self.feature_info: list[dict[str, Any]] = []
        self.register_load_state_dict_pre_hook(_convert_before_loading)

    @abstractmethod
    def network(self) -> list[Level]:
        """Return the modules of all levels in order: a block of a ViT, or a stage of a pyramid."""

    def levels(self, x: Tensor, grid: Grid, last: int, num_tokens: int | None = None) -> Iterator[tuple[Tensor, Grid]]:
        """Yield tokens `[B, N, C]` and their grid after each level 0 … last.

        The last level returns its first `num_tokens` tokens, or all. `x` are images, `grid` is the grid of pixels.
        """
        tokens = x
        for index, level in enumerate(self.network()[: last + 1]):
            if level.embed is not None:
                tokens, grid = level.embed(grid.to_map(tokens) if index else x, grid)
            if self.num_prefix_tokens and index == 0:
                tokens = torch.cat([self.prefix_tokens().expand(tokens.shape[0], -1, -1), tokens], dim=1)
            for number, block in enumerate(level.blocks, start=1):
                is_last = index == last and number == len(level.blocks)
                tokens = self.run_block(block, tokens, grid, num_tokens if is_last else None)
            yield tokens, grid

    def prefix_tokens(self) -> Tensor:
        """Return the prefix tokens `[1, P, C]` that precede the grid of the first level."""
        return next(self.parameters()).new_empty(1, 0, 0)

    @abstractmethod
    def prune_levels(self, last: int) -> None:
        """Remove the levels after `last`."""

    @classmethod
    def feature_levels(cls, **_arguments: Any) -> tuple[int, ...]:
        """Return the levels that a `features_only` backbone returns by default, given the model's arguments."""
        return 0, 1, 2, 3

    def num_head_tokens(self) -> int | None:
        """Return the number of tokens that the head reads, counted from the first; None for all."""
        return None

    @property
    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Native grid of each learned position embedding, by parameter name."""
        return {}

    def translate_state_dict(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rename the authors' keys to ours and remove entries that are not weights."""
        return dict(state_dict)

    def convert_state_dict(
        self, state_dict: Mapping[str, Tensor], position_grids: Mapping[str, tuple[int, int]] | None = None
    ) -> dict[str, Tensor]:
        """Rename the authors' keys to ours, and resample weights that depend on the image size.

        A weight that cannot be resampled stays unchanged. The later check of names and shapes reports it.
        `position_grids` are known native grids in `state_dict`, by our names. An embedding without an entry has this
        model's grid if the number of tokens is equal, else a square grid.
        """
        converted = self.translate_state_dict(state_dict)
        for name, grid in self.position_grids.items():
            if name in converted:
                saved = (position_grids or {}).get(name)
                converted[name] = _fit_positions(converted[name], saved, grid, self.num_prefix_tokens)
        return converted

    def forward(self, x: Tensor, image_sizes: ImageSizes | None = None, pixel_mask: Tensor | None = None) -> Tensor:
        """Classify images.

        Args:
            x: Images `[B, in_chans, H, W]` of any height and width.
            image_sizes: Height and width in pixels of each image of a padded batch, `B` pairs or `[B, 2]`.
            pixel_mask: Mask `[B, H, W]` instead of `image_sizes`, true in a rectangle at the top left.

        Returns:
            Logits `[B, num_classes]`.
        """
        tokens, grid = self._encode(x, image_sizes, pixel_mask, self.num_head_tokens())
        if self.global_pool == "":
            tokens, grid = self._gathered(tokens, grid)
        return self._head(self._shape_features(tokens, grid), grid.token_counts(), shards=_split_rows(grid))

    def forward_features(
        self, x: Tensor, image_sizes: ImageSizes | None = None, pixel_mask: Tensor | None = None
    ) -> Tensor:
        """Return unpooled features: `[B, N, C]` of a ViT, `[B, h, w, C]` of a pyramid; zero outside each image.

        `forward_head` turns them into the output of `forward`, if it gets the same image sizes.
        """
        return self._shape_features(*self._gathered(*self._encode(x, image_sizes, pixel_mask)))

    def forward_head(
        self,
        x: Tensor,
        pre_logits: bool = False,
        image_sizes: ImageSizes | None = None,
        pixel_mask: Tensor | None = None,
    ) -> Tensor:
        """Pool the output of `forward_features` (unless `global_pool` is "") and classify it.

        Args:
            x: Features, zero outside each image.
            pre_logits: Pool only, and return features instead of logits.
            image_sizes: Image sizes passed to `forward_features`. Without them, the mean counts the padding.
            pixel_mask: Mask passed to `forward_features`.
        """
        return self._head(x, self._count_tokens(x, image_sizes, pixel_mask), pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        *,
        return_prefix_tokens: bool = False,
        image_sizes: ImageSizes | None = None,
        pixel_mask: Tensor | None = None,
    ) -> Any:
        """Return features after several levels, in the format of timm's models.

        Args:
            x: Images `[B, in_chans, H, W]`.
            indices: Levels to return: a list, the last n, or None for all.
            norm: Apply the final norm to levels with its number of channels.
            stop_early: Stop after the last level that is returned.
            output_fmt: "NCHW", "NHWC" or "NLC" (without prefix tokens).
            intermediates_only: Return only the list, instead of (final features, list).
            return_prefix_tokens: Return pairs (feature, prefix tokens), if the model has prefix tokens.
            image_sizes: Image sizes, see `forward`.
            pixel_mask: Mask instead of `image_sizes`.
        """
        format_ = Format(output_fmt)
        if format_ not in (Format.NCHW, Format.NHWC, Format.NLC):
            raise ValueError(f"output_fmt must be 'NCHW', 'NHWC' or 'NLC', got {output_fmt!r}")
        take, last = feature_take_indices(len(self.feature_info), indices)
        tokens, grid = images, pixels = self._prepare(x, image_sizes, pixel_mask)
        intermediates: list[Tensor | tuple[Tensor, Tensor]] = []
        last = last if stop_early else len(self.feature_info) - 1
        for index, (tokens, grid) in enumerate(self.levels(images, pixels, last)):
            if index in take:
                normed = self.norm(tokens) if norm and tokens.shape[-1] == self.num_features else tokens
                normed, whole = self._gathered(normed, grid)
                image = nchw_to(whole.to_map(normed[:, self.num_prefix_tokens :]), format_)
                prefix = normed[:, : self.num_prefix_tokens]
                intermediates.append((image, prefix) if return_prefix_tokens and self.num_prefix_tokens else image)
        if intermediates_only:
            return intermediates
        return self._shape_features(*self._gathered(self.norm(tokens), grid)), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove all layers that the given levels do not need, and return the absolute indices of the levels."""
        take, last = feature_take_indices(len(self.feature_info), indices)
        self.prune_levels(last)
        self.feature_info = self.feature_info[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return list(take)

    def save_pretrained(self, folder: str | os.PathLike[str], **content: Any) -> None:
        """Write the model to a folder in the hub's layout. Arguments: see `models.hub.save_pretrained`."""
        from inline_attention.models.hub import save_pretrained  # it needs this module

        save_pretrained(self, folder, **content)

    def push_to_hub(self, repository: str, **options: Any) -> str:
        """Upload the model to the Hugging Face Hub. Arguments: see `models.hub.push_to_hub`."""
        from inline_attention.models.hub import push_to_hub

        return push_to_hub(self, repository, **options)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], **arguments: Any) -> Self:
        """Create a model with its weights from a folder or the hub. Arguments: see `models.hub.from_pretrained`."""
        from inline_attention.models.hub import from_pretrained

        model = from_pretrained(source, **arguments)
        if not isinstance(model, cls):
            raise ValueError(f"{source} is of {type(model).__name__}, not of {cls.__name__}; use create_model")
        return model

    def get_classifier(self) -> nn.Module:
        """Return the last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier (0 classes: remove it), and the pooling if given."""
        check_counts(least=0, num_classes=num_classes)
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
        self.num_classes = num_classes
        reference = next(self.parameters())
        self.head = self._new_head(device=reference.device, dtype=reference.dtype)
        self.head.apply(initialize)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute each block in the backward pass: less memory, more time."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay."""
        return {name for name, _ in self.named_parameters() if name.endswith("relative_position_bias_table")}

    def run_block(self, block: nn.Module, tokens: Tensor, grid: Grid, num_tokens: int | None = None) -> Tensor:
        """Run a block on tokens `[B, N, C]`, with gradient checkpointing if enabled; return `num_tokens`, or all."""
        mask = grid.token_mask(self.num_prefix_tokens)
        arguments = grid.size, mask, num_tokens, grid.extents, _split_rows(grid)
        return checkpoint(block, tokens, *arguments) if self.grad_checkpointing else block(tokens, *arguments)

    def _encode(
        self, x: Tensor, image_sizes: ImageSizes | None, pixel_mask: Tensor | None, num_tokens: int | None = None
    ) -> tuple[Tensor, Grid]:
        tokens, grid = images, pixels = self._prepare(x, image_sizes, pixel_mask)
        for tokens, grid in self.levels(images, pixels, len(self.feature_info) - 1, num_tokens):  # noqa: B007
            pass  # the last level is used below
        return self.norm(tokens), grid

    def _gathered(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Return the tokens of all ranks and their grid, if ranks share the rows."""
        return grid.gather_tokens(tokens, self.num_prefix_tokens) if isinstance(grid, RowShards) else (tokens, grid)

    def _shape_features(self, tokens: Tensor, grid: Grid) -> Tensor:
        return grid.to_map(tokens).permute(0, 2, 3, 1)

    def _head(
        self, features: Tensor, counts: Tensor | None, pre_logits: bool = False, shards: RowShards | None = None
    ) -> Tensor:
        """Pool and classify features that are zero outside each image; `counts` `[B]` are its tokens, None for all.

        With `shards`, the features are those of this rank's rows, and the counts are given for all rows.
        """
        pooled = features
        if self.global_pool == "token":
            pooled = features[:, 0]
        elif self.global_pool == "avg":
            pooled = _mean(features.flatten(1, -2)[:, self.num_prefix_tokens :], counts, shards)
        pooled = self.head_drop(pooled)
        return pooled if pre_logits else self.head(pooled)

    def _count_tokens(
        self, features: Tensor, image_sizes: ImageSizes | None, pixel_mask: Tensor | None
    ) -> Tensor | None:
        """Return the number of tokens `[B]` of each image in the output of `forward_features`; None if all are real.

        The size of the canvas is unknown here, so the sizes are checked against the number of tokens.
        """
        extents = _image_extents(features.shape[0], features.device, image_sizes, pixel_mask)
        if extents is None:
            return None
        number = math.prod(features.shape[1:-1]) - self.num_prefix_tokens
        counts = [math.prod(Grid(*extent).coarser(self.largest_stride).size) for extent in extents]
        if any(min(extent) < 1 for extent in extents) or any(count > number for count in counts):
            raise ValueError(
                f"images of {extents} pixels must have between 1 and {number} tokens (the number in the features); "
                "pass what forward_features was given"
            )
        return torch.tensor(counts, device=features.device)

    def _new_head(self, **place: Any) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes, **place) if self.num_classes > 0 else nn.Identity()

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in self.global_pools:
            known = ", ".join(map(repr, self.global_pools))
            raise ValueError(f"global_pool of {type(self).__name__} must be one of {known}, got {global_pool!r}")
        return global_pool

    def _prepare(self, x: Tensor, image_sizes: ImageSizes | None, pixel_mask: Tensor | None) -> tuple[Tensor, Grid]:
        """Check the images and set all pixels outside of each image to zero."""
        if self.context_group is not None and isinstance(x, torch.fx.Proxy):
            raise ValueError("torch.fx cannot trace a model whose rows are shared by ranks; trace before parallelizing")
        return _prepare_images(x, image_sizes, pixel_mask, self.in_chans, self.largest_stride, self.context_group)


@torch.fx.wrap
def _prepare_images(
    x: Tensor,
    image_sizes: ImageSizes | None,
    pixel_mask: Tensor | None,
    in_chans: int,
    least_side: int,
    context_group: ContextGroup | None,
) -> tuple[Tensor, Grid]:
    check_dense("images", x)
    sizes = plain_sizes(x.shape)
    if len(sizes) != 4 or sizes[1] != in_chans:
        raise ValueError(
            f"images must be [B, {in_chans}, H, W], got shape {tuple(x.shape)}; "
            "add a batch dimension with x[None], or create the model with in_chans=..."
        )
    batch, _, height, width = sizes
    grid = Grid(height, width, _image_extents(batch, x.device, image_sizes, pixel_mask, (height, width)), x.device)
    shortest = min(height, width) if grid.extents is None else min(map(min, grid.extents))
    if not is_exporting() and shortest < least_side:
        raise ValueError(
            f"images must be at least {least_side} pixels high and wide, got "
            f"{height}×{width if grid.extents is None else f'{width} with image sizes down to {shortest}'}; "
            "enlarge them (--img-size in training, else --size), or pad them and pass image_sizes"
        )
    if context_group is not None:
        x, grid = context_group.place(x, grid)
    mask = grid.mask()
    if mask is not None:
        x = x.masked_fill(~mask.unflatten(1, grid.size)[:, None], 0)
    return x, grid


@torch.fx.wrap
def _mean(tokens: Tensor, counts: Tensor | None, shards: RowShards | None) -> Tensor:
    """Return the mean `[B, C]` of tokens that are zero outside each image."""
    if shards is not None and counts is None:
        counts = torch.full(tokens.shape[:1], math.prod(shards.whole.size), device=tokens.device)
    if counts is None:
        return tokens.mean(1)
    total = tokens.sum(1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    total = total if shards is None else shards.group.sum(total)
    return (total / counts[:, None]).to(tokens.dtype)


def _split_rows(grid: Grid) -> RowShards | None:
    """Return the grid if ranks share its rows."""
    return grid if isinstance(grid, RowShards) and grid.is_split else None


def global_attention(
    kind: AttentionKind, dim: int, num_heads: int, options: Mapping[str, Any] | None, **arguments: Any
) -> TokenAttention:
    """Build the layer that attends to the whole map, with further arguments `options`."""
    if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"attention_options must be a mapping of the layer's arguments, got {options!r}")
    layers = {"inline": InLineAttention, "softmax": SoftmaxAttention, "linear": LinearAttention}
    if kind not in layers:
        raise unknown_name("attention", kind, tuple(layers))
    return layers[kind](dim, num_heads, **(arguments | dict(options or {})))


def check_counts(least: int = 1, **counts: object) -> None:
    """Raise ValueError unless all arguments are integers of at least `least`."""
    for name, value in counts.items():
        check_count(name, value, least)


def check_stages(stages: int = 4, least: int = 1, **counts: object) -> None:
    """Raise ValueError unless all arguments are sequences of integers of at least `least`, one for each stage."""
    for name, value in counts.items():
        if not isinstance(value, (tuple, list)) or len(value) != stages:  # pyright: ignore[reportUnknownArgumentType]
            raise ValueError(f"{name} must be {stages} integers, one for each stage, got {value!r}")
        for count in cast("Sequence[object]", value):
            check_count(name, count, least)


def image_sides(img_size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) of an image size, which may be one number."""
    sides = tuple(img_size) if isinstance(img_size, Sequence) else (img_size, img_size)
    for side in sides:
        check_count("img_size", side)
    if len(sides) != 2:
        raise ValueError(f"img_size must be one side or (height, width), got {img_size!r}")
    return sides[0], sides[1]


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """Return the stochastic depth rate of each block, from 0 at the first to `rate` at the last."""
    check_rate("drop_path_rate", rate)
    return [rate * index / max(depth - 1, 1) for index in range(depth)]


def initialize(module: nn.Module) -> None:
    """Initialize linear layers and norms; convolutions keep PyTorch's initialization."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, BlockDiagonalLinear):
        module.reset_parameters()


def blocks_of(model: nn.Module) -> list[Block]:
    """Return all transformer blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Block)]


def _fit_positions(
    positions: Tensor, saved: tuple[int, int] | None, grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Resample position embeddings `[1, prefix + h·w, C]` to `grid`; return them unchanged if that is impossible."""
    if positions.dim() != 3 or positions.dtype not in FLOATING_DTYPES or positions.numel() == 0:
        return positions
    tokens = positions.shape[1] - num_prefix_tokens
    if saved is None or min(saved) < 1 or saved[0] * saved[1] != tokens:
        side = math.isqrt(max(tokens, 0))
        if tokens == grid[0] * grid[1] or side * side != tokens or tokens < 1:
            return positions
        saved = side, side
    return resample_positions(positions, saved, grid, num_prefix_tokens)


def _convert_before_loading(model: VisionModel, state_dict: dict[str, Any], prefix: str, *_unused: Any) -> None:
    """Make `load_state_dict` accept the authors' names. PyTorch's hooks change the dict in place."""
    own = {key.removeprefix(prefix): state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    for key, value in model.convert_state_dict(own).items():
        state_dict[prefix + key] = value


def _as_int(number: Any) -> int:
    # torch.compile recompiles for every new number that passes through operator.index.
    return number if isinstance(number, int) else operator.index(number)


def _image_extents(
    batch: int,
    device: torch.device,
    image_sizes: ImageSizes | None,
    pixel_mask: Tensor | None,
    canvas: tuple[int, int] | None = None,
) -> list[tuple[int, int]] | None:
    """Return height and width of each image, from `image_sizes` or `pixel_mask`; None if neither is given."""
    if image_sizes is None and pixel_mask is None:
        return None
    if image_sizes is not None and pixel_mask is not None:
        raise ValueError("give image_sizes or pixel_mask, not both")
    if pixel_mask is not None:
        check_dense("pixel_mask", pixel_mask)
        size = pixel_mask.shape[1:] if canvas is None else canvas
        if pixel_mask.dim() != 3 or pixel_mask.shape != (batch, *size):
            raise ValueError(f"pixel_mask must be [B, H, W] = {(batch, *size)}, got {tuple(pixel_mask.shape)}")
        pixel_mask = pixel_mask.to(device, torch.bool)
        extents = extents_of(pixel_mask)
        rectangles = rectangle_mask((pixel_mask.shape[1], pixel_mask.shape[2]), extents, device)
        if not torch.equal(rectangles, pixel_mask.flatten(1)):
            raise ValueError("pixel_mask must be true in one rectangle at the top left of each image, and only there")
        return extents
    assert image_sizes is not None
    expected = f"image_sizes must be {batch} pairs (height, width) of integers"
    try:
        listed = as_pairs(image_sizes) if isinstance(image_sizes, Tensor) else image_sizes
        extents = [(_as_int(height), _as_int(width)) for height, width in listed]
    except (TypeError, ValueError, RuntimeError) as error:  # the last from sparse or nested tensors
        raise ValueError(f"{expected}, got {image_sizes!r:.200}") from error
    if len(extents) != batch:
        raise ValueError(f"{expected}, got {len(extents)}")
    if canvas is not None and any(height > canvas[0] or width > canvas[1] for height, width in extents):
        raise ValueError(f"image_sizes must fit into the canvas {canvas[0]}×{canvas[1]}, got {extents}")
    return extents
