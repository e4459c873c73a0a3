import pytest
import torch

from data.conftest import write_pictures
from inline_attention.data.broken import BrokenImages, BrokenImagesError
from inline_attention.data.datasets import open_dataset
from inline_attention.data.on_device import MemoryImages, MemoryLoader, decode_to_memory, training_augmentation
from inline_attention.data.sampling import EvaluationBatches, TrainingBatches

STATISTICS = {"mean": [0.0] * 3, "std": [1.0] * 3}
# Everything that could depend on where in which batch an image lies.
AUGMENTATION = {"crop_padding": 2, "hflip": 0.5, "auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, **STATISTICS}


def random_images(length=20):
    images = torch.randint(0, 255, (length, 3, 8, 6), dtype=torch.uint8)
    return MemoryImages(images, torch.arange(length) % 5, torch.arange(length))


def test_digits_are_decoded_as_they_are():
    source = open_dataset("digits", split="validation")
    data = decode_to_memory(source, (8, 8), broken=BrokenImages(len(source)))
    assert torch.equal(data.images.permute(0, 2, 3, 1), torch.from_numpy(source.images))
    assert data.images.is_contiguous()
    assert data.targets.tolist() == source.targets.tolist()
    assert decode_to_memory(source, (16, 20), broken=BrokenImages(len(source))).images.shape == (360, 3, 16, 20)


def test_broken_pictures_are_left_out(tmp_path):
    root = write_pictures(tmp_path / "x")
    (root / "cat" / "3.jpg").write_bytes(b"")
    source, broken = open_dataset("folder", root), BrokenImages(16)
    data = decode_to_memory(source, (8, 8), broken=broken, workers=1)
    assert data.indices.tolist() == [0, 1, 2, *range(4, 16)]
    assert torch.equal(data.targets, (data.indices >= 8).long())
    assert len(broken) == 1
    for file in root.rglob("*.jpg"):
        file.write_bytes(b"")
    with pytest.raises(BrokenImagesError, match="of 16 images cannot be read"):
        decode_to_memory(source, (8, 8), broken=BrokenImages(16))


def test_evaluation_leaves_pictures_alone():
    data = random_images()
    batches = list(
        MemoryLoader(data, EvaluationBatches(20, 8), augmentation=training_augmentation((8, 6), **STATISTICS)).epoch()
    )
    assert [len(batch) for batch in batches] == [8, 8, 4]
    torch.testing.assert_close(torch.cat([batch.images for batch in batches]), data.images / 255, rtol=0, atol=0)
    assert torch.cat([batch.targets for batch in batches]).tolist() == data.targets.tolist()


def samples(data, batch_size, epoch=0, seed=1, world_size=1, start_batch=0):
    found = {}
    for rank in range(world_size):
        batches = TrainingBatches(len(data), batch_size, seed=seed, rank=rank, world_size=world_size)
        loader = MemoryLoader(data, batches, seed=seed, augmentation=training_augmentation((8, 6), **AUGMENTATION))
        for batch in loader.epoch(epoch, start_batch):
            found |= dict(zip(batch.indices.tolist(), batch.images, strict=True))
    return found


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    data = random_images()
    expected = samples(data, 4)
    for other in (samples(data, 10), samples(data, 2, world_size=2), samples(data, 4, start_batch=3)):
        assert all(torch.equal(image, expected[index]) for index, image in other.items())
    for other in (samples(data, 4, epoch=1), samples(data, 4, seed=2)):
        assert sum(torch.equal(image, expected[index]) for index, image in other.items()) < 10


@pytest.mark.gpu
def test_a_gpu_gives_the_same_pictures():
    data = random_images()
    batches = TrainingBatches(20, 4, seed=1)
    augmentation = training_augmentation((8, 6), crop_padding=2, hflip=0.5, **STATISTICS)
    here = [batch.images for batch in MemoryLoader(data, batches, augmentation=augmentation).epoch()]
    loader = MemoryLoader(data, batches, augmentation=augmentation, device="cuda")
    torch.testing.assert_close(here, [batch.images.cpu() for batch in loader.epoch()])
