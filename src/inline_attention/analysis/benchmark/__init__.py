"""How fast attention and models are on this machine: cases as data, a check before every timing, results on disk."""
