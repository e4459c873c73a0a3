import numpy as np
import pytest
import torch

from inline_attention.data.sampling import AspectRatioBatches


def sizes(count=61, seed=0):
    wide = np.random.default_rng(seed).random(count) < 0.7
    return np.where(wide[:, None], [480, 640], [640, 480])


def indices(batches, epoch=0, start_batch=0):
    return [key.indices.tolist() for key in batches.keys(epoch, start_batch)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7])
def test_batches_are_full_disjoint_and_of_one_shape(batch_size, world_size):
    shapes = sizes()
    ranks = [
        AspectRatioBatches(shapes, batch_size, seed=3, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    parts = [indices(batches, epoch=2) for batches in ranks]
    assert {len(batches) for batches in ranks} == {61 // (batch_size * world_size)} == {len(part) for part in parts}
    everything = [batch for part in parts for batch in part]
    assert {len(batch) for batch in everything} == {batch_size}
    seen = [index for batch in everything for index in batch]
    assert len(seen) == len(set(seen))
    mixed = [batch for batch in everything if len({tuple(shapes[index]) for index in batch}) > 1]
    assert len(mixed) <= 2


def test_the_order_depends_on_seed_and_epoch_alone():
    first = indices(AspectRatioBatches(sizes(), 4, seed=1), epoch=1)
    torch.rand(5)
    assert indices(AspectRatioBatches(sizes(), 4, seed=1), epoch=1) == first
    assert indices(AspectRatioBatches(sizes(), 4, seed=1), epoch=2) != first
    assert indices(AspectRatioBatches(sizes(), 4, seed=2), epoch=1) != first


def test_resumes_at_any_batch():
    batches = AspectRatioBatches(sizes(), 4, seed=1, rank=1, world_size=2)
    whole = indices(batches, epoch=5)
    for start in range(len(batches) + 1):
        assert indices(batches, 5, start) == whole[start:]
        assert [key.number for key in batches.keys(5, start)] == list(range(start, len(batches)))


def test_no_sample_sits_out_for_ever_and_shapes_come_in_turn():
    shapes = sizes(45)
    batches = AspectRatioBatches(shapes, 4, seed=0)
    epochs = [indices(batches, epoch) for epoch in range(60)]
    assert {index for epoch in epochs for batch in epoch for index in batch} == set(range(45))
    is_wide = [[shapes[batch[0]][1] > 480 for batch in epoch] for epoch in epochs]
    assert any(kinds != sorted(kinds) and kinds != sorted(kinds, reverse=True) for kinds in is_wide)


def test_all_of_one_shape_and_too_few():
    assert len(indices(AspectRatioBatches(np.full((9, 2), 320), 4, seed=0))) == 2
    with pytest.raises(ValueError, match="one step takes 8 samples"):
        AspectRatioBatches(sizes(7), 4, seed=0, world_size=2)
