"""Small calls of every GPU kernel: `compute-sanitizer --tool memcheck python sanitized_calls.py`."""

import torch

from inline_attention import inline_attention, inline_attention_qkvpacked
from inline_attention.ops.backends.cuda import launch


def attend(backend: str, head_dim: int, dtype: torch.dtype) -> None:
    """One forward and backward pass with everything a tile can meet: a border, a prefix, an odd number of heads."""
    qkv = torch.randn(2, 3 + 9 * 19, 3, 3, head_dim, device="cuda").to(dtype).requires_grad_()
    weight = torch.randn(2, 3, head_dim, 3, 3, device="cuda").to(dtype).requires_grad_()
    for local in ({}, {"local_weight": weight, "grid_size": (9, 19), "num_prefix_tokens": 3}):
        inline_attention_qkvpacked(qkv, backend=backend, **local).sum().backward()
        with torch.no_grad():
            q, k, v = (tensor.clone() for tensor in qkv.unbind(2))
            inline_attention(q, k, v, overwrite_q=True, backend=backend, **local)


for head_dim in (32, 64):
    attend("cuda", head_dim, torch.bfloat16)
launch.fits_one_block = lambda *_: True
attend("cuda", 32, torch.float16)
attend("triton", 32, torch.bfloat16)
torch.cuda.synchronize()
print("sanitized calls done")
