"""What models are used for."""
