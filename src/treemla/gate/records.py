"""Files of records as values: text that can be read, and fields of the types that their dataclass declares."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def text_of(path: Path) -> str:
    """What a file holds, as UTF-8. ValueError names one that cannot be read or is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected a file of UTF-8 text: {error}") from error


def parsed(text: str) -> Any:
    """What JSON text holds. ValueError for any other, one nested too deeply for the parser too."""
    try:
        made = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "\\u" in text:
        json.dumps(made, ensure_ascii=False).encode()  # half of a surrogate pair is no text: it cannot be printed
    return made


def made_of(kind: type[T], record: object) -> T:
    """The dataclass `kind` of what JSON holds of it. ValueError names fields missing, unknown or of another type."""
    if type(record) is not dict:
        raise ValueError(f"expected an object, got {record!r:.80}")
    wanted = {field.name: field for field in fields(kind)}  # type: ignore[arg-type] # T is a dataclass: no type says so
    needed = {name for name, field in wanted.items() if field.default is field.default_factory is MISSING}
    if wrong := (set(record) - set(wanted)) | (needed - set(record)):
        raise ValueError(f"fields missing or unknown: {sorted(wrong)}")
    types = get_type_hints(kind)
    return kind(**{name: _typed(name, types[name], value) for name, value in record.items()})


def _typed(name: str, kind: Any, value: object) -> object:
    """`value`, a JSON array as a tuple and an integer as the float that is declared."""
    if is_dataclass(kind):
        try:
            return made_of(kind, value)  # type: ignore[arg-type] # is_dataclass also admits instances
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_typed(f"{name}[{n}]", get_args(kind)[0], part) for n, part in enumerate(value))
    if get_origin(kind) is Mapping and type(value) is dict:
        return {key: _typed(f"{name}[{key!r}]", get_args(kind)[1], part) for key, part in value.items()}
    if get_origin(kind) is UnionType:  # a plain type or None
        kind = type(None) if value is None else get_args(kind)[0]
    if kind is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if kind is not Any and type(value) is not kind:
        raise ValueError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {value!r:.80}")
    return value
