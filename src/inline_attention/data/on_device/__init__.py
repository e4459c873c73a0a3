"""Augmentation of whole batches where they lie, without worker processes: no loop over images, no waiting for a GPU.

What happens to a sample is drawn on the CPU for a whole epoch at once, so that it is the same on every device and for
every make-up of batches; a batch picks its rows of that plan and follows them.
"""

from inline_attention.data.on_device.augmentation import BatchAugmentation, training_augmentation
from inline_attention.data.on_device.rand_augment import unsupported_policy

__all__ = ["BatchAugmentation", "training_augmentation", "unsupported_policy"]
