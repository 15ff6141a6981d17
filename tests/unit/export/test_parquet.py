"""The columns that exports are written in: what pyarrow reads of a file is what was written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.export.parquet import ExportParquetWriter

from support import optional

optional("pyarrow")

COLUMNS: dict[str, Any] = {
    "text": "string",
    "byte": "int8",
    "short": "int32",
    "long": "int64",
    "real": "float64",
    "flag": "bool",
    "ids": ["int64"],
    "table": [["float64"]],
    "part": {"name": "string", "values": ["string"], "inner": {"flag": "bool"}},
    "parts": [{"name": "string", "ids": ["int32"]}],
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a column of this type, with nulls wherever they can be."""
    if isinstance(kind, list):
        return st.none() | st.lists(values(kind[0]), max_size=3)
    if isinstance(kind, dict):
        return st.none() | st.fixed_dictionaries({name: values(part) for name, part in kind.items()})
    scalars = {
        "string": st.text(st.characters(codec="utf-8"), max_size=5),
        "float64": st.floats(allow_nan=False),
        "bool": st.booleans(),
        **{f"int{bits}": st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 32, 64)},
    }
    return st.none() | scalars[kind]


@settings(max_examples=40)
@given(
    st.lists(st.fixed_dictionaries({name: values(kind) for name, kind in COLUMNS.items()}), min_size=1, max_size=9)
)
def test_parquet_rows_read_back_as_written(rows: list[dict[str, Any]]):
    from pyarrow import parquet

    with TemporaryDirectory() as directory:
        path = Path(directory) / "rows.parquet"
        writer = ExportParquetWriter(path, COLUMNS)
        for row in rows:
            writer.write(row)
        writer.close()
        table = parquet.read_table(path)
    table.validate(full=True)
    assert table.to_pylist() == rows


def test_pandas_is_not_imported(tmp_path: Path):
    program = (
        "import sys\nfrom pathlib import Path\nfrom understudy.export.parquet import ExportParquetWriter\n"
        "writer = ExportParquetWriter(Path(sys.argv[1]), {'ids': ['int64'], 'meta': 'json', 'events': ['json']})\n"
        "writer.write({'ids': [1, 2], 'meta': {'a': 1}, 'events': [1]})\nwriter.close()\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "rows.parquet"], check=True)
