"""The predictor of the local residual takes its fused kernel only where nobody would notice."""

import pytest
import torch
from torch import nn

from inline_attention.layers import local_weights
from inline_attention.layers.local_weights import LocalWeightPredictor


class FusedError(Exception):
    """Raised by what stands in for a fused kernel."""


@pytest.fixture
def _fusing_is_noticed(monkeypatch):
    def noticed(*_):
        raise FusedError

    monkeypatch.setattr(local_weights, "predict_local_weight", noticed)


@pytest.mark.usefixtures("_fusing_is_noticed")
def test_the_predictor_fuses_only_its_own_modules_without_hooks():
    tokens = torch.randn(2, 9, 24)
    predictor = LocalWeightPredictor(24, 3)
    with pytest.raises(FusedError):
        predictor.predict(tokens)
    seen = []
    for module in (predictor, *predictor):
        handle = module.register_forward_hook(lambda *_: seen.append(1))
        predictor.predict(tokens)
        handle.remove()
        with pytest.raises(FusedError):
            predictor.predict(tokens)
    assert len(seen) == 4
    for activation in (nn.ReLU(), nn.GELU(approximate="tanh")):
        predictor[1] = activation
        torch.testing.assert_close(predictor.predict(tokens), predictor(tokens.mean(1)))
    predictor[1] = nn.GELU()
    predictor[0] = nn.Sequential(predictor[0])  # an adapter, as of LoRA, has taken its place
    torch.testing.assert_close(predictor.predict(tokens), predictor(tokens.mean(1)))
