"""timm's image transforms and mixup.

An image leaves a worker as bytes where it can: a quarter of the traffic between processes and devices. `Normalize`
turns bytes into numbers on the device. timm is imported on first use: a check of data does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps
from torch import Tensor

from inline_attention.data.batch import Batch
from inline_attention.data.randomness import preserve_global_generators, seed_global_generators

if TYPE_CHECKING:
    from timm.data.mixup import Mixup

Transform = Callable[[Image.Image], Tensor]


def training_transform(
    size: tuple[int, int], *, mean: Sequence[float], std: Sequence[float], **timm_options: Any
) -> Transform:
    """Return timm's random crop, flip, colors and erasing.

    It makes a `[C, H, W]` tensor: uint8, or normalized if there is erasing, which fills in normalized noise.

    Args:
        size: (height, width) of the result.
        mean, std: Per channel, of values from 0 to 1; what crops and rotations leave empty is filled with the mean.
        timm_options: Options of timm's `create_transform`: scale, ratio, hflip, color_jitter, auto_augment, re_prob,
            re_mode, re_count, interpolation, …
    """
    from timm.data import auto_augment
    from timm.data.transforms_factory import create_transform

    erases = timm_options.get("re_prob", 0) > 0
    transform: Any = create_transform(
        (3, *size), is_training=True, mean=tuple(mean), std=tuple(std), normalize=erases, **timm_options
    )
    for step in transform.transforms:
        operations = [*getattr(step, "ops", ()), *chain(*getattr(step, "policy", ()))]
        for operation in operations:  # those that RandAugment, AutoAugment or AugMix choose from
            if operation.aug_fn is auto_augment.posterize:
                operation.aug_fn = _posterize
    return transform


def evaluation_options(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of `evaluation_transform` from timm's data settings of a model."""
    return {name: described[name] for name in ("interpolation", "crop_pct", "crop_mode") if name in described}


def evaluation_transform(size: tuple[int, int], **timm_options: Any) -> Transform:
    """Return timm's resizing and center crop to a `[C, H, W]` uint8 tensor of a (height, width).

    `timm_options` are those of timm's `create_transform`: crop_pct, crop_mode, interpolation, …
    """
    from timm.data.transforms_factory import create_transform

    transform: Any = create_transform((3, *size), normalize=False, **timm_options)
    return transform


def _posterize(image: Image.Image, bits_to_keep: int, **_options: Any) -> Image.Image:
    """timm asks for 0 bits at the greatest strength: a black image, which Pillow 13 refuses to make."""
    return ImageOps.posterize(image, bits_to_keep) if bits_to_keep >= 1 else Image.new(image.mode, image.size)


class SeededMixup:
    """Mixup and cutmix whose random numbers depend on (seed, rank, epoch, batch) alone."""

    def __init__(self, mixup: Mixup, *, seed: int, rank: int = 0):
        """Wrap timm's `Mixup`; each rank mixes in its own way."""
        self._mixup, self._seed, self._rank = mixup, seed, rank

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mix normalized images `[B, C, H, W]` in place; return them and the shares of the classes in each, `[B, K]`.

        They are mixed in pairs: an odd number is a ValueError.
        """
        if len(batch) % 2:
            raise ValueError(f"mixup and cutmix need an even batch size, got {len(batch)}; use {len(batch) + 1}")
        with preserve_global_generators():
            seed_global_generators("mixup", self._seed, self._rank, batch.epoch, batch.number)
            return self._mixup(batch.images, batch.targets)
