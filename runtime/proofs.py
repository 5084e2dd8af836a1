"""What earlier starts have proved, kept beside the cost table, so that a later start of the same code need not prove it again.

A proof (``runtime.contract``) says that a captured step reads nothing but memory that somebody refills. It rests on code, versions,
device, configuration and shapes. When all of them are what they were, the step is captured as always, its owners are observed as
always, and the table of owners is compared with that of the proved step: every input of every piece, who made it, in which
segment. Equal: the proof stands, and the plan says from when it is. Anything else: the step is proved again.

The code is the whole package of the module's classes and of the objects that it holds, of ``runtime`` and of ``tkernels``, and of what
these import by name, as long as it was not installed. Of an installed package it is the classes' own files and the package's version. A
custom op that nobody imports is not seen.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

FORMAT = 1
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")})


@dataclass(frozen=True)
class StepProof:
    """One captured step. owners: digest of its table of owners; mutated, idempotent: as ``contract.prove`` found them."""

    date: str
    owners: str
    mutated: tuple[str, ...]
    idempotent: bool


@dataclass(frozen=True)
class KeyFacts:
    """What is known of a key from running its module: see the fields of the same names in ``key_steps.KeySteps``.

    exact: why no padding is allowed, or "". rows: (real rows, captured size) that were compared with the module.
    """

    date: str
    dims: tuple[dict[int, tuple[str, int]] | None, ...]
    alike: tuple[str, ...]
    follows_size: str
    written: tuple[str, ...]
    exact: str
    rows: tuple[tuple[int, int], ...]


@dataclass
class Proofs:
    """steps: by (key, mode, size); keys: by key. valid_for: what they rest on; None: nothing can be kept (the code has no file)."""

    valid_for: dict[str, str] | None
    steps: dict[tuple[str, str, int], StepProof] = field(default_factory=dict)
    keys: dict[str, KeyFacts] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        steps = [{"key": key, "mode": mode, "size": size, **asdict(proof)} for (key, mode, size), proof in sorted(self.steps.items())]
        keys = [{"key": key, **asdict(facts)} for key, facts in sorted(self.keys.items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps({"valid_for": self.valid_for, "steps": steps, "keys": keys}, indent=1))
        part.replace(path)

    @classmethod
    def load(cls, path: Path, valid_for: dict[str, str] | None) -> Proofs:
        """Those in the file if they are valid here, else none: then everything is proved, as at a first start."""
        proofs = cls(valid_for)
        try:
            data = json.loads(path.read_text())
            if valid_for is None or data["valid_for"] != valid_for:
                return proofs
            for row in data["steps"]:
                at = row.pop("key"), row.pop("mode"), row.pop("size")
                proofs.steps[at] = StepProof(**{**row, "mutated": tuple(row["mutated"])})
            for row in data["keys"]:
                row["dims"] = tuple(None if leaf is None else _dims(leaf) for leaf in row["dims"])
                row["rows"] = tuple((int(n), int(size)) for n, size in row["rows"])
                row["alike"], row["written"] = tuple(row["alike"]), tuple(row["written"])
                name = row.pop("key")
                proofs.keys[name] = KeyFacts(**row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(valid_for)
        return proofs


def _dims(leaf: Mapping[str, Any]) -> dict[int, tuple[str, int]]:
    return {int(axis): (str(name), int(extra)) for axis, (name, extra) in leaf.items()}


def file_beside(cost_table: str) -> Path:
    """``costs.json`` → ``costs.proofs.json``."""
    path = Path(cost_table).expanduser()
    return path.with_name(f"{path.stem}.proofs{path.suffix or '.json'}")


def today() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def owners_digest(addresses: Iterable[Any], kinds: Iterable[str]) -> str:
    """Changes when any input of any segment has another owner or comes from another place; not with the addresses themselves.

    addresses: rows of a step's table. kinds: what each segment is.
    """
    digest = hashlib.sha256("\n".join(kinds).encode())
    for row in addresses:
        digest.update(f"\n{row.segment} {row.kind} {row.input} {row.owner} {row.producer}".encode())
    return digest.hexdigest()[:32]


def rests_on(module: torch.nn.Module, fingerprint: Mapping[str, str], settings: str) -> dict[str, str] | None:
    """What proofs of this module rest on; None when some of its code is in no file or was changed by hand.

    fingerprint: device, shapes and versions. settings: a text of all that the captured steps depend on in the configuration.
    """
    code = code_digest(module)
    if code is None:
        return None
    try:
        frozen = hashlib.sha256(repr(_frozen_values(module)).encode("utf-8", "surrogatepass")).hexdigest()[:32]
    except Exception:  # of a user's __repr__, of a variable that a function holds and that is not set yet, of endless nesting
        return None
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    interpreted = os.environ.get("TRITON_INTERPRET", "0")
    cuda = f"{torch.version.cuda} {torch.version.hip}"
    here = {"code": code, "values": frozen, "settings": settings, "python": python, "interpreted": interpreted, "cuda": cuda}
    return {**fingerprint, **here, "proofs": str(FORMAT)}


def code_digest(module: torch.nn.Module) -> str | None:
    """Of all source that the module's steps may run, as far as it can be found; None where it cannot."""
    files: set[Path] = set()
    packages = {"runtime", "tkernels"}
    for each in module.modules():
        if "forward" in each.__dict__ or each._forward_hooks or each._forward_pre_hooks or "<locals>" in type(each).__qualname__:
            return None  # a function's variables may be part of the code
        for kind in {base for value in (each, *each.__dict__.values()) for base in type(value).__mro__}:
            package = kind.__module__.partition(".")[0]
            if package in _NOT_LOOKED_INTO or package in sys.stdlib_module_names:
                continue
            try:
                files.add(Path(inspect.getfile(kind)))
            except (TypeError, OSError):
                if issubclass(kind, torch.nn.Module):
                    return None
            packages.add(package)
    versions = [f"{package} {getattr(sys.modules.get(package), '__version__', '')}" for package in sorted(packages)]
    for package in _with_imports(packages):
        loaded = sys.modules[package]
        folders = getattr(loaded, "__path__", None)
        if folders is None:
            files.add(Path(str(loaded.__file__)))
        for folder in folders or ():
            files |= {file for kind in ("*.py", "*.json") for file in Path(folder).rglob(kind) if file.is_file()}
    digest = hashlib.sha256(repr(versions).encode())
    for file in sorted(files):
        try:
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
        except OSError:
            return None
    return digest.hexdigest()[:32]


