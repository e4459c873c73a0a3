"""Batches from real files: the same with any number of workers, and whatever the files are like."""

import os
import pickle
import random
import signal
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.mixup import Mixup
from timm.data.transforms_factory import create_transform
from torchvision import transforms
from torchvision.datasets import ImageFolder

import warm
from data.conftest import bomb, noise, write_pictures
from inline_attention.data import loading
from inline_attention.data.batch import Normalize
from inline_attention.data.broken import BrokenImageLimit, BrokenImages, BrokenImagesError
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import DataWorkerError, ImageLoader
from inline_attention.data.sampling import EvaluationBatches, TrainingBatches
from inline_attention.data.transforms import SeededMixup, evaluation_transform, training_transform

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HEAVY = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "re_mode": "pixel"}


def training_loader(folder, workers=0, *, batch_size=4, seed=7, limit=None, transform=None, **options):
    source = open_dataset("folder", folder)
    return ImageLoader(
        source,
        transform or training_transform((32, 32), mean=MEAN, std=STD, **options),
        TrainingBatches(len(source), batch_size, seed=seed),
        normalize=Normalize(MEAN, STD),
        broken=BrokenImages(len(source), limit),
        replace_broken=True,
        seed=seed,
        workers=workers,
    )


def evaluation_loader(folder, workers=0, *, size=32, broken=None, world_size=1, rank=0):
    source = open_dataset("folder", folder)
    return ImageLoader(
        source,
        evaluation_transform((size, size), interpolation="bicubic"),
        EvaluationBatches(len(source), 5, rank=rank, world_size=world_size),
        normalize=Normalize(MEAN, STD),
        broken=broken if broken is not None else BrokenImages(len(source)),
        replace_broken=False,
        workers=workers,
    )


