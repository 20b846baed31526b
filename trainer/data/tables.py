"""Sources that are tables: Parquet files, and data sets by name.

A table's columns are the keys of a row as in a JSONL file, unless `columns` says which column each key comes
from, or `column` names the one that holds everything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.data.base import PromptSource
from trainer.data.prompt_rows import KEYS, Row, parse_all
from trainer.errors import UserError, first_line
from trainer.ranges import Count, Text

COMMIT = re.compile(r"[0-9a-f]{40}")
BATCH = 1024  # rows of a Parquet file that are read at once


@dataclass(frozen=True)
class Parquet(PromptSource):
    """Parquet files: a path, or a pattern with `*`, whose files are read in the order of their names."""

    path: Text
    columns: dict[str, str]

    def rows(self, bad: list[str]) -> list[Row]:
        return parse_all(self._values(), bad)

    def fingerprint(self) -> str:
        return _digest((path.name, path) for path in self._files())

    def _files(self) -> list[Path]:
        files = [Path(found) for found in sorted(glob(str(Path(self.path).expanduser())))]
        if not files:
            raise UserError(f"prompts.source.path {self.path} names no file; give a Parquet file, or a "
                            "pattern such as folder/*.parquet")
        return files

    def _values(self) -> Iterator[tuple[str, int, Any]]:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        total = 0
        for path in self._files():
            try:
                with ParquetFile(path) as file:
                    names = _chosen(self.columns, file.schema_arrow.names, str(path))
                    values = (row for batch in file.iter_batches(BATCH, columns=sorted({*names.values()}))
                              for row in batch.to_pylist())
                    for number, row in enumerate(values, 1):
                        total += 1
                        yield f"{path}, row {number}", total, _row(row, names)
            except (ArrowException, OSError) as error:
                raise UserError(f"prompts.source.path: {path} cannot be read as Parquet ({first_line(error)})"
                                "; fetch or write it again") from error


@dataclass(frozen=True)
class Datasets(PromptSource):
    """A data set through `datasets`, by its name on the Hub or the folder that it lies in. `column` holds one
    text, a list of turns or of messages; null: see `columns`. `first` takes so many rows (null: all), and
    with `streaming` no more than those are fetched.

    One of the Hub is known by its revision, which is a commit, so that nothing can move under a run. A local
    folder is known by its files.
    """

    name: Text
    config: str | None
    split: Text
    column: str | None
    columns: dict[str, str]
    revision: str | None
    streaming: bool
    first: Count | None

    @property
    def quick(self) -> bool:
        return False

    def rows(self, bad: list[str]) -> list[Row]:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError

        try:
            table = load_dataset(self.name, self.config, split=self.split, revision=self.revision,
                                 streaming=self.streaming)
            return parse_all(self._values(table), bad)
        except UserError:
            raise
        except (OSError, ValueError, ConnectionError, DatasetsError) as error:
            raise UserError(f"prompts.source.name {self.name} (split {self.split}) cannot be loaded: "
                            f"{first_line(error)}; check the name, the split, the revision and the "
                            "network") from error

    def fingerprint(self) -> str:
        folder = Path(self.name).expanduser()
        if folder.is_dir():
            files = sorted(each for each in folder.rglob("*") if each.is_file())
            return _digest((str(path.relative_to(folder)), path) for path in files)
        if self.revision is None or not COMMIT.fullmatch(self.revision):
            raise UserError(f"prompts.source.revision={self.revision} is no commit, so the rows of "
                            f"{self.name} could change under a run; set it to {self._newest()}")
        return self.revision

    def _newest(self) -> str:
        """The commit that the revision means now, or where to find it."""
        import httpx
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return str(HfApi().dataset_info(self.name, revision=self.revision, timeout=10).sha)
        except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError):
            return "the 40 digits of the newest commit on its page"

    def _values(self, table: Any) -> Iterator[tuple[str, int, Any]]:
        known = table.column_names
        for number, row in enumerate(islice(table, self.first), 1):
            known = known or list(row)
            if self.column is None:
                value = _row(row, _chosen(self.columns, known, self.name))
            elif self.column in known:
                value = _of_column(row[self.column])
            else:
                raise UserError(f"prompts.source.column {self.column} is not in {self.name}; it has "
                                f"{', '.join(known)}")
            yield f"{self.name}, row {number}", number, value


def _chosen(columns: dict[str, str], known: Sequence[str], place: str) -> dict[str, str]:
    """Column by the key of a row that it is."""
    if not columns:
        found = {name: name for name in known if name in KEYS}
        if not found:
            raise UserError(f"none of the columns of {place} ({', '.join(known)}) is called as a key of a "
                            "row; say with prompts.source.columns which one holds the turns or messages")
        return found
    for key, column in columns.items():
        if key not in KEYS:
            raise UserError(f"prompts.source.columns has the key {key}; a row has {', '.join(KEYS)}")
        if column not in known:
            raise UserError(f"prompts.source.columns.{key}: the column {column} is not in {place}; it has "
                            f"{', '.join(known)}")
    return columns


def _row(row: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The row by its keys. A text that stands where a list does is the only one of it."""
    found = {key: row[column] for key, column in names.items()}
    return {key: [value] if key in ("turns", "answers") and isinstance(value, str) else value
            for key, value in found.items()}


def _of_column(value: Any) -> dict[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {"conversations" if "from" in value[0] else "messages": value}
    return {"turns": [value] if isinstance(value, str) else value}


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    """Of named files, their names and what they hold."""
    digest = hashlib.sha256()
    for name, path in files:
        try:
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    digest.update(part)
        except OSError as error:
            raise UserError(f"prompts.source: {path} cannot be read ({error.strerror}); give a file that "
                            "can") from error
    return digest.hexdigest()[:16]
