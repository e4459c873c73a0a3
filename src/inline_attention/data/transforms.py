"""timm's image transforms and mixup.

An image leaves a worker as bytes where it can: a quarter of the traffic between processes and devices. `Normalize`
turns bytes into numbers on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from PIL import Image
from timm.data import auto_augment
from timm.data.mixup import Mixup
from timm.data.transforms_factory import create_transform
from torch import Tensor

from inline_attention.data.batch import Batch
from inline_attention.data.randomness import preserve_global_generators, seed_global_generators

Transform = Callable[[Image.Image], Tensor]


def training_transform(
    size: tuple[int, int], *, mean: Sequence[float], std: Sequence[float], **timm_options: Any
) -> Transform:
    """Random crop, flip, colors and erasing, as timm does them.

    Args:
        size: (height, width) of the result.
        mean: Per channel, of values from 0 to 1; what crops and rotations leave empty is filled with it.
        std: Per channel, of values from 0 to 1.
        timm_options: Options of timm's `create_transform`: scale, ratio, hflip, color_jitter, auto_augment, re_prob,
            re_mode, re_count, interpolation, …

    Returns:
        Makes a `[C, H, W]` tensor: uint8, or normalized if there is erasing, which fills in normalized noise.
    """
    erases = timm_options.get("re_prob", 0) > 0
    transform: Any = create_transform(
        (3, *size), is_training=True, mean=tuple(mean), std=tuple(std), normalize=erases, **timm_options
    )
    for operation in _operations(transform):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return transform


def evaluation_options(described: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `evaluation_transform` from timm's data settings of a model."""
    return {name: described[name] for name in ("interpolation", "crop_pct", "crop_mode") if name in described}


def evaluation_transform(size: tuple[int, int], **timm_options: Any) -> Transform:
    """Resize and center crop, as timm does them.

    Args:
        size: (height, width) of the result.
        timm_options: Options of timm's `create_transform`: crop_pct, crop_mode, interpolation, …

    Returns:
        Makes a `[C, H, W]` uint8 tensor.
    """
    transform: Any = create_transform((3, *size), normalize=False, **timm_options)
    return transform


def _operations(transform: Any) -> Iterator[Any]:
    """The operations that RandAugment, AutoAugment or AugMix choose from."""
    for step in transform.transforms:
        yield from getattr(step, "ops", ())
        for operations in getattr(step, "policy", ()):
            yield from operations


def _posterize(image: Image.Image, bits_to_keep: int, **_options: Any) -> Image.Image:
    """timm asks for 0 bits at the greatest strength: a black image, which Pillow 13 refuses to make."""
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep)


class SeededMixup:
    """Mixup and cutmix whose random numbers depend on (seed, rank, epoch, batch) alone."""

    def __init__(self, mixup: Mixup, *, seed: int, rank: int = 0):
        """Wrap timm's `Mixup`.

        Args:
            mixup: timm's `Mixup`.
            seed: Random seed.
            rank: This process; each mixes in its own way.
        """
        self._mixup, self._seed, self._rank = mixup, seed, rank

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Mix normalized images, in place.

        Returns:
            Images `[B, C, H, W]` and the shares of the classes in each, `[B, K]`.

        Raises:
            ValueError: If the number of images is odd: they are mixed in pairs.
        """
        if len(batch) % 2:
            raise ValueError(f"mixup and cutmix need an even batch size, got {len(batch)}; use {len(batch) + 1}")
        with preserve_global_generators():
            seed_global_generators("mixup", self._seed, self._rank, batch.epoch, batch.number)
            return self._mixup(batch.images, batch.targets)
