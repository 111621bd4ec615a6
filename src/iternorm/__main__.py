"""The command `iternorm`, which is also `python -m iternorm`."""

import sys


def main() -> None:
    """Run the command line, or say how to install it."""
    try:
        from .cli import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(f"iternorm: the command line needs {package}: pip install 'iternorm[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="iternorm")


if __name__ == "__main__":
    main()
