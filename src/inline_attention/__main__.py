"""The command `inline`, also as `python -m inline_attention`."""

import io
import sys

from inline_attention.support.signals import StoppedError, stop_on_signal


def main() -> None:
    """Run the command line. Ctrl-C ends it quietly from the first import on."""
    stop_on_signal.install()
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # characters that the terminal does not have
        from inline_attention.cli.main import app

        app(prog_name="inline")
    except StoppedError as error:
        raise SystemExit(error.exit_code) from None
    finally:
        stop_on_signal.uninstall()


if __name__ == "__main__":
    main()
