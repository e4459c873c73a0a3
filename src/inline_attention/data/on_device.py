"""Small datasets kept decoded on the device, where whole batches are augmented, each image in its own way.

The random numbers of all samples are drawn on the CPU for a whole epoch at once (the plan). They are the same on every
device and for every batch size. A batch takes its rows of the plan, and the CPU does not wait for the GPU. The random
transforms of torchvision draw once per batch, and most of its functions take one argument for all images.

Shapes: `N` samples, `P` columns of a plan, `R` rectangles, `B` batch, `C` channels, `H`, `W` height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as transforms

from inline_attention.data.batch import Batch, Normalize
from inline_attention.data.broken import BrokenImages
from inline_attention.data.loading import ImageLoader, Loader
from inline_attention.data.randomness import derived_seed
from inline_attention.data.sampling import Batches, EvaluationBatches
from inline_attention.data.sources import ImageSource
from inline_attention.data.transforms import evaluation_transform

DECODING_BATCH = 256
LARGEST_MAGNITUDE = 10.0
# Not empty: some versions of timm change an empty one, and use it again for the next description.
TIMM_OPTIONS = {"img_mean": (0, 0, 0)}
SMALLEST_ERASED, LARGEST_ERASED = 0.02, 1 / 3  # shares of the image, all rectangles together
LARGEST_ASPECT = 1 / 0.3  # of erased rectangles
NOISE_VALUES = 1 << 20  # of the table that fills erased pixels


@dataclass(frozen=True)
class MemoryImages:
    """Decoded images.

    Attributes:
        images: `[N, C, H, W]` uint8.
        targets: `[N]` class numbers.
        indices: `[N]` numbers in the dataset they are from.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor

    def __len__(self) -> int:
        return len(self.targets)


def decode_to_memory(
    source: ImageSource,
    size: tuple[int, int],
    *,
    broken: BrokenImages,
    workers: int = 0,
    interpolation: str = "bicubic",
) -> MemoryImages:
    """Decode a whole dataset; broken images are left out.

    Args:
        source: The images.
        size: (height, width) to which those of another size are resized, without regard to their shape.
        broken: Collects broken images.
        workers: Processes to decode with.
        interpolation: "bicubic", "bilinear" or "nearest".

    Raises:
        BrokenImagesError: If more are broken than allowed.
    """
    transform = evaluation_transform(size, crop_pct=1.0, crop_mode="squash", interpolation=interpolation)
    batches = EvaluationBatches(len(source), DECODING_BATCH)
    loader = ImageLoader(source, transform, batches, broken=broken, replace_broken=False, workers=workers)
    decoded = [(batch.images, batch.targets, batch.indices) for batch in loader.epoch()]
    loader.close()
    images, targets, indices = (torch.cat(parts) for parts in zip(*decoded, strict=True))
    return MemoryImages(images.contiguous(), targets, indices)


