"""Injective linear attention (InLine) for vision.

Public names are imported on first use, so that `import inline_attention` takes no time and the op needs only PyTorch.
The models are registered with timm, and the attention with transformers, as soon as both packages are imported, in
either order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inline_attention import registration

if TYPE_CHECKING:
    from inline_attention.layers import (
        InLineAttention,
        LinearAttention,
        SoftmaxAttention,
        calibrate_attention,
        convert_attention,
    )
    from inline_attention.models import create_model, list_models, load_checkpoint, streamed
    from inline_attention.ops import (
        AttentionState,
        attend,
        attention_state,
        attention_weights,
        inline_attention,
        inline_attention_qkvpacked,
        local_residual,
        merge_states,
    )

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "InLineAttention",
    "LinearAttention",
    "SoftmaxAttention",
    "__version__",
    "attend",
    "attention_state",
    "attention_weights",
    "calibrate_attention",
    "convert_attention",
    "create_model",
    "inline_attention",
    "inline_attention_qkvpacked",
    "list_models",
    "load_checkpoint",
    "local_residual",
    "merge_states",
    "streamed",
]

_PUBLIC = {
    "layers": ("InLineAttention", "LinearAttention", "SoftmaxAttention", "calibrate_attention", "convert_attention"),
    "models": ("create_model", "list_models", "load_checkpoint", "streamed"),
    "ops": (
        "AttentionState",
        "attend",
        "attention_state",
        "attention_weights",
        "inline_attention",
        "inline_attention_qkvpacked",
        "local_residual",
        "merge_states",
    ),
}
_PACKAGE_OF = {name: package for package, names in _PUBLIC.items() for name in (package, *names)}


def __getattr__(name: str) -> Any:
    """Import a public name or a package on first use (PEP 562)."""
    package = _PACKAGE_OF.get(name)
    if package is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if package == "models":
        import_module("timm.models")  # the same order in every thread: timm, then our models
    module = import_module(f"{__name__}.{package}")
    value = module if name == package else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PUBLIC})


registration.install()
