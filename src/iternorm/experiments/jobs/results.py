"""Results of experiments on disk: one small JSON file a job, whose path is a function of the job's configuration."""

import hashlib
import json
import math
import re
import reprlib
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iternorm.report.files import write_text_atomically

FORMAT = 1
# Of a job, in bytes: file systems take 255, and files are named by more than the job.
_LONGEST_NAME = 200

# A configuration is plain values, so that it can be digested and written; "job" is its readable name.
Config = Mapping[str, Any]
Row = Mapping[str, Any]

# What the report reads of a provenance, each where it is there.
_PROVENANCE = {
    **dict.fromkeys(("machine", "torch", "data", "study_file"), (dict, "an object")),
    "processes": (int, "a whole number"),
    "precision": (str, "a name"),
    "commit": (str | None, "a commit or null"),
}


@dataclass(frozen=True)
class Result:
    """A finished job.

    Attributes:
        experiment: The experiment's id.
        config: The job's configuration.
        rows: What it measured.
        seconds: Wall-clock time.
        provenance: Machine, versions, commit and time.
    """

    experiment: str
    config: Config
    rows: Sequence[Row]
    seconds: float
    provenance: Mapping[str, Any]

    def data_count(self, name: str) -> int | None:
        """``classes``, ``train_images`` or ``test_images`` of its data, where that was noted."""
        found = self.provenance.get("data", {}).get(name)
        return found if isinstance(found, int) else None


class UnusableResultError(ValueError):
    """A results file that is truncated, of another version or shape, or not of the configuration its path says."""


def result_path(root: Path, experiment: str, config: Config) -> Path:
    """``ROOT/EXPERIMENT/JOB-DIGEST.json``, the digest being that of the configuration.

    Example:
        >>> result_path(Path("results"), "fig4", {"job": "d2", "dimension": 2}).as_posix()
        'results/fig4/d2-3970d146.json'
    """
    job = config["job"]
    if not re.fullmatch(r"[\w.=-]+", job):
        raise ValueError(f"the job name {job!r} of {experiment} does not make a file name")
    return root / experiment / f"{job}-{_digest(config)}.json"


def check_config(config: object, where: str) -> None:
    """Refuse what is not a configuration.

    Args:
        config: What is one, or not.
        where: Who made it.

    Raises:
        ValueError: It is none.
    """
    problem = None
    if not isinstance(config, Mapping) or not isinstance(config.get("job"), str):
        problem = "a mapping with a name as its 'job' is needed"
    elif not re.fullmatch(r"[\w=-][\w.=-]*", config["job"]) or len(config["job"].encode()) > _LONGEST_NAME:
        problem = f"a 'job' of at most {_LONGEST_NAME} letters, digits and _ . = - is needed, without a dot in front"
    else:
        try:
            json.dumps(config, allow_nan=False, sort_keys=True)
        except (TypeError, ValueError) as error:
            problem = f"plain values are needed, under names that are strings ({error})"
    if problem is not None:
        raise ValueError(f"{where} gives {config!r}: {problem}")


