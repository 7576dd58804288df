"""heliosctl's verbs, as functions that return what the verb prints with --json."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
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


def scalars(log: Callable[[str, float, int], Any]) -> Callable[[Record], None]:
    """Returns an ``on_epoch`` that calls log with the name, value and epoch of every figure.

    >>> writer = torch.utils.tensorboard.SummaryWriter("runs/1")
    >>> helios.train("mine", epochs=5, on_epoch=helios.scalars(writer.add_scalar))
    >>> helios.train("mine", epochs=5, on_epoch=helios.scalars(mlflow.log_metric))
    """

    def each(path: str, record: Record, step: int) -> None:
        for name, value in record.items():
            if isinstance(value, dict):
                each(f"{path}{name}/", value, step)
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                log(path + name, value, step)

    return lambda record: each(
        "", {k: v for k, v in record.items() if k != "epoch"}, record["epoch"]
    )


def run(
    *args: str | os.PathLike[str],
    binary: str | os.PathLike[str] | None = None,
    on_record: Callable[[Record], Any] | None = None,
) -> Records:
    """Runs ``heliosctl ARGS… --json`` and returns its records in their order.

    An error is raised as the exception of its exit code. Ctrl-C reaches the verb, too, which saves
    what it can. on_record gets each record when the verb prints it; the verb is interrupted where
    it raises.
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
        try:
            records, err = _finish(process, on_record)
        except ValueError as e:
            raise HeliosError(f"{' '.join(command)} printed {e}") from None
    if process.returncode:
        said = [r["error"] for r in records if r.get("event") == "error" and "error" in r]
        reason = said[-1] if said else err.strip()[-2000:] or f"exit code {process.returncode}"
        raise from_code(process.returncode, str(reason))
    return records


def _finish(
    process: subprocess.Popen[str], on_record: Callable[[Record], Any] | None
) -> tuple[Records, str]:
    """Returns what a verb prints, once it has ended."""
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    stderr = process.stderr
    errors = threading.Thread(target=lambda: said.append(stderr.read()), daemon=True)
    errors.start()
    records = Records()
    try:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            try:
                records.append(json.loads(line))
            except ValueError:
                process.kill()
                raise ValueError(repr(line.rstrip("\n")[:200])) from None
            if on_record is not None:
                on_record(records[-1])
        process.wait()
    except KeyboardInterrupt:
        # The terminal told the verb as well; it ends by itself.
        process.stdout.read()
        raise
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        raise
    finally:
        errors.join()
    return records, said[0] if said else ""


def _verb(
    verb: Sequence[str],
    dataset: Any,
    binary: Any,
    options: dict[str, Any],
    on_record: Callable[[Record], Any] | None = None,
) -> Records:
    args = [*verb]
    if dataset is not None:
        args.append(os.fspath(dataset))
    return run(*args, *flags(options), binary=binary, on_record=on_record)


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
    dataset: str | os.PathLike[str],
    *,
    binary: str | os.PathLike[str] | None = None,
    on_epoch: Callable[[Record], Any] | None = None,
    **options: Any,
) -> Result:
    """Trains a model of heliosctl's own (``heliosctl train``); returns the run's result.

    ``result["epochs"]`` has a record for each epoch, ``result.frame()`` a row. Options are the
    flags, with underscores. on_epoch gets each epoch's record when it ends: ``wandb.log`` takes it
    as it is, and :func:`scalars` makes one of TensorBoard's or MLflow's functions. Training stops
    as by Ctrl-C where it raises.
    """

    def epoch(record: Record) -> None:
        if on_epoch is not None and record.get("event") == "epoch":
            on_epoch({k: v for k, v in record.items() if k != "event"})

    return Result(_result(_verb(["train"], dataset, binary, options, epoch), "result"), "epochs")


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
