"""The command `iternorm`, which is also `python -m iternorm`."""

import sys


def main() -> None:
    """Run the command line, or say how to install it."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"iternorm: the command line needs {error.name}: pip install 'iternorm[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="iternorm")


if __name__ == "__main__":
    main()
