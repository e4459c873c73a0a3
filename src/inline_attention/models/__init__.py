"""Models by name. Importing this package registers every model with timm."""

from inline_attention.models import cswin, deit, pvt, swin
from inline_attention.models.checkpoints import load_checkpoint
from inline_attention.models.registry import create_model, list_models
from inline_attention.models.streaming import streamed

__all__ = ["create_model", "cswin", "deit", "list_models", "load_checkpoint", "pvt", "streamed", "swin"]
