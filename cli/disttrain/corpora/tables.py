"""Columns of text in Parquet files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from disttrain_trainer.data.corpora.manifest import CorpusError

_ROWS = 256
"""Held in memory at once."""


def group_sizes(path: Path) -> list[int]:
    """Return the bytes of each row group. Raises CorpusError for a file that is no table."""
    with _table(path) as table:
        return [table.metadata.row_group(at).total_byte_size for at in range(table.num_row_groups)]


def texts(path: Path, groups: range, field: str) -> Iterator[tuple[int, str]]:
    """Yield a column's texts of some row groups, each with the number of its row from 1.

    Raises CorpusError naming the column, or the row that has none.
    """
    with _table(path) as table:
        schema = table.schema_arrow
        if field not in schema.names:
            names = ", ".join(map(repr, schema.names[:10]))
            raise CorpusError(f"{path} has no column `{field}`; it has {names:.300}; name the column with --field")
        if str(kind := schema.field(field).type) not in ("string", "large_string", "string_view"):
            raise CorpusError(f"{path}: column `{field}` holds {kind!s:.100}, expected string")
        row = sum(table.metadata.row_group(at).num_rows for at in range(groups.start))
        for batch in table.iter_batches(batch_size=_ROWS, row_groups=list(groups), columns=[field]):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    raise CorpusError(f"{path}: row {row} has no `{field}`")
                yield row, text


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise CorpusError(f"{path} needs the library pyarrow: pip install 'disttrain[data]'") from error
    try:
        with ParquetFile(path) as table:
            yield table
    # UnicodeDecodeError: a column of strings that are none.
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} is no sound Parquet file: {error!s:.300}") from error
