"""The command line: one small file for each verb, which checks nothing itself and leaves the work to the library.

A new verb is a function with typer's annotations in a file of its own, and a line here.
"""

from typing import Annotated

import typer

from iternorm.cli import analyze, bench, demo, ls, plot, report, run
from iternorm.cli.errors import with_plain_errors
from iternorm.cli.terminal import console

app = typer.Typer(
    help="Whitening normalization for PyTorch: see it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from iternorm import __version__

        console.print(f"iternorm {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Whitening normalization for PyTorch: see it, measure it."""


# In the order in which the help lists them.
app.command()(with_plain_errors(demo.demo))
app.command()(with_plain_errors(bench.bench))
app.command()(with_plain_errors(analyze.analyze))
app.command()(with_plain_errors(ls.ls))
app.command(cls=run.OptionalAddress)(with_plain_errors(run.run))
app.command()(with_plain_errors(plot.plot))
app.command()(with_plain_errors(report.report))
