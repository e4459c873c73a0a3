"""What may go into the state of a checkpoint, and what is refused, where."""

import io
import random
from collections import Counter, OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timm.scheduler import CosineLRScheduler
from torch import nn

from inline_attention.engine.checkpoint_format import plain_copy, tensor_bytes

Pair = namedtuple("Pair", "first second")


def through_a_file(value):
    file = io.BytesIO()
    torch.save(plain_copy(value, "state"), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        float("inf"),
        "naïve",
        b"\x00\xff",
        [],
        {"a": [1, (2.5, None)], 3: {"x"}, (1, "b"): {}},
        OrderedDict(b=1, a=2),
        Counter([30, 30, 60]),
    ],
    ids=repr,
)
def test_plain_data_is_read_back_the_same(value):
    loaded = through_a_file({"value": value})["value"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_what_a_training_keeps_is_plain():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    schedule = CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, t_in_epochs=False)
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    kept = {
        "optimizer": optimizer.state_dict(),
        "schedules": [schedule.state_dict(), steps.state_dict()],
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "random": {"python": random.getstate(), "torch": torch.get_rng_state()},
    }
    loaded = through_a_file(kept)
    assert loaded["random"]["python"] == random.getstate()
    assert torch.equal(loaded["random"]["torch"], torch.get_rng_state())
    other = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    other.load_state_dict(loaded["optimizer"])
    assert torch.equal(other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    schedule.load_state_dict(loaded["schedules"][0])
    steps.load_state_dict(loaded["schedules"][1])


def test_tensors_lose_graph_and_attributes():
    tensor = nn.Parameter(torch.ones(2))
    tensor.owner = object()
    copy = plain_copy({"tensor": tensor, "computed": tensor * 2}, "state")
    assert not copy["tensor"].requires_grad
    assert not hasattr(copy["tensor"], "owner")
    assert not copy["computed"].requires_grad
    assert torch.equal(through_a_file(copy)["computed"], torch.full((2,), 2.0))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.float64(1.5), "numpy.float64"),
        (np.zeros(3), "numpy.ndarray"),
        (SimpleNamespace(lr=1), "types.SimpleNamespace"),
        (print, "builtin_function_or_method"),
        (Pair(1, 2), "Pair"),
        (torch.float32, "torch.dtype"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (type("Own", (torch.Tensor,), {})(), "Own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_anything_else_is_refused_with_its_place(value, kind):
    with pytest.raises(TypeError, match=rf"^state\['groups'\]\[1\]\['lr'\] is a .*{kind}.*convert it"):
        plain_copy({"groups": [{}, {"lr": value}]}, "state")


def test_keys_are_data_too():
    with pytest.raises(TypeError, match=r"the key .*float64.* of state\['counts'\] is a numpy"):
        plain_copy({"counts": {np.float64(3): 1}}, "state")


def test_what_contains_itself_is_refused():
    circle = []
    circle.append(circle)
    with pytest.raises(TypeError, match="does it contain itself"):
        plain_copy(circle, "state")


def test_shared_memory_counts_once():
    base = torch.zeros(10)
    assert tensor_bytes({"a": base, "b": [base[:2], (torch.zeros(1),)]}) == 44