_NOT_LOOKED_INTO = frozenset(("torch", "triton"))  # their versions are known


def _with_imports(packages: set[str]) -> set[str]:
    """Those of the packages (or modules in none) whose source is here and not installed, and such ones as their modules' names lead to."""
    found: set[str] = set()
    todo = {package for package in packages if _is_source(package)}
    while todo:
        package = todo.pop()
        found.add(package)
        modules = [m for name, m in list(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
        for each in modules:
            homes = {_home(value) for value in list(vars(each).values())} if isinstance(each, ModuleType) else set()
            todo |= {home for home in homes if home not in found and _is_source(home)}
    return found


def _home(value: Any) -> str:
    """The package, or the module in none, that a value comes from by its own account."""
    try:
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    except Exception:  # of a user's own way to give attributes
        return ""
    return home.partition(".")[0] if isinstance(home, str) else ""


def _is_source(package: str) -> bool:
    loaded: Any = sys.modules.get(package)
    where = [*(getattr(loaded, "__path__", None) or ()), *([loaded.__file__] if getattr(loaded, "__file__", None) else ())]
    if package in ("runtime", "tkernels"):
        return True
    return bool(where) and package not in _NOT_LOOKED_INTO and not any(_is_installed(str(each)) for each in where)


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}


def _frozen_values(module: torch.nn.Module) -> list[tuple[str, ...]]:
    """Values that modules hold, which graphs freeze, and the modules' classes. An object without a text of its own (``<… at 0x…>``)
    makes the list another one at each start."""
    found: list[tuple[str, ...]] = []
    seen: set[int] = set()
    for name, each in module.named_modules():
        found.append((name, type(each).__module__, type(each).__qualname__))
        found += [(name, key, _text(value, seen)) for key, value in sorted(vars(each).items()) if key not in _OF_TORCH]
    return found


def _text(value: Any, seen: set[int]) -> str:
    """All that a value says, those in it included. seen: objects described already, which are not described again."""
    if isinstance(value, (torch.Tensor, torch.nn.Module)):
        return type(value).__qualname__  # their shapes, or their own values, are known elsewhere
    if isinstance(value, (bool, int, float, str, bytes)):
        return repr(value)
    if isinstance(value, MethodType):
        return f"{_text(value.__func__, seen)} of {_text(value.__self__, seen)}"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType, ModuleType)):
        held = [_text(cell.cell_contents, seen) for cell in getattr(value, "__closure__", None) or ()]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)} {held or ''}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {[_text(item, seen) for item in value]}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__} {sorted(_text(item, seen) for item in value)}"
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    if inside is None:
        return repr(value)
    kind = type(value)
    if id(value) in seen:
        return f"{kind.__qualname__} again"
    seen.add(id(value))
    is_plain = isinstance(value, dict) or kind.__repr__ is object.__repr__ or isinstance(kind.__repr__, FunctionType)
    own = "" if is_plain else repr(value)  # of a type made in C, which may hold more than its dictionary says
    return f"{kind.__module__}.{kind.__qualname__} {own} {[(_text(key, seen), _text(item, seen)) for key, item in inside.items()]}"
