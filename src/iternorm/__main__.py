"""The command `iternorm`, which is also `python -m iternorm`."""

import codecs
import io
import sys

# What tables show and not every terminal can, one letter for one: columns stay in line.
_PLAIN = {"κ": "k", "µ": "u", "–": "-", "…": ".", "×": "x", "→": ">"}


def _plain_letters(error: UnicodeError) -> tuple[str, int]:
    """What stands for letters that an encoding lacks, as `codecs.register_error` wants it."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("iternorm.plain_letters", _plain_letters)


def main() -> None:
    """Run the command line, or say how to install it."""
    for stream in (sys.stdout, sys.stderr):
        # A stream in another encoding than UTF-8 would raise in the middle of a table. Who chose a remedy keeps it.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="iternorm.plain_letters")
    try:
        from iternorm.cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"iternorm: the command line needs {package}: pip install 'iternorm[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="iternorm")


if __name__ == "__main__":
    main()
