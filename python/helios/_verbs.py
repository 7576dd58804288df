"""heliosctl's verbs, as functions that return what the verb prints with --json."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._daemon import find_binary
from ._errors import CapabilityError, HeliosError, UsageError, from_code

if TYPE_CHECKING:
    from pandas import DataFrame

Record = dict[str, Any]


class Records(list[Record]):
    """What a verb printed, in its order."""

    def frame(self) -> DataFrame:
        """Returns a DataFrame with a row for each record; fields within fields are ``a.b``."""
        return _frame(self)


class Result(Record):
    """A run's result, and its records as a table."""

    def __init__(self, fields: Record, table: str) -> None:
        """The field that is named table has a list of records."""
        super().__init__(fields)
        self._table = table

    def frame(self) -> DataFrame:
        """Returns a DataFrame of the epochs or runs; its ``attrs`` have the other fields."""
        frame = _frame(self.get(self._table, []))
        frame.attrs.update({k: v for k, v in self.items() if k != self._table})
        return frame


def _frame(records: Sequence[Record]) -> DataFrame:
    try:
        import pandas
    except ImportError as e:
        raise CapabilityError(
            "a DataFrame needs pandas; install it (pip install pandas), or take the dicts"
        ) from e
    return pandas.json_normalize(list(records))


def run(*args: str | os.PathLike[str], binary: str | os.PathLike[str] | None = None) -> Records:
    """Runs ``heliosctl ARGS… --json`` and returns its records in their order.

    An error is raised as the exception of its exit code. Ctrl-C reaches the verb, too, which saves
    what it can.
    """
    command = [find_binary(binary), *(os.fspath(a) for a in args), "--json"]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "HELIOS_KEYWORDS": "1"},  # errors name options as keywords
    ) as process:
        out, err = _finish(process)
    records = Records()
    for line in out.splitlines():
        if line.startswith("{"):
            try:
                records.append(json.loads(line))
            except ValueError:
                raise HeliosError(f"{' '.join(command)} printed {line[:200]!r}") from None
    if process.returncode:
        said = [r["error"] for r in records if r.get("event") == "error" and "error" in r]
        reason = said[-1] if said else err.strip()[-2000:] or f"exit code {process.returncode}"
        raise from_code(process.returncode, str(reason))
    return records


def _finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate()
    except KeyboardInterrupt:
        # The terminal told the verb as well; it ends by itself.
        process.communicate()
        raise


def _verb(verb: Sequence[str], dataset: Any, binary: Any, options: dict[str, Any]) -> Records:
    args = [*verb]
    if dataset is not None:
        args.append(os.fspath(dataset))
    return run(*args, *flags(options), binary=binary)


def flags(options: dict[str, Any]) -> list[str]:
    """Returns options as flags: ``gpu_cache="5%"`` is ``--gpu-cache=5%``. None leaves one out.

    A name that Python has for itself gets an underscore: ``in_``.
    """
    out = []
    for name, value in options.items():
        if value is not None:
            out.append(f"--{name.rstrip('_').replace('_', '-')}={_text(name, value)}")
    return out


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (list, tuple)):
        return ",".join(_text(name, v) for v in value)
    raise UsageError(f"option {name} has the value {value!r}; give a number or a text")


def _result(records: list[Record], event: str) -> Record:
    found = [r for r in records if r.get("event") == event]
    if not found:
        raise HeliosError(f"heliosctl printed no {event} among {len(records)} records")
    return found[-1]


def train(
    dataset: str | os.PathLike[str], *, binary: str | os.PathLike[str] | None = None, **options: Any
) -> Result:
    """Trains a model of heliosctl's own (``heliosctl train``); returns the run's result.

    ``result["epochs"]`` has a record for each epoch, ``result.frame()`` a row. Options are the
    flags, with underscores.
    """
    return Result(_result(_verb(["train"], dataset, binary, options), "result"), "epochs")


def compare(
    dataset: str | os.PathLike[str], *, binary: str | os.PathLike[str] | None = None, **options: Any
) -> Result:
    """Trains by several data paths in turns (``heliosctl compare``); returns the comparison.

    ``result["runs"]`` has a record for each run, ``result.frame()`` a row.
    """
    records = _verb(["compare"], dataset, binary, options)
    runs = [r for r in records if r.get("event") == "run"]
    return Result({**_result(records, "compare"), "runs": runs}, "runs")


def import_(
    kind: str,
    out: str | os.PathLike[str],
    *,
    binary: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Record:
    """Makes a dataset of another format (``heliosctl import KIND``); returns the result.

    >>> helios.import_("ogb", "mine", in_="ogbn_arxiv")

    :func:`save` makes one from arrays.
    """
    records = run("import", kind, f"--out={os.fspath(out)}", *flags(options), binary=binary)
    return records[-1] if records else {}


def bench(
    what: str,
    dataset: str | os.PathLike[str] | None = None,
    *,
    binary: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Records:
    """Measures a part of the program (``heliosctl bench WHAT``); returns its records."""
    return _verb(["bench", what], dataset, binary, options)
