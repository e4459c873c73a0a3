import pytest
import torch

from inline_attention.data.sampling import EvaluationBatches, TrainingBatches


def indices(batches, epoch=0, start_batch=0):
    return [key.indices.tolist() for key in batches.keys(epoch, start_batch)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 33])
def test_evaluation_sees_every_sample_once(length, world_size):
    ranks = [EvaluationBatches(length, 4, rank=rank, world_size=world_size) for rank in range(world_size)]
    seen = [index for batches in ranks for batch in indices(batches) for index in batch]
    assert sorted(seen) == list(range(length))
    for batches in ranks:
        sizes = [len(batch) for batch in indices(batches)]
        assert len(sizes) == len(batches)
        assert all(size == 4 for size in sizes[:-1])


def test_evaluation_of_one_process_is_in_order_and_resumes():
    batches = EvaluationBatches(10, 4)
    assert indices(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [key.number for key in batches.keys(0, 1)] == [1, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_batches_are_full_disjoint_and_one_order_for_all_processes(world_size):
    ranks = [TrainingBatches(50, 4, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)]
    parts = [indices(batches, epoch=2) for batches in ranks]
    assert {len(batches) for batches in ranks} == {50 // (4 * world_size)} == {len(part) for part in parts}
    steps = [index for step in zip(*parts, strict=True) for batch in step for index in batch]
    assert len(set(steps)) == len(steps) == len(ranks[0]) * 4 * world_size
    whole = [index for batch in indices(TrainingBatches(50, 1, seed=3), epoch=2) for index in batch]
    assert steps == whole[: len(steps)]


def test_the_order_depends_on_seed_and_epoch_alone():
    first = indices(TrainingBatches(64, 8, seed=1), epoch=1)
    torch.rand(5)
    assert indices(TrainingBatches(64, 8, seed=1), epoch=1) == first
    assert indices(TrainingBatches(64, 8, seed=1), epoch=2) != first
    assert indices(TrainingBatches(64, 8, seed=2), epoch=1) != first


def test_training_resumes_at_any_batch():
    batches = TrainingBatches(64, 8, seed=1)
    whole = indices(batches, epoch=5)
    for start in range(len(batches) + 1):
        assert indices(batches, 5, start) == whole[start:]
        assert [key.number for key in batches.keys(5, start)] == list(range(start, 8))


def test_errors():
    with pytest.raises(ValueError, match=r"one step takes 64 samples \(32 on each of 2 processes\).* has 50; .* 25"):
        TrainingBatches(50, 32, seed=0, world_size=2)
    with pytest.raises(ValueError, match="batch size must be at least 1, got 0"):
        EvaluationBatches(50, 0)
    with pytest.raises(ValueError, match="rank=2, world_size=2"):
        TrainingBatches(50, 1, seed=0, rank=2, world_size=2)
