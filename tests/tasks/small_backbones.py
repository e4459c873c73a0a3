"""Backbones of every family, small enough for a CPU."""

SWIN = {"embed_dim": 16, "depths": (1, 2, 1, 2), "num_heads": (1, 2, 2, 2), "global_blocks": (1, 1, 1, 0)}
CSWIN = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 2, 2)}
PVT = {"depths": (1, 1, 1, 1)}
BACKBONES = {
    "inline_pvt_tiny": PVT,
    "softmax_pvt_tiny": PVT,
    "inline_swin_tiny": SWIN,
    "softmax_swin_tiny": SWIN,
    "inline_cswin_tiny": CSWIN,
}
DEIT = {"embed_dim": 16, "num_heads": 2, "depth": 2, "img_size": 64}
VIT = {**DEIT, "patch_size": 14}
PLAIN = {"inline_deit_tiny": DEIT, "softmax_deit_tiny": {**DEIT, "patch_size": 14}, "vit_tiny_patch16_224": VIT}
