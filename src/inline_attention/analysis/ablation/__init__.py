"""Ablations: the same recipe trained with one thing changed at a time, over several seeds."""