def check_rows(rows: object, where: str) -> list[Row]:
    """The rows of a job as a list; refuse what cannot be kept.

    Args:
        rows: What a job returned.
        where: Who made them.

    Raises:
        ValueError: They are no rows, or hold what JSON cannot represent.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str):
        raise ValueError(f"{where} returns {reprlib.repr(rows)}: a list of rows, mappings of plain values, is needed")
    found = list(rows)
    if not found:
        raise ValueError(f"{where} returns no rows: one or more are needed")
    for row in found:
        if not isinstance(row, Mapping):
            raise ValueError(f"{where} returns the row {reprlib.repr(row)}: a mapping of plain values is needed")
        if not all(isinstance(name, str) for name in row):
            raise ValueError(f"{where} returns the row {row!r}: names that are strings are needed")
        try:
            json.dumps(row, allow_nan=False)
        except (TypeError, ValueError) as error:
            message = f"{where} returns the row {row!r}: plain values, and None for what is not finite, are needed"
            # With None alone, the last finite value would be taken for the run's.
            hint = '; a run that diverged has "diverged": True in its last row' if isinstance(error, ValueError) else ""
            raise ValueError(f"{message}{hint} ({error})") from error
    return found


def check_record(record: Mapping[str, Any], where: str) -> None:
    """Refuse what cannot be kept of a job's notes.

    Args:
        record: What a job noted in its context.
        where: Who noted it.

    Raises:
        ValueError: It holds what JSON cannot represent.
    """
    try:
        json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} notes {record!r} in context.record: plain values are needed ({error})") from error


def _digest(config: Config) -> str:
    text = json.dumps(config, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def save(root: Path, result: Result) -> Path:
    """Write a result where its configuration says. The file holds all of it or does not change.

    Raises:
        OSError: It cannot be written. It then lies where temporary files do, if it can, and the error says so.
        ValueError: It holds values that JSON cannot represent, or that `load` would refuse.
    """
    path = result_path(root, result.experiment, result.config)
    if (problem := _problem(result.rows, result.seconds, result.provenance)) is not None:
        raise ValueError(f"{path} is not written: {problem}")
    content = {
        "format": FORMAT,
        "experiment": result.experiment,
        "config": result.config,
        "seconds": round(result.seconds, 3),
        "provenance": result.provenance,
        "rows": result.rows,
    }
    text = _readable(content) + "\n"
    try:
        return write_text_atomically(path, text)
    except OSError as error:
        # The system's own error, whose number tells whether two failures are alike.
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
        elsewhere = _save_elsewhere(path.name, text)
        remedy = "run the job again; its checkpoint, where it writes any, is kept"
        if elsewhere is not None:
            remedy = f"move {elsewhere} there, which is the result"
        raise OSError(
            f"{path} could not be saved: {cause.strerror or cause}: make room or change permissions there, and {remedy}"
        ) from cause


def _save_elsewhere(name: str, text: str) -> Path | None:
    """A result in a folder of its own where temporary files lie; None where it cannot be written there either."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="iternorm-"))
        return write_text_atomically(folder / name, text)
    except OSError:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return None


def load(root: Path, experiment: str, config: Config) -> Result | None:
    """The result of a configuration, or None where there is none.

    Raises:
        UnusableResultError: There is a file, and it is not that result.
        OSError: There is a file, and it cannot be read.
    """
    path = result_path(root, experiment, config)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise UnusableResultError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        why = error.strerror or error
        raise OSError(f"{path} cannot be read: {why}: change its permissions, or move away what is there") from error
    try:
        content = json.loads(text)
    # Nested too deeply: what a program wrote that is not this one.
    except (ValueError, RecursionError) as error:
        raise UnusableResultError(f"{path} is not complete JSON ({error})") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise UnusableResultError(f"{path} has format {found!r}, this version of iternorm writes {FORMAT}")
    # What JSON makes of the configuration: tuples are lists there.
    if (content.get("experiment"), content.get("config")) != (experiment, json.loads(json.dumps(config))):
        raise UnusableResultError(f"{path} holds the result of another configuration")
    try:
        found = Result(**{key: content[key] for key in ("experiment", "config", "rows", "seconds", "provenance")})
    except KeyError as error:
        raise UnusableResultError(f"{path} has no {error}") from error
    if (problem := _problem(found.rows, found.seconds, found.provenance)) is not None:
        raise UnusableResultError(f"{path} is not a result: {problem}")
    return found


def _problem(rows: object, seconds: object, provenance: object) -> str | None:
    """What is wrong with the shape of a result; the values of its rows are the experiment's own."""
    if not isinstance(rows, list | tuple) or not rows or not all(isinstance(row, Mapping) for row in rows):
        return f"its rows are {reprlib.repr(rows)}, and a list of one or more objects is needed"
    if not isinstance(seconds, float | int) or not 0 <= seconds < math.inf:
        return f"its seconds are {seconds!r}, and a finite number of 0 or more is needed"
    if not isinstance(provenance, Mapping):
        return f"its provenance is {reprlib.repr(provenance)}, and an object is needed"
    for name, (kind, wanted) in _PROVENANCE.items():
        if name in provenance and not isinstance(provenance[name], kind):
            return f"{name!r} of its provenance is {reprlib.repr(provenance[name])}, and {wanted} is needed"
    return None


def set_aside(path: Path) -> Path:
    """Rename an unusable file to ``NAME.unusable`` (``.unusable.1`` and so on), and return its new path."""
    target = path.with_name(path.name + ".unusable")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.unusable.{number}")
    return path.rename(target)


def _readable(content: Mapping[str, Any]) -> str:
    """JSON with one line per row, so that diffs of results are short."""
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, allow_nan=False)
    rows = ",\n".join("  " + json.dumps(row, allow_nan=False) for row in content["rows"])
    return head.removesuffix("\n}") + ',\n "rows": [\n' + rows + "\n ]\n}"
