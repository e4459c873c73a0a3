"""Helpers that every package may use: files, text and untrusted data. Imports neither torch nor other packages."""
