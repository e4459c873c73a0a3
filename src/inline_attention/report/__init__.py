"""One self-contained page with the argument for InLine, checked on the user's own runs."""
