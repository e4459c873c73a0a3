"""Pictures of the analyses, one file each beside the module that measures. Needs matplotlib."""
