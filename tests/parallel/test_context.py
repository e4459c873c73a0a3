"""Models whose ranks share the rows of each image, against the same models in one process."""

import pytest
import torch
from torch import nn

from engine.pair import in_pair
from inline_attention import create_model
from inline_attention.layers.grids import Grid
from inline_attention.layers.row_shards import RowShards
from inline_attention.parallel import parallelize_context, unsupported_reason
from parallel import ranks

TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-7}  # two roundings of bfloat16
FLOAT64 = 1e-12


def values(outcomes):
    for outcome in outcomes:
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
    return [outcome.value for outcome in outcomes]


@pytest.fixture(scope="module", params=[1, 2, 4])
def differences(request):
    """Largest difference of each case over all ranks: started once for all cases."""
    found = values(in_pair(ranks.compare, request.param, ranks=request.param, seconds=300))
    return {name: [max(pair) for pair in zip(*(one[name] for one in found), strict=True)] for name in found[0]}


def test_outputs_and_gradients_are_those_of_one_process(differences):
    assert len(differences) == len(ranks.CASES) + 10
    for name, found in differences.items():
        for difference in found:
            assert difference <= TOLERANCES.get(name.split()[-1], FLOAT64), (name, found)


def test_gradients_are_averaged_by_ddp_and_fsdp2():
    for found in values(in_pair(ranks.compare_strategies, ranks=4)):
        assert found.keys() == {"ddp", "fsdp2", "fsdp2 beside context"}
        assert max(found.values()) <= FLOAT64, found


def test_a_layer_sends_its_state_and_one_row_each_way():
    first, *inner, last = values(in_pair(ranks.count_bytes, 3, ranks=3))
    (B, C, H), width = (2, 8, 2), ranks.LARGE[3] // 8
    state = 8 * B * (1 + C + C + C * C // H + C)  # count, mean key, mean value, covariance, sum of tokens
    row = 8 * B * width * C
    assert first == last == [("gather", state), ("exchange", row)] * 2
    assert inner == [[("gather", state), ("exchange", 2 * row)] * 2]


class Group:
    """One of several ranks that has no others to talk to."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize(("height", "size"), [(9, 4), (4, 4), (64, 5)])
def test_rows_are_shared_evenly(height, size):
    shards = [RowShards(Grid(height, 3), Group(rank, size)) for rank in range(size)]
    assert sum(shard.size[0] for shard in shards) == height
    assert {shard.size[0] for shard in shards} <= {height // size, height // size + 1}
    assert [shard.first_row for shard in shards] == [first for first, _ in shards[0].ranges]


def test_few_rows_are_not_shared():
    shards = RowShards(Grid(3, 5), Group(1, 4))
    assert not shards.is_split
    assert shards.size == (3, 5)


def test_masks_and_extents_are_those_of_own_rows():
    whole = Grid(8, 3, [(8, 3), (3, 2), (5, 1)])
    masks = [RowShards(whole, Group(rank, 3)).mask() for rank in range(3)]
    assert torch.equal(torch.cat(masks, dim=1), whole.mask())
    shards = RowShards(whole, Group(1, 3))
    assert torch.equal(shards.mask_of((0, 8)), whole.mask())
    assert not shards.mask_of((-2, 0)).any()


def test_models_that_cannot_share_rows_are_refused():
    with pytest.raises(ValueError, match=r"expected a model of this library .* got Linear; create one"):
        parallelize_context(nn.Linear(2, 2), None)
    model = create_model("inline_deit_tiny", depth=1, proj_drop_rate=0.1)
    assert "proj_drop_rate=0" in unsupported_reason(model)
    swin = create_model("inline_swin_tiny", attn_drop_rate=0.1)
    assert "attn_drop_rate=0" in unsupported_reason(swin)
    allowed = create_model("inline_deit_tiny", depth=2, drop_path_rate=0.1, drop_rate=0.1)
    assert unsupported_reason(allowed) is None
