"""Runs whose ranks share the rows of their images, against runs whose ranks have whole images."""

import pytest
import torch

from engine import pair
from engine.pair import in_pair
from engine.runs import TINY, config, final_weights, rows
from inline_attention.engine.config import check, resolve
from inline_attention.engine.train import train

# Mixed images and random depths: ranks must draw the same numbers. SGD: Adam would blow up the rounding of key biases,
# whose gradient is zero.
SETTINGS = [
    *TINY,
    "model.arguments={patch_size: 2, embed_dim: 16, num_heads: 2, depth: 2}",
    "model.drop_path=0.5",
    "augmentation.mixup=0.2",
    "optimizer.name=sgd",
    "optimizer.lr=0.1",
    "schedule.name=step",
    "training.batch_size=32",
    "training.total_batch_size=64",
    "training.validation_batch_size=360",
    "training.updates=4",
]


def overrides(tmp_path, name, *more):
    return [*SETTINGS, f"run.output={tmp_path}", f"run.experiment={name}", *more]


def test_ranks_that_share_rows_train_as_those_that_do_not(tmp_path):
    expected = in_pair(pair.train, overrides(tmp_path, "whole"))
    found = in_pair(pair.train, overrides(tmp_path, "rows", "distributed.context_parallel=2"), ranks=4)
    for outcome in (*expected, *found):
        assert outcome.error is None, outcome.message
        assert outcome.value.count == 360
        assert outcome.value.loss == pytest.approx(expected[0].value.loss, rel=1e-6)
        assert outcome.value.top1 == expected[0].value.top1
    losses = [float(row["train_loss"]) for name in ("whole", "rows") for row in rows(tmp_path / name)]
    assert losses == pytest.approx(losses[:1] * 2, rel=1e-6)
    assert_close(final_weights(tmp_path / "rows"), final_weights(tmp_path / "whole"))


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-6, msg=name)


def test_a_run_resumes_with_another_number_of_ranks(tmp_path, capsys):
    # Random depths depend on the number of processes. Two updates an epoch.
    same = ["model.drop_path=0", "training.updates=null", "training.batch_size=480", "training.total_batch_size=480"]
    train(config(tmp_path, *overrides(tmp_path, "whole", *same, "training.epochs=2")))
    shared = ["distributed.context_parallel=2", "distributed.strategy=fsdp2", "training.epochs=1"]
    for outcome in in_pair(pair.train, overrides(tmp_path, "rows", *same, *shared)):
        assert outcome.error is None, outcome.message
    capsys.readouterr()
    train(config(tmp_path, *overrides(tmp_path, "rows", *same, "training.epochs=2", "run.resume=auto")))
    assert "the run had 2 processes, now 1: training continues" in capsys.readouterr().out
    assert_close(final_weights(tmp_path / "rows"), final_weights(tmp_path / "whole"))


def test_if_one_rank_is_killed_the_others_end_with_a_sentence(tmp_path):
    settings = overrides(tmp_path, "run", "distributed.context_parallel=2", "training.batch_size=64")
    left, killed = in_pair(pair.train_until_killed, settings)
    assert killed.error == "killed"
    assert left.error == "LostRankError"
    assert left.message.startswith("another rank of the run has ended or hangs")
    assert f"--resume {tmp_path / 'run'}" in left.message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], None),
        (["distributed.context_parallel=3"], "expected a divisor of the number of ranks, 4, got 3; start the run with"),
        (["training.compile=true"], "expected 1 with training.compile, got 2"),
        (["model.name=vit_tiny_patch16_224", "model.arguments={}"], "expected a model of this library"),
        (["model.arguments={proj_drop_rate: 0.1}"], "dropout of tokens would differ between ranks"),
        (["task.name=segmentation"], "has no effect on segmentation, only on classification, got 2; leave it out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, settings, message):
    found = check(config(tmp_path, "distributed.context_parallel=2", *settings), world_size=4)
    own = [problem.message for problem in found if problem.path == "distributed.context_parallel"]
    assert len(own) == (message is not None)
    assert message is None or message in own[0]


def test_groups_share_a_batch(tmp_path):
    resolved = resolve(config(tmp_path, "distributed.context_parallel=4", "training.batch_size=128"), world_size=8)
    assert (resolved.batch_size, resolved.grad_accum_steps, resolved.total_batch_size) == (128, 1, 256)
    assert "128 images × 2 groups of 4 devices × 1 accumulated = 256" in resolved.describe()[0]
