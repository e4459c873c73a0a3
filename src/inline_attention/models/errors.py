"""The error that all readers and writers of weights raise."""


class CheckpointError(RuntimeError):
    """Weights cannot be read, fetched or written, or do not fit the model."""
