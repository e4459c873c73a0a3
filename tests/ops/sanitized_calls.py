"""Small calls of every GPU kernel: `compute-sanitizer --tool memcheck python sanitized_calls.py`."""

import torch

from inline_attention import inline_attention_qkvpacked
from inline_attention.ops import api
from inline_attention.ops.backends.cuda import launch
from inline_attention.ops.call import AttentionCall


def attend(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    """One forward and backward pass with everything a tile can meet: a border, a prefix, an odd number of heads."""
    qkv = torch.randn(2, 3 + 9 * 19, 3, 3, head_dim, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(2, 3, head_dim, 3, 3, device="cuda").to(dtype).requires_grad_()
    for local in ({}, {"local_weight": weight, "grid_size": (9, 19), "num_prefix_tokens": 3}):
        inline_attention_qkvpacked(qkv, backend=backend, **local).sum().backward()
        with torch.no_grad():
            q, k, v = (tensor.clone() for tensor in qkv.unbind(2))
            options = local or {"local_weight": None, "grid_size": None, "num_prefix_tokens": 0}
            call = AttentionCall(q, k, v, None, 0.2, "identity", "subtract", None, overwrite_q=True, **options)
            api.attend(call, backend)


for head_dim in (32, 64):
    attend("cuda", head_dim, torch.bfloat16)
launch.fits_one_block = lambda *_: True
attend("cuda", 32, torch.float16)
attend("triton", 32, torch.bfloat16)
torch.cuda.synchronize()
print("sanitized calls done")