class MemoryLoader(Loader[Batch]):
    """Batches of decoded images, augmented if asked.

    The augmentation of a sample depends only on (seed, epoch, index), not on the device, the batch size or the number
    of processes.
    """

    def __init__(
        self,
        data: MemoryImages,
        batches: Batches,
        *,
        augmentation: BatchAugmentation,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        """Move the images to the device.

        Args:
            data: The images.
            batches: Samples of each batch, by their number in `data`.
            augmentation: Augmentation of each batch; without any steps it only normalizes.
            device: Device that keeps the images and makes batches.
            seed: Random seed of the augmentation.
        """
        self._device = torch.device(device)
        self._images, self._targets, self._indices = (
            tensor.to(self._device) for tensor in (data.images, data.targets, data.indices)
        )
        self._augmentation = augmentation.to(self._device)
        self._batches, self._seed = batches, seed

    def epoch(self, epoch: int = 0, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` on."""
        plans = self._augmentation.draw(len(self._targets), self._seed, epoch)
        plans = [plan.to(self._device) for plan in plans]
        for key in self._batches.keys(epoch, start_batch):
            chosen = key.indices.to(self._device, non_blocking=True)
            images = self._augmentation(self._images[chosen], [plan[chosen] for plan in plans])
            yield Batch(epoch, key.number, images, self._targets[chosen], self._indices[chosen])


class Step(nn.Module, ABC):
    """One random change of images."""

    purpose: ClassVar[str]  # part of the random seed, so that adding a step changes nothing about the others

    @abstractmethod
    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the plan of `count` samples, `[N, P]` float32 on the CPU."""

    @abstractmethod
    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Change images `[B, C, H, W]` as their rows of the plan `[B, P]` say. The dtype stays the same."""


class BatchAugmentation(nn.Module):
    """Steps on bytes, normalization, steps on normalized numbers."""

    def __init__(self, on_bytes: Sequence[Step], normalize: Normalize, on_numbers: Sequence[Step] = ()):
        """Combine the steps."""
        super().__init__()
        self._steps = nn.ModuleList([*on_bytes, normalize, *on_numbers])

    def draw(self, count: int, seed: int, epoch: int) -> list[Tensor]:
        """Draw the plan of every step for `count` samples in an epoch: `[N, P]` each, on the CPU."""
        steps = [step for step in self._steps if isinstance(step, Step)]
        seeds = [derived_seed(step.purpose, seed, epoch) for step in steps]
        return [step.draw(count, torch.Generator().manual_seed(own)) for step, own in zip(steps, seeds, strict=True)]

    def forward(self, images: Tensor, plans: Sequence[Tensor]) -> Tensor:
        """Augment and normalize.

        Args:
            images: `[B, C, H, W]` uint8.
            plans: `[B, P]` of each step: the rows of these images.

        Returns:
            `[B, C, H, W]` normalized.
        """
        rows = iter(plans)
        for step in self._steps:
            images = step(images, next(rows)) if isinstance(step, Step) else step(images)
        return images


def training_augmentation(
    size: tuple[int, int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    crop_padding: int = 0,
    hflip: float = 0.0,
    vflip: float = 0.0,
    auto_augment: str | None = None,
    color_jitter: float = 0.0,
    re_prob: float = 0.0,
    re_mode: Literal["pixel", "rand", "const"] = "pixel",
    re_count: int = 1,
) -> BatchAugmentation:
    """Padded crop, flips, colors and erasing, in the words of `training_transform`.

    Args:
        size: (height, width) of the images.
        mean: Per channel, of values from 0 to 1.
        std: Per channel, of values from 0 to 1.
        crop_padding: Black pixels added on each side, from which the original size is cropped.
        hflip: Probability of a left-right flip.
        vflip: Probability of an upside-down flip.
        auto_augment: timm's description of RandAugment.
        color_jitter: Strength of changes of brightness, contrast and saturation; as in timm, none beside
            `auto_augment`.
        re_prob: Probability of erasing rectangles.
        re_mode: Fill of the rectangles: noise per pixel, one random color, or the mean.
        re_count: Largest number of them.
    """
    on_bytes: list[Step] = []
    if crop_padding or hflip or vflip:
        on_bytes.append(PaddedCropAndFlip(crop_padding, hflip=hflip, vflip=vflip))
    if auto_augment is not None:
        on_bytes.append(RandAugment(auto_augment, size=size, mean=mean))
    elif color_jitter:
        on_bytes.append(ColorJitter(color_jitter))
    erasing = [RandomErasing(re_prob, size=size, mode=re_mode, largest_count=re_count)] if re_prob else []
    return BatchAugmentation(on_bytes, Normalize(mean, std), erasing)


class PaddedCropAndFlip(Step):
    """Adds a black border, crops the original size out of that, and flips the result."""

    purpose = "crop and flip"

    def __init__(self, padding: int, *, hflip: float = 0.0, vflip: float = 0.0):
        super().__init__()
        self._padding, self._hflip, self._vflip = padding, hflip, vflip

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Top and left of the crop in the padded image, then 1 or 0 for each flip."""
        corners = torch.randint(2 * self._padding + 1, (count, 2), generator=generator)
        mirrored = torch.rand(count, 1, generator=generator) < self._hflip
        upside_down = torch.rand(count, 1, generator=generator) < self._vflip
        return torch.cat([corners, mirrored, upside_down], dim=1).float()

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Crop and flip by one lookup; the result is in channels-last order."""
        top, left, mirrored, upside_down = plan.long()[:, :, None].unbind(1)
        height, width = images.shape[-2:]
        rows, columns = (torch.arange(side, device=images.device) for side in (height, width))
        rows = torch.where(upside_down > 0, rows.flip(0), rows) + top  # [B, H]
        columns = torch.where(mirrored > 0, columns.flip(0), columns) + left
        padded = F.pad(images, (self._padding,) * 4)
        samples = torch.arange(len(images), device=images.device)
        cropped = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # [B, H, W, C]
        return cropped.permute(0, 3, 1, 2)


def _blend(images: Tensor, duller: Tensor | float, factors: Tensor) -> Tensor:
    """Mix bytes with a duller image: factor 0 returns the duller one, 1 the image, and more exaggerates it."""
    return (duller + factors * (images - duller)).clamp(0, 255).to(torch.uint8)


def _gray(images: Tensor) -> Tensor:
    return transforms.rgb_to_grayscale(images.float()).round()


def _smoothed(images: Tensor) -> Tensor:
    """Each pixel counts five times, its eight neighbors once; the outermost pixels stay as they are."""
    smoothed = images.float()
    if min(images.shape[-2:]) >= 3:
        inner = smoothed[..., 1:-1, 1:-1]
        inner.copy_(((9 * F.avg_pool2d(smoothed, 3, 1) + 4 * inner) / 13).round())
    return smoothed


# Changes of bytes `[B, 3, H, W]` by an argument for each image, `[B, 1, 1, 1]`.
COLOR_CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": lambda images, factor: _blend(images, 0.0, factor),
    "contrast": lambda images, factor: _blend(images, _gray(images).mean((1, 2, 3), keepdim=True).round(), factor),
    "color": lambda images, factor: _blend(images, _gray(images), factor),
    "sharpness": lambda images, factor: _blend(images, _smoothed(images), factor),
    "posterize": lambda images, mask: images & mask.to(torch.uint8),
    "solarize": lambda images, threshold: torch.where(images < threshold, images, 255 - images),
    "solarize add": lambda images, added: torch.where(images < 128, images + added.to(torch.uint8), images),
    "auto contrast": lambda images, _: transforms.autocontrast(images),
    "equalize": lambda images, _: transforms.equalize(images),
}
JITTERED = ("brightness", "contrast", "color")


def recolor(images: Tensor, numbers: Tensor, arguments: Tensor, names: Iterable[str] = COLOR_CHANGES) -> Tensor:
    """Change images `[B, 3, H, W]` uint8, each by the change of its number `[B]`, from 1 on, and its argument `[B]`.

    Images of another number stay as they are. All changes are made to all images: to look for those that need one, the
    CPU would have to wait for the GPU.
    """
    numbers, arguments = numbers[:, None, None, None], arguments[:, None, None, None]
    recolored = images
    for number, name in enumerate(names, start=1):
        recolored = torch.where(numbers == number, COLOR_CHANGES[name](images, arguments), recolored)
    return recolored


def warp(images: Tensor, matrices: Tensor, fill: Tensor) -> Tensor:
    """Resample images `[B, C, H, W]` uint8 bilinearly; points from outside are filled with `fill` `[C]`.

    Matrices `[B, 6]` are a, b, c, d, e, f as Pillow has them: the point (x, y) of the result is taken from
    (ax + by + c, dx + ey + f), in pixels from the upper left corner.
    """
    height, width = images.shape[-2:]
    # Not by `affine_grid`: its matrix product may use TensorFloat32, whose three digits are too few for a position.
    x = torch.arange(width, device=images.device) + 0.5  # centers of pixels
    y = (torch.arange(height, device=images.device) + 0.5)[:, None]
    a, b, c, d, e, f = matrices[:, :, None, None].unbind(1)
    from_x = (a * x + b * y + c) * (2 / width) - 1  # [B, H, W] from -1 at one border to 1 at the other
    from_y = (d * x + e * y + f) * (2 / height) - 1
    grid = torch.stack([from_x, from_y], dim=-1)
    taken = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    inside = (from_x.abs() <= 1) & (from_y.abs() <= 1)
    return torch.where(inside[:, None], taken, fill[:, None, None]).round().to(torch.uint8)


class ColorJitter(Step):
    """Changes brightness, contrast and saturation by factors from 1 - strength, but at least 0, to 1 + strength."""

    purpose = "colour jitter"  # seeds depend on the text

    def __init__(self, strength: float):
        super().__init__()
        self._lowest, self._highest = max(0.0, 1 - strength), 1 + strength

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Three numbers of changes in random order, then their factors."""
        order, shares = torch.rand(2, count, len(JITTERED), generator=generator)
        return torch.cat([1 + order.argsort(dim=1), self._lowest + (self._highest - self._lowest) * shares], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Blend three times."""
        numbers, factors = plan.chunk(2, dim=1)
        for turn in range(len(JITTERED)):
            images = recolor(images, numbers[:, turn], factors[:, turn], JITTERED)
        return images


class _Strength(NamedTuple):
    """Strength for each sample, `[N]` from 0 to 1, or more if a description allows; and the size of images."""

    level: Tensor
    signed: Tensor
    height: int
    width: int


def _factor(strength: _Strength) -> tuple[Tensor]:
    return (0.1 + 1.8 * strength.level,)


def _increasing_factor(strength: _Strength) -> tuple[Tensor]:
    """Factor that moves away from 1 with the strength, on either side."""
    return ((1 + 0.9 * strength.signed).clamp(min=0.1),)


def _high_bits(count: Tensor) -> tuple[Tensor]:
    """A mask that keeps the `count` highest of eight bits."""
    return (256 - 2.0 ** (8 - count.clamp(0, 8)),)


def _rotation(strength: _Strength) -> tuple[Tensor, ...]:
    """Counter-clockwise about the center, up to 30 degrees."""
    angle = -math.radians(30) * strength.signed
    x, y = strength.width / 2, strength.height / 2
    cos, sin = angle.cos(), angle.sin()
    return cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y


# The operations of RandAugment (Cubuk et al., 2019) by timm's names: the change, its arguments by timm's strengths.
# Results differ from Pillow's by at most one unit of 255.
_RAND_AUGMENT: dict[str, tuple[str, Callable[[_Strength], tuple[Tensor | float, ...]]]] = {
    "Brightness": ("brightness", _factor),
    "Contrast": ("contrast", _factor),
    "Color": ("color", _factor),
    "Sharpness": ("sharpness", _factor),
    "BrightnessIncreasing": ("brightness", _increasing_factor),
    "ContrastIncreasing": ("contrast", _increasing_factor),
    "ColorIncreasing": ("color", _increasing_factor),
    "SharpnessIncreasing": ("sharpness", _increasing_factor),
    "AutoContrast": ("auto contrast", lambda _: ()),
    "Equalize": ("equalize", lambda _: ()),
    "Invert": ("solarize", lambda _: ()),
    "Posterize": ("posterize", lambda by: _high_bits((4 * by.level).floor())),
    "PosterizeIncreasing": ("posterize", lambda by: _high_bits(4 - (4 * by.level).floor())),
    "Solarize": ("solarize", lambda by: ((256 * by.level).floor(),)),
    "SolarizeIncreasing": ("solarize", lambda by: (256 - (256 * by.level).floor(),)),
    "SolarizeAdd": ("solarize add", lambda by: ((110 * by.level).floor().clamp(max=128),)),
    "Rotate": ("warp", _rotation),
    "ShearX": ("warp", lambda by: (1.0, 0.3 * by.signed, 0.0, 0.0, 1.0, 0.0)),
    "ShearY": ("warp", lambda by: (1.0, 0.0, 0.0, 0.3 * by.signed, 1.0, 0.0)),
    "TranslateXRel": ("warp", lambda by: (1.0, 0.0, 0.45 * by.width * by.signed, 0.0, 1.0, 0.0)),
    "TranslateYRel": ("warp", lambda by: (1.0, 0.0, 0.0, 0.0, 1.0, 0.45 * by.height * by.signed)),
}
ARGUMENTS = 6  # of a warp; others have fewer
CHANGES = (*COLOR_CHANGES, "warp")  # numbered from 1
WARP = len(CHANGES)


class RandAugment(Step):
    """Some operations, chosen at random, on images of bytes."""

    purpose = "RandAugment"
    fill: Tensor

    def __init__(self, description: str, *, size: tuple[int, int], mean: Sequence[float]):
        """Read timm's description; the mean fills what a warp of images of a (height, width) leaves empty.

        Raises:
            ValueError: If the policy is not one that batches can take.
        """
        super().__init__()
        reason = unsupported_policy(description)
        if reason is not None:
            raise ValueError(f"{description!r} {reason}")
        policy = _read_policy(description)
        first = policy.ops[0]
        self._names = [operation.name for operation in policy.ops]
        self._layers, self._probability, self._magnitude = policy.num_layers, first.prob, float(first.magnitude)
        self._spread, self._largest = first.magnitude_std, first.magnitude_max or LARGEST_MAGNITUDE
        self._size = size
        self.register_buffer("fill", torch.tensor([float(min(255, round(255 * value))) for value in mean]))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """For each layer the number of the change, 0 for none, and its arguments."""
        return torch.cat([self._draw_layer(count, generator) for _ in range(self._layers)], dim=1)

    def _draw_layer(self, count: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self._names), (count,), generator=generator)
        is_done = torch.rand(count, generator=generator) < self._probability
        sign = torch.where(torch.rand(count, generator=generator) < 0.5, 1.0, -1.0)
        level = self._draw_magnitudes(count, generator) / LARGEST_MAGNITUDE
        plan = torch.zeros(count, 1 + ARGUMENTS)
        for number, name in enumerate(self._names):
            rows = is_done & (chosen == number)
            change, arguments = _RAND_AUGMENT[name]
            strength = _Strength(level[rows], (level * sign)[rows], *self._size)
            for column, value in enumerate((1 + CHANGES.index(change), *arguments(strength))):
                plan[rows, column] = value
        return plan

    def _draw_magnitudes(self, count: int, generator: torch.Generator) -> Tensor:
        if math.isinf(self._spread):  # timm's way to ask for any up to the one that is named
            return torch.rand(count, generator=generator) * min(self._magnitude, self._largest)
        magnitudes = self._magnitude + self._spread * torch.randn(count, generator=generator)
        return magnitudes.clamp(0, self._largest)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Warp or recolor, layer by layer."""
        for layer in plan.chunk(self._layers, dim=1):
            numbers, arguments = layer[:, 0], layer[:, 1:]
            recolored = recolor(images, numbers, arguments[:, 0])
            is_warped = (numbers == WARP)[:, None, None, None]
            images = torch.where(is_warped, warp(images, arguments, self.fill), recolored)
        return images


def _read_policy(description: str) -> Any:
    from timm.data.auto_augment import rand_augment_transform  # on first use: a check of data does not wait for it

    return rand_augment_transform(description, dict(TIMM_OPTIONS))


def unsupported_policy(description: str) -> str | None:
    """Return why batches cannot be augmented as described; None if they can."""
    if not description.startswith("rand"):
        return "is not RandAugment, the only policy for whole batches; use one such as rand-m9-mstd0.5-inc1"
    try:
        policy = _read_policy(description)
    except Exception as error:  # timm's parser asserts
        return f"is no description that timm can read ({error or type(error).__name__}); try rand-m9-mstd0.5-inc1"
    if policy.num_layers < 1:
        return "does nothing; use null for that"
    if policy.choice_weights is not None or any(operation.name not in _RAND_AUGMENT for operation in policy.ops):
        return "chooses from a set of its own, which whole batches cannot; leave its part that starts with t out"
    return None


class RandomErasing(Step):
    """Fills rectangles of normalized images with noise ("pixel"), one random color each ("rand"), or zeros ("const").

    An image has from 1 to `largest_count` rectangles, which are the smaller the more there are.
    """

    purpose = "erasing"
    noise: Tensor

    def __init__(
        self, probability: float, *, size: tuple[int, int], mode: Literal["pixel", "rand", "const"], largest_count: int
    ):
        super().__init__()
        self._probability, self._size, self._mode, self._largest_count = probability, size, mode, largest_count
        generator = torch.Generator().manual_seed(derived_seed("noise"))
        self.register_buffer("noise", torch.randn(NOISE_VALUES, generator=generator))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """A place in the noise, then top, bottom, left and right of each rectangle; empty ones where there is none.

        Where a rectangle does not fit timm tries others; here it is cut to fit, which is rare.
        """
        rectangles = self._largest_count
        place = torch.randint(NOISE_VALUES, (count, 1), generator=generator)
        erased = torch.rand(count, 1, generator=generator) < self._probability
        wanted = torch.randint(1, rectangles + 1, (count, 1), generator=generator)
        share, aspect, down, right = torch.rand(4, count, rectangles, generator=generator)
        height, width = self._size
        area = height * width * (SMALLEST_ERASED + (LARGEST_ERASED - SMALLEST_ERASED) * share) / wanted
        aspect = torch.exp(math.log(LARGEST_ASPECT) * (2 * aspect - 1))
        present = erased & (torch.arange(rectangles) < wanted)
        tall = (area * aspect).sqrt().round().clamp(max=height - 1) * present
        wide = (area / aspect).sqrt().round().clamp(max=width - 1) * present
        top = (down * (height - tall + 1)).floor()
        left = (right * (width - wide + 1)).floor()
        corners = torch.stack([top, top + tall, left, left + wide], dim=2)  # [N, R, 4]
        return torch.cat([place, corners.flatten(1)], dim=1)

    def forward(self, images: Tensor, plan: Tensor) -> Tensor:
        """Fill the rectangles."""
        height, width = images.shape[2:]
        rows = torch.arange(height, device=images.device)[:, None]
        columns = torch.arange(width, device=images.device)
        corners = plan[:, 1:].view(len(plan), -1, 4)
        fills = self._fills(plan[:, 0].long(), images.shape).to(images.dtype)
        for rectangle in range(self._largest_count):
            top, bottom, left, right = corners[:, rectangle, :, None, None].unbind(1)
            inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)  # [B, H, W]
            images = torch.where(inside[:, None], fills[:, rectangle], images)
        return images

    def _fills(self, places: Tensor, shape: torch.Size) -> Tensor:
        """Return the fill of rectangles, `[B, R, C, H or 1, W or 1]`."""
        _, channels, height, width = shape
        if self._mode == "pixel":
            noise = self.noise_from(places, (1, channels, height, width))
            return noise.expand(-1, self._largest_count, -1, -1, -1)
        if self._mode == "rand":
            return self.noise_from(places, (self._largest_count, channels, 1, 1))
        return self.noise.new_zeros(len(places), self._largest_count, channels, 1, 1)

    def noise_from(self, places: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Read noise `[B, *shape]` of zero mean and unit variance from a table, each row from a place `[B]` on."""
        positions = places[:, None] + torch.arange(math.prod(shape), device=places.device)
        return self.noise[positions % NOISE_VALUES].view(-1, *shape)
