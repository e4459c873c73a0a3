"""Ablations: train one recipe with one thing changed at a time, over several seeds."""
