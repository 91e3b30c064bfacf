"""JSON read with its text as it stands.

PyArrow takes text like `1999-03-03` or `12:30:00` for dates and times, where a whole piece of a file holds nothing
else in a column, and `datasets` turns these into other text (`1999-03-03 00:00:00`) where another piece holds more. So
what PyArrow has read as a date is read again, as text.

A column that holds text and something else is kept as JSON by `datasets`, which takes the text `"1"` there for JSON
already, and gives a number back. So text is always encoded; and by Python's own library, which keeps every digit, with
blank lines left blank, on which such a column else fails.
"""

from __future__ import annotations

import functools
import json
from typing import Any

READ_ALIKE = {"encoding_errors": "strict"}
"""What `datasets` does anyway; it gives the tables that it keeps on disk a name of their own, for what is there already
may hold dates."""


@functools.cache
def keep_text() -> None:
    """From now on `datasets` reads no text of a JSON file as a date or a number."""
    from datasets.packaged_modules.json import json as reading
    from datasets.utils import json as encoding

    for module in (reading, encoding):
        module.json_encode_field, module.ujson_loads, module.ujson_dumps = encode_field, _loads, _dumps
    reading.paj = _TextReader(reading.paj)


def _loads(line: bytes | str) -> Any:
    return json.loads(line) if line.strip() else None


def _dumps(value: Any) -> str:
    return "" if value is None else json.dumps(value)


def encode_field(example: Any, path: list[Any]) -> Any:
    """An example with what lies at a path in it as JSON.

    Args:
        example: any JSON value.
        path: keys of objects, and 0 for each item of a list.
    """
    if example is None:
        return None
    if not path:
        return json.dumps(example)
    field, *rest = path
    if field == 0:
        return [encode_field(item, rest) for item in example]
    return {**example, field: encode_field(example.get(field), rest)}


class _TextReader:
    """`pyarrow.json` with another `read_json`."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def read_json(self, file: Any, read_options: Any = None, parse_options: Any = None) -> Any:
        """A table, its columns of dates and times as text."""
        import pyarrow

        table = self._library.read_json(file, read_options=read_options, parse_options=parse_options)
        dated = [field for field in table.schema if as_text(field.type) != field.type]
        if not dated:
            return table
        file.seek(0)
        schema = pyarrow.schema([field.with_type(as_text(field.type)) for field in dated])
        again = self._library.ParseOptions(explicit_schema=schema)
        texts = self._library.read_json(file, read_options=read_options, parse_options=again)
        return texts.select(table.column_names)


def as_text(kind: Any) -> Any:
    """A type of PyArrow with text in the place of dates and times, however deep."""
    import pyarrow

    types = pyarrow.types
    if types.is_temporal(kind):
        return pyarrow.string()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(as_text(field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(as_text(kind.value_type)))
    return kind
