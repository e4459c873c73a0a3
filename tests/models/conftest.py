"""What the tests of reading and of loading weights share."""

import pytest

from inline_attention.models.checkpoints import save_weights
from models.small_model import Classifier


@pytest.fixture
def state():
    return Classifier().state_dict()


@pytest.fixture
def weights_file(tmp_path, state):
    save_weights(state, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"
