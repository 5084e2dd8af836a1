"""Makes docs/config.md from the pydantic models: ``python docs/config_reference.py``. A test fails when the page is stale."""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that it runs as a script

from pydantic import BaseModel  # noqa: E402
from pydantic_core import PydanticUndefined  # noqa: E402

from runtime.config import Bytes, RuntimeConfig  # noqa: E402

PAGE = ROOT / "docs" / "config.md"
_INTRO = """# Configuration

Made by `python docs/config_reference.py` from `runtime/config.py`.

One TOML file, or a mapping of the same shape: `RuntimeConfig.load("engine.toml")`, `RuntimeConfig.load({"graph": {"mode": "full"}})`.
Every key has a default, so an empty file is a valid configuration. An unknown key is refused, with the nearest known one in the
message. On the command line each key is an option: `--graph.mode full`.
"""


def type_name(annotation: Any) -> str:
    """How a reader writes a value of this type."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return type_name(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return " \\| ".join(f"`{_toml(value)}`" for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " \\| ".join(type_name(part) for part in typing.get_args(annotation))
    if origin in (list, tuple):
        return f"list of {type_name(typing.get_args(annotation)[0])}"
    return {int: "integer", float: "number", str: "string", bool: "true \\| false"}.get(annotation, str(annotation))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def _bytes(value: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value and value % unit == 0:
            return f'"{value // unit}{name}"'
    return str(value)


def page() -> str:
    parts = [_INTRO]
    for section, field in RuntimeConfig.model_fields.items():
        model = field.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        parts.append(f"\n## [{section}]\n\n| key | values | default | meaning |\n|---|---|---|---|\n")
        for key, entry in model.model_fields.items():
            annotation = typing.get_type_hints(model, include_extras=True)[key]
            is_bytes = Bytes.__metadata__[0] in entry.metadata
            kind = 'bytes: integer or `"512MiB"`, `"1GiB"`' if is_bytes else type_name(annotation)
            default = "" if entry.default is PydanticUndefined else f"`{_bytes(entry.default) if is_bytes else _toml(entry.default)}`"
            meaning = (entry.description or "").replace("|", "\\|")
            parts.append(f"| `{key}` | {kind} | {default} | {meaning} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"written: {PAGE.relative_to(ROOT)}")
