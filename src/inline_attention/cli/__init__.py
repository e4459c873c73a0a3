"""The command `inline`."""
