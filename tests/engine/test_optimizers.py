"""Optimizers of the engine against timm's."""

import copy

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.optim import muon as timm_muon

from inline_attention import convert_attention
from inline_attention.engine.config import resolve
from inline_attention.engine.config.resolving import optimizer_arguments
from inline_attention.engine.optimizers import create_optimizer
from inline_attention.recipes import get_recipe


def test_muon_updates_matrices_together_as_timm_one_by_one(monkeypatch):
    torch.manual_seed(0)
    resolved = resolve(get_recipe("cifar10_micro").config)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, embed_dim=48)
    convert_attention(model)  # its predictors of 3×3 weights have matrices of shape [out, in, 1]
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    twin = copy.deepcopy(model)
    together = create_optimizer(model, resolved, torch.device("cpu"))
    one_by_one = create_optimizer_v2(twin, **optimizer_arguments(resolved))
    orthogonalized = []
    original = timm_muon.zeropower_via_newtonschulz

    def recorded(matrices, *arguments, **options):
        orthogonalized.append(tuple(matrices.shape))
        return original(matrices, *arguments, **options)

    monkeypatch.setattr(timm_muon, "zeropower_via_newtonschulz", recorded)
    for _ in range(3):
        orthogonalized.clear()
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = torch.randn_like(parameter)
            other.grad = parameter.grad.clone()
        together.step()
        calls = list(orthogonalized)
        one_by_one.step()
    stacks = sorted(shape for shape in calls if len(shape) == 3)
    assert stacks == [(3, 48, 16), (3, 48, 48), (3, 48, 192), (3, 144, 48), (3, 192, 48), (3, 432, 16)]
    assert len(calls) == 8  # with the patch embedding and the head
    for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert not torch.equal(parameter, start[name]), name
        # Newton-Schulz iterations run in bfloat16, and a batched product may round differently.
        assert (parameter - other).norm() <= 0.02 * (other - start[name]).norm(), name
    states = [optimizer.state_dict()["state"] for optimizer in (together, one_by_one)]
    assert [sorted(state) for state in states[0].values()] == [sorted(state) for state in states[1].values()]
    for state, other in zip(states[0].values(), states[1].values(), strict=True):
        if "momentum_buffer" in state:
            torch.testing.assert_close(state["momentum_buffer"], other["momentum_buffer"])
