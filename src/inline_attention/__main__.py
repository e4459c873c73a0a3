"""`python -m inline_attention`: the same as the command `inline`."""

from inline_attention.cli.main import app

if __name__ == "__main__":
    app(prog_name="inline")