def assert_equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert (a.epoch, a.number, a.broken) == (b.epoch, b.number, b.broken)
        for name in ("images", "targets", "indices"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name


def in_epochs(loader, epochs=(0, 1)):
    batches = [batch for epoch in epochs for batch in loader.epoch(epoch)]
    loader.close()
    return batches


def break_some(folder):
    (folder / "cat" / "2.jpg").write_bytes(b"")
    (folder / "cat" / "3.jpg").write_bytes(b"no image at all " * 50)
    whole = (folder / "dog" / "7.jpg").read_bytes()
    (folder / "dog" / "7.jpg").write_bytes(whole[: len(whole) // 2])
    return {"2.jpg", "3.jpg", "7.jpg"}


def test_any_number_of_workers_gives_the_same_bits(folder):
    break_some(folder)
    expected = in_epochs(training_loader(folder, 0, **HEAVY))
    for workers in (1, 3):
        assert_equal(in_epochs(training_loader(folder, workers, **HEAVY)), expected)
    assert not torch.equal(expected[0].images, expected[4].images)  # another epoch, another augmentation


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_in_mid_epoch_gives_the_same_bits(folder, workers):
    expected = list(training_loader(folder, 0, **HEAVY).epoch(3))
    assert_equal(list(training_loader(folder, workers, **HEAVY).epoch(3, start_batch=2)), expected[2:])
    loader = training_loader(folder, workers, **HEAVY)
    next(iter(loader.epoch(1)))  # an epoch that is given up leaves nothing behind
    assert_equal(list(loader.epoch(3, start_batch=1)), expected[1:])
    loader.close()


def test_a_sample_depends_on_its_index_not_on_its_batch(folder):
    def by_index(batch_size):
        batches = training_loader(folder, batch_size=batch_size, **HEAVY).epoch(0)
        return {int(i): image for batch in batches for i, image in zip(batch.indices, batch.images, strict=True)}

    four, eight = by_index(4), by_index(8)
    assert all(torch.equal(four[index], eight[index]) for index in range(16))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_main_process_keeps_its_random_numbers(folder, workers):
    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = state()
    in_epochs(training_loader(folder, workers, **HEAVY))
    assert state() == before


def test_evaluation_equals_torchvisions_to_the_last_bit(folder):
    transform = transforms.Compose(
        [
            transforms.Resize(int(32 / 0.875), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(32),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    theirs = ImageFolder(folder, transform)
    ours = in_epochs(evaluation_loader(folder, 2), epochs=[0])
    assert [len(batch) for batch in ours] == [5, 5, 5, 1]
    assert torch.equal(torch.cat([batch.images for batch in ours]), torch.stack([image for image, _ in theirs]))
    assert torch.cat([batch.targets for batch in ours]).tolist() == theirs.targets


def test_bytes_are_normalised_on_the_device_as_timm_does_it_before(folder):
    timms = create_transform((3, 32, 32), is_training=True, mean=MEAN, std=STD)
    before = list(training_loader(folder, transform=timms).epoch(0))
    after = list(training_loader(folder).epoch(0))
    assert_equal(after, before)
    assert after[0].images.is_contiguous()


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_images_are_replaced_by_the_next_readable_one(folder, workers):
    names = break_some(folder)
    loader = training_loader(folder, workers)
    batches = in_epochs(loader, epochs=[0])
    assert {len(batch) for batch in batches} == {4}
    assert sorted(torch.cat([batch.indices for batch in batches]).tolist()) == sorted(
        [0, 1, 4, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0]  # 2 and 3 give way to 4, and 15 to 0
    )
    for batch in batches:
        assert torch.equal(batch.targets, (batch.indices >= 8).long())
    broken = {os.path.basename(image.name): image.reason for image in loader._broken}
    assert set(broken) == names
    assert "is empty" in broken["2.jpg"]
    assert "damaged" in broken["3.jpg"]
    assert "damaged" in broken["7.jpg"]


def test_broken_images_are_left_out_of_evaluation(folder):
    break_some(folder)
    for number in (8, 9, 10, 11, 12, 13):  # a whole batch
        (folder / "cat" / f"{number}.jpg").write_bytes(b"")
    for world_size in (1, 3):
        seen = []
        for rank in range(world_size):
            for batch in evaluation_loader(folder, rank=rank, world_size=world_size).epoch():
                assert len(batch) > 0
                seen += batch.indices.tolist()
        assert sorted(seen) == [0, 1, 4, 5, 6, 7, *range(14, 21)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"garbage" * 99], ids=["empty", "garbage"])
def test_if_all_are_broken_it_fails_at_once_with_the_count(folder, workers, content):
    for file in folder.rglob("*.jpg"):
        file.write_bytes(content)
    for loader in (training_loader(folder, workers), evaluation_loader(folder, workers)):
        with pytest.raises(BrokenImagesError, match=r"at least \d+ of 16 images cannot be read.*\n  .*/\d\.jpg: is"):
            list(loader.epoch())
        loader.close()


def test_the_limit(folder):
    break_some(folder)
    assert len(list(training_loader(folder, limit=BrokenImageLimit(count=3)).epoch())) == 4
    for limit in (BrokenImageLimit(count=2), BrokenImageLimit(share=0.15)):
        with pytest.raises(BrokenImagesError, match="at least 3 of 16 images cannot be read, at most 2"):
            list(training_loader(folder, limit=limit).epoch())


def write_oddities(folder):
    """Every kind of image that must be read, in the order in which they are read."""
    folder.mkdir(parents=True)
    picture = noise(1)
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.convert("CMYK").save(folder / "0_cmyk.jpg")
    picture.quantize(8).save(folder / "1_palette.png")
    picture.convert("RGBA").save(folder / "2_alpha.png")
    Image.fromarray(np.full((40, 48), 30_000, dtype=np.uint16)).save(folder / "3_16bit.png")
    picture.save(folder / "4_exif.jpg", exif=exif)
    Image.new("RGB", (1, 1), "red").save(folder / "5_1x1.png")
    Image.new("RGB", (1, 10_000), "red").save(folder / "6_1x10000.png")
    Image.new("RGB", (10_000, 1), "red").save(folder / "7_10000x1.png")


def test_odd_pictures_are_read_and_bombs_are_not(tmp_path):
    write_oddities(tmp_path / "all" / "odd")
    (tmp_path / "all" / "odd" / "8_bomb.png").write_bytes(bomb())
    broken = BrokenImages(9)
    batches = list(evaluation_loader(tmp_path / "all", size=24, broken=broken).epoch())
    assert [len(batch) for batch in batches] == [5, 3]
    images = torch.cat([batch.images for batch in batches])
    assert images.isfinite().all()
    red = (torch.tensor([1.0, 0, 0]) - torch.tensor(MEAN)) / torch.tensor(STD)
    for index in (5, 6, 7):
        torch.testing.assert_close(images[index], red[:, None, None].expand(3, 24, 24))
    (bad,) = broken
    assert bad.name.endswith("8_bomb.png")
    assert "limit of 200,000,000 pixels" in bad.reason
    augmented = list(training_loader(tmp_path / "all", batch_size=9, **HEAVY).epoch())
    assert augmented[0].images.isfinite().all()
    assert len(augmented[0]) == 9


class _Dies:
    """A transform that does not return."""

    def __init__(self, how):
        self.how = how

    def __call__(self, image):
        self.how()


def _killed():
    os.kill(os.getpid(), signal.SIGKILL)


def _asleep():
    time.sleep(600)


@pytest.mark.parametrize(
    ("how", "reason"), [(_killed, "pid"), pytest.param(_asleep, "timed out", marks=pytest.mark.slow)]
)
def test_a_worker_that_dies_or_hangs_is_named(folder, how, reason):
    source = open_dataset("folder", folder)
    loader = ImageLoader(
        source,
        _Dies(how),
        EvaluationBatches(len(source), 2),
        broken=BrokenImages(len(source)),
        replace_broken=False,
        workers=1,
        timeout=2 if how is _asleep else 60,
    )
    start = time.monotonic()
    with pytest.raises(DataWorkerError, match=rf"died or hangs: .*{reason}.*fewer workers"):
        list(loader.epoch())
    assert time.monotonic() - start < 60  # far less; this is about not waiting for ever


def test_a_program_ends_though_a_worker_hangs_that_no_loader_has_closed(folder):
    program = f"""
from inline_attention.data.broken import BrokenImages
from inline_attention.data.datasets import open_dataset
from inline_attention.data.loading import ImageLoader
from inline_attention.data.sampling import EvaluationBatches
import time
source = open_dataset("folder", {str(folder)!r})
loader = ImageLoader(source, lambda image: time.sleep(600), EvaluationBatches(len(source), 2), replace_broken=False,
                     broken=BrokenImages(len(source)), workers=1)
iterator = loader._iterator()
loader._loader._iterator = None
print("leaving")
"""
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr


def test_other_errors_in_workers_stay_what_they_are(folder):
    def fail():
        raise KeyError("mistake in a transform")

    loader = evaluation_loader(folder)
    loader._loader.dataset._samples._transform = _Dies(fail)
    with pytest.raises(KeyError, match="mistake in a transform"):
        list(loader.epoch())


def test_workers_do_not_get_the_signals_of_the_group(folder):
    loader = training_loader(folder, workers=1)
    batches = loader.epoch()
    next(batches)
    (worker,) = loader._loader._iterator._workers
    assert os.getpgid(worker.pid) != os.getpgid(os.getpid())
    loader.close()
    worker.join(20)
    assert not worker.is_alive()


def test_what_workers_need_can_be_sent_to_them(folder):
    """As it is where processes cannot be forked, on Windows and macOS."""
    loader = training_loader(folder, **HEAVY)
    reader = pickle.loads(pickle.dumps(loader._loader.dataset))
    key = next(TrainingBatches(16, 4, seed=7).keys(0))
    assert_equal([reader[key]], [next(loader.epoch(0))])


@pytest.mark.gpu
def test_a_gpu_gets_the_same_pictures(folder):
    source = open_dataset("folder", folder)

    def images(device, workers):
        loader = ImageLoader(
            source,
            evaluation_transform((32, 32)),
            EvaluationBatches(16, 5),
            normalize=Normalize(MEAN, STD),
            broken=BrokenImages(16),
            replace_broken=False,
            workers=workers,
            device=device,
        )
        batches = in_epochs(loader, epochs=[0])
        assert batches[0].targets.device.type == device
        return torch.cat([batch.images for batch in batches]).cpu()

    expected = images("cpu", 0)
    for workers in (0, 2):
        torch.testing.assert_close(images("cuda", workers), expected)


def test_mixing_depends_on_the_batch_alone(folder):
    def mixed(rank=0, numbers=(0, 1)):
        mix = SeededMixup(Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=2), seed=1, rank=rank)
        chosen = [batch for batch in training_loader(folder).epoch(2) if batch.number in numbers]
        return [mix(batch) for batch in chosen]

    before = np.random.get_state()[1].tolist()
    first = mixed()
    assert np.random.get_state()[1].tolist() == before
    (again,) = mixed(numbers=[1])
    assert torch.equal(again[0], first[1][0])
    assert torch.equal(again[1], first[1][1])
    assert first[0][1].shape == (4, 2)
    assert not torch.equal(mixed(rank=1)[0][1], first[0][1])


def test_mixing_needs_pairs(folder):
    mix = SeededMixup(Mixup(num_classes=2), seed=1)
    with pytest.raises(ValueError, match="even batch size, got 5; use 6"):
        mix(next(training_loader(folder, batch_size=5).epoch()))


def test_the_pictures_of_an_epoch_fit_their_classes(tmp_path):
    """Classes by folder, in the order that timm gives them."""
    root = write_pictures(tmp_path / "many", classes=("class10", "class2", "Class1"), each=2)
    source = open_dataset("folder", root)
    assert source.class_names == ("Class1", "class2", "class10")
    for batch in evaluation_loader(root).epoch():
        for index, target in zip(batch.indices.tolist(), batch.targets.tolist(), strict=True):
            assert f"/{source.class_names[target]}/" in source.name(index)


class SlowPictures(loading.Samples):
    """Reading one takes a while."""

    equal_sizes = True

    def __init__(self, seconds):
        self._seconds = seconds

    def __len__(self):
        return 8

    def name(self, index):
        return str(index)

    def read(self, index):
        time.sleep(self._seconds)
        return torch.full((3, 2, 2), index, dtype=torch.uint8), 0


def test_workers_may_take_their_time_over_what_an_epoch_left(monkeypatch):
    """Batches that were asked for and never taken are finished first; that is no reason to think that workers hang."""
    monkeypatch.setattr(loading, "CHECK_INTERVAL", 0.2)
    batches = TrainingBatches(8, 1, seed=0)
    broken = BrokenImages(8)
    loader = loading.SampleLoader(SlowPictures(1.0), batches, broken=broken, replace_broken=True, workers=1, timeout=60)
    left = loader.epoch(0)
    next(left)
    left.close()
    assert next(loader.epoch(1)).epoch == 1
    loader.close()
