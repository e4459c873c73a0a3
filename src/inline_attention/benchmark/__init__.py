"""Speed of attention and models: cases as data, a check before every timing, results in files."""
