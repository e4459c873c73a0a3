"""Implementations of the op. They know neither each other nor the reference."""
