"""Detection: boxes and masks of objects, and how good they are."""
