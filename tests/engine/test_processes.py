"""Two processes: what one meets, both answer; what they divide, they put together again."""

import csv
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine import pair
from engine import runs as digits
from engine.pair import in_pair
from inline_attention.data.datasets import open_dataset
from inline_attention.engine import train
from inline_attention.engine.config import with_overrides
from inline_attention.recipes import get_recipe

TINY = [
    "model.arguments={patch_size: 2, embed_dim: 32, num_heads: 1, depth: 2}",
    "model.num_classes=10",
    "model.drop_path=0.1",
    "data.dataset=folder",
    "data.in_memory=false",
    "data.workers=1",
    "augmentation.crop=resized",
    "training.epochs=2",
    "training.batch_size=16",
    "training.total_batch_size=32",
    "training.validation_batch_size=4",
    "schedule.warmup_epochs=0",
    "ema.enabled=true",
    "ema.decay=0.5",
    "ema.decay_base_size=null",
    "logging.tensorboard=false",
]


@pytest.fixture
def pictures(tmp_path):
    """Digits as files: 64 to train on; 25 to evaluate on, of which one process gets a batch more than the other."""
    for split, folder, count in (("train", "train", 64), ("validation", "val", 25)):
        source = open_dataset("digits", split=split)
        for number in range(10):
            (tmp_path / folder / str(number)).mkdir(parents=True)
        for index in range(count):
            source.load(index).save(tmp_path / folder / str(source.targets[index]) / f"{index}.png")
    return tmp_path


def settings(pictures, name, *overrides):
    return [*TINY, f"data.dir={pictures}", f"run.output={pictures / 'runs'}", f"run.experiment={name}", *overrides]


def files(folder: Path):
    return {name: load_file(folder / "checkpoints" / "last" / f"{name}.safetensors") for name in ("model", "model_ema")}


def assert_same_end(first: Path, second: Path):
    ours, theirs = files(first), files(second)
    for name, weights in ours.items():
        assert all(torch.equal(weights[key], theirs[name][key]) for key in weights), name
    assert (first / "summary.csv").read_text() == (second / "summary.csv").read_text()


def rows(file: Path):
    with file.open() as stream:
        return list(csv.DictReader(stream))


def test_divided_weights_are_averaged_evaluated_and_resumed(pictures):
    runs = pictures / "runs"
    divided = ["distributed.strategy=fsdp2"]
    for name, extra in (("whole", divided), ("replicated", [])):
        outcomes = in_pair(pair.train, settings(pictures, name, *extra))
        assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].message
        assert outcomes[0].value == outcomes[1].value
        assert outcomes[0].value.count == 25
    # Stopped while they evaluate, in the second epoch, by a signal to one of the two.
    told = in_pair(pair.train_until_told_in_evaluation, settings(pictures, "parts", *divided))
    assert [(outcome.error, outcome.exit_code) for outcome in told] == [("InterruptedBySignalError", 143)] * 2
    in_pair(pair.train, settings(pictures, "parts", "run.resume=auto", *divided))
    assert_same_end(runs / "whole", runs / "parts")
    # The average is one, and the same as where every process has all of it.
    ours, theirs = files(runs / "whole"), files(runs / "replicated")
    assert not torch.equal(ours["model"]["head.weight"], ours["model_ema"]["head.weight"])
    for name, weights in ours.items():
        torch.testing.assert_close(weights, theirs[name], rtol=1e-3, atol=1e-4)
    assert float(rows(runs / "whole" / "summary.csv")[-1]["ema_loss"]) == pytest.approx(
        float(rows(runs / "replicated" / "summary.csv")[-1]["ema_loss"]), rel=1e-3
    )


