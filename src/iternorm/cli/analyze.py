"""`iternorm analyze`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from iternorm.cli.errors import check_outputs
from iternorm.cli.options import Device, data_sets, one_of
from iternorm.cli.terminal import console, progress_bar, tell_written


def analyze(
    model_factory: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_FACTORY", help="module:name or file.py:name of a model, or of a function that returns one."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="digits; mnist or cifar10, from $ITERNORM_DATA or downloaded; a .npy, .npz or .pt file; "
            "or a folder of images.",
            autocompletion=data_sets,
        ),
    ],
    batch_size: Annotated[int, typer.Option(help="Examples in a batch of the pass over the data.")] = 64,
    examples: Annotated[int, typer.Option(help="Examples to look at, chosen at random.")] = 2048,
    snd: Annotated[str, typer.Option(help="Batch sizes to estimate the batch noise (SND) for, or off.")] = "8,32,128",
    layer: Annotated[
        list[str] | None, typer.Option(help="Name of a layer; repeat it. All normalization layers unless given.")
    ] = None,
    alternative: Annotated[
        list[str] | None, typer.Option(help="What to compare with: BN, 'DBN-16', 'IterNorm T=5 d=64'; repeat it.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="train (batch statistics) or eval (running statistics).", autocompletion=one_of("train", "eval")
        ),
    ] = "train",
    image_size: Annotated[int | None, typer.Option(help="Scale and crop the images of a folder to this.")] = None,
    flatten: Annotated[bool, typer.Option("--flatten", help="Give the model vectors instead of images.")] = False,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Decides the examples, their order and the draws.")] = 0,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Write all values to this file.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page with plots to this file.")] = None,
) -> None:
    """Show conditioning, correlation, batch noise and drift of every normalization layer of a model."""
    from iternorm.analysis import Whitening
    from iternorm.analysis import analyze as analyze_model
    from iternorm.experiments.data import inputs

    sizes = _batch_sizes(snd)
    others = None if not alternative else [Whitening.parse(label) for label in alternative]
    check_outputs(json, html)
    target = inputs.open_device(device)
    model = inputs.build_model(model_factory).to(target)
    batches = inputs.open_batches(
        data, batch_size=batch_size, examples=examples, image_size=image_size, flatten=flatten, seed=seed
    )
    with progress_bar() as progress:
        tasks = {"batches": progress.add_task("batches", total=len(batches))}

        def step(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        options: dict[str, Any] = {"layers": layer or None, "batch_sizes": sizes, "mode": mode, "seed": seed}
        result = analyze_model(model, batches, alternatives=others, forward=_in_its_dtype, progress=step, **options)
    try:
        # Files first: they are what is left if nothing can be printed.
        if json is not None:
            result.to_json(json)
        if html is not None:
            result.to_html(html)
    finally:
        # The table is what is left if the disk is full.
        console.print(result.table(), highlight=False, soft_wrap=True, markup=False)
    for path in filter(None, (json, html)):
        tell_written(path)


def _in_its_dtype(model: Any, batch: Any) -> Any:
    """The model's output for a batch of fp32, or of integers, which stay as they are."""
    dtypes = (parameter.dtype for parameter in model.parameters() if parameter.dtype.is_floating_point)
    given = batch.to(next(dtypes, batch.dtype)) if batch.is_floating_point() else batch
    try:
        return model(given)
    except (RuntimeError, TypeError) as error:
        # Above all another number of channels, images where vectors are needed, or a model of several inputs.
        raise ValueError(
            f"MODEL_FACTORY: the model fails on a batch of --data, {tuple(given.shape)} in {given.dtype}: "
            f"{str(error).partition(chr(10))[0]} (ITERNORM_TRACEBACK=1 shows all)"
        ) from error


def _batch_sizes(text: str) -> tuple[int, ...]:
    if text.strip().lower() == "off":
        return ()
    try:
        return tuple(sorted({int(size) for size in text.split(",")}))
    except ValueError:
        raise ValueError(f"--snd is {text!r}, but batch sizes such as 8,32,128 or off are needed") from None