def test_buffers_that_are_not_sharded_are_averaged_too(pictures):
    """A network with batch normalisation, whose statistics differ between the processes, as they do with DDP."""
    network = ["model.name=resnet10t", "model.img_size=null", "model.drop_path=null", "data.workers=0"]
    size = "model.arguments={pretrained_cfg_overlay: {input_size: [3, 32, 32]}}"
    outcomes = in_pair(pair.train, settings(pictures, "run", *network, size, "distributed.strategy=fsdp2"))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].message
    weights = files(pictures / "runs" / "run")
    means = [weights[name]["bn1.running_mean"] for name in ("model", "model_ema")]
    assert means[0].abs().min() > 0
    assert not torch.equal(*means)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_process_resumes_from_two_and_two_from_one(pictures, capsys, strategy):
    divided = ["data.workers=0", f"distributed.strategy={strategy}"]
    two = in_pair(pair.train, settings(pictures, "run", "training.epochs=1", *divided))
    assert two[0].error is None, two[0].message
    alone = settings(pictures, "run", "run.resume=auto", "training.batch_size=32", *divided)
    pair.train(alone, rank=0)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "had 2 processes, now 1: training continues, but not bit for bit" in said
    two = in_pair(pair.train, settings(pictures, "run", "run.resume=auto", "training.epochs=3", *divided))
    assert two[0].error is None, two[0].message
    assert [row["epoch"] for row in rows(pictures / "runs" / "run" / "summary.csv")] == ["1", "2", "3"]


def spoil(folder: Path, count: int):
    """Empty that many pictures, of both processes' shares; their paths."""
    chosen = sorted(folder.rglob("*.png"), key=lambda path: int(path.stem))[:count]
    for path in chosen:
        path.write_bytes(b"")
    return {str(path) for path in chosen}


def test_broken_pictures_of_both_are_counted_and_listed_once(pictures):
    spoiled = spoil(pictures / "train", 8) | spoil(pictures / "val", 3)
    allowed = ["limits.broken_image_share=0.2", "ema.enabled=false"]
    outcomes = in_pair(pair.train, settings(pictures, "run", *allowed))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].message
    assert outcomes[0].value.count == 22
    listed = rows(pictures / "runs" / "run" / "broken_images.csv")
    assert sorted(row["path"] for row in listed) == sorted(spoiled)
    assert all("is empty" in row["reason"] for row in listed)
    assert rows(pictures / "runs" / "run" / "summary.csv")[-1]["broken_images"] == "11"


def test_the_limit_of_broken_pictures_holds_for_both_together(pictures):
    spoiled = spoil(pictures / "train", 8)  # about four for each of them
    outcomes = in_pair(pair.train, settings(pictures, "run", "limits.broken_image_share=0.1", "training.epochs=9"))
    assert [outcome.error for outcome in outcomes] == ["BrokenImagesError"] * 2
    assert all("8 of 64 images cannot be read, at most 6 may be broken" in outcome.message for outcome in outcomes)
    listed = [row["path"] for row in rows(pictures / "runs" / "run" / "broken_images.csv")]
    assert len(listed) == len(set(listed)) > 6
    assert set(listed) <= spoiled


def test_two_that_find_different_checkpoints_are_refused(tmp_path):
    """Each in a folder of its own, and only the first has a run to go on with."""
    settings = [*digits.TINY, "run.output=runs", "run.experiment=run", "training.batch_size=128"]
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    first = with_overrides(get_recipe("digits").config, [*settings, f"run.output={tmp_path / '0' / 'runs'}"])
    train.train(with_overrides(first, ["training.epochs=1"]))
    outcomes = in_pair(pair.train_in_folders_of_their_own, [*settings, "run.resume=auto"], str(tmp_path))
    for outcome in outcomes:
        assert outcome.error == "ConfigError"
        assert "run.output: processes find different checkpoints" in outcome.message
        assert "(update 5, none)" in outcome.message


def test_both_end_when_the_one_that_saves_cannot(pictures):
    outcomes = in_pair(pair.train_without_room, settings(pictures, "run", "data.workers=0"), seconds=60)
    assert [outcome.error for outcome in outcomes] == ["CheckpointWriteError"] * 2
    assert "could not be written" in outcomes[0].message
    assert "rank 0 could not write" in outcomes[1].message


def test_a_loss_that_is_not_finite_in_one_is_skipped_by_both(pictures):
    outcomes = in_pair(pair.train_with_a_bad_loss, settings(pictures, "run", "data.workers=0"))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].message
    averages = outcomes[0].value
    assert averages == outcomes[1].value
    assert [before == after for before, after in itertools.pairwise(averages)] == [True, True, False]
    assert rows(pictures / "runs" / "run" / "summary.csv")[-1]["skipped_updates"] == "2"
