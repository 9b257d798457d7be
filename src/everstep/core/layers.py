"""Where configuration comes from: layers of settings, later ones win, each value remembering who set it.

The order is defaults < everstep.toml < PET_* variables < flags < `--set`. A layer is a flat mapping from the full
key ("nodes.min") to a `Setting`. Every error names the key, the place, and what is expected there.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import msgspec

from everstep.core.config import JOB_NAME_REFUSED, Group, Hang, RunConfig, check
from everstep.core.errors import UsageError


class Setting(NamedTuple):
    """A value and where it was set. `text`: it came as a string, so "4" may mean the number."""

    value: object
    origin: str
    text: bool = False


Layer = Mapping[str, Setting]


class Resolved(NamedTuple):
    """The outcome. `origins` holds only keys somebody set."""

    config: RunConfig
    origins: dict[str, str]


@functools.cache
def known_keys() -> dict[str, Any]:
    """Full key of every setting -> its type. Mappings (env, rendezvous.conf) are one key, free below it."""
    return dict(_walk(RunConfig, ""))


def _walk(group: type[Group], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(group):
        key = prefix + field.name
        if isinstance(field.type, type) and issubclass(field.type, Group):
            yield from _walk(field.type, key + ".")
        else:
            yield key, field.type


def _is_mapping(kind: Any) -> bool:
    return get_origin(kind) is dict


def _groups() -> set[str]:
    return {key.rpartition(".")[0] for key in known_keys()} - {""}


def type_of(key: str, origin: str) -> Any:
    """The type of a key; one below a mapping has the type of its values. Raises UsageError for an unknown key."""
    keys = known_keys()
    if key in keys:
        return keys[key]
    for name, kind in keys.items():
        if _is_mapping(kind) and key.startswith(name + "."):
            return get_args(kind)[1]
    raise UsageError(f"{origin}: unknown key {key!r}{suggestion(_nearest(key))}")


def suggestion(name: str | None) -> str:
    return f"; did you mean {name!r}?" if name else ""


def _nearest(key: str) -> str | None:
    """The known key most like this one: of its own group, else of any, else by the whole name."""
    keys = list(known_keys())
    group, _, last = key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in keys if name.rpartition(".")[0] == group}
    for candidates in (siblings, {name.rpartition(".")[2]: name for name in keys}):
        close = difflib.get_close_matches(last, candidates, n=1, cutoff=0.7)
        if close:
            return candidates[close[0]]
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    return close[0] if close else None


def from_toml(path: Path) -> dict[str, Setting]:
    """The layer of a file. Raises UsageError for a missing or malformed one, and for keys nobody knows."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    return dict(_flatten(tree, "", str(path)))


def _flatten(tree: Mapping[str, object], prefix: str, origin: str) -> Iterator[tuple[str, Setting]]:
    for name, value in tree.items():
        key = prefix + name
        if isinstance(value, dict) and (key in _groups() or _is_mapping(known_keys().get(key))):
            yield from _flatten(value, key + ".", origin)
            continue
        if key in _groups():
            raise UsageError(f"{origin}: {key} is a group of settings: write [{key}] and its keys below")
        type_of(key, origin)
        yield key, Setting(value, origin)


def from_set(text: str) -> dict[str, Setting]:
    """The layer of one `--set KEY=VALUE`: VALUE in TOML's syntax, else the plain string."""
    key, equals, raw = text.partition("=")
    key, raw = key.strip(), raw.strip()
    if not equals or not key:
        raise UsageError(f"--set {text!r}: expected KEY=VALUE, as in --set nodes.min=2")
    if key in _groups():
        raise UsageError(f"--set {text!r}: {key} is a group of settings: name a key, as in {key}.NAME=VALUE")
    kind = type_of(key, "--set")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return {key: Setting(raw, "--set", text=True)}
    if isinstance(value, dict):
        return dict(_flatten({key: value}, "", "--set"))
    if kind is str and not isinstance(value, str):
        value = raw  # 3 or true, where a string is wanted, are those characters
    return {key: Setting(value, "--set")}


def resolve(layers: Iterable[Layer]) -> Resolved:
    """Merge layers, later ones over earlier ones, convert every value, and check that they work together."""
    settings: dict[str, Setting] = {}
    for layer in layers:
        settings |= layer
    converted = {key: _convert(key, setting) for key, setting in settings.items()}
    origins = {key: setting.origin for key, setting in settings.items()}
    _derive(converted, origins)
    config = msgspec.convert(_nest(converted), RunConfig)
    check(config, origins)
    return Resolved(config, origins)


def _convert(key: str, setting: Setting) -> object:
    kind = type_of(key, setting.origin)
    try:
        value: object = msgspec.convert(setting.value, kind, strict=not setting.text)
    except msgspec.ValidationError as error:
        raise UsageError(f"{setting.origin}: {key} = {setting.value!r}: expected {expectation(kind)}") from error
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{setting.origin}: {key} = {setting.value!r}: expected a finite number")
    return value


def expectation(kind: Any) -> str:
    """What a value of this type looks like, in words."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        signs = {"ge": "at least", "gt": "above", "le": "at most"}
        bounds = [
            f"{word} {getattr(meta, name)}"
            for meta in args[1:]
            for name, word in signs.items()
            if getattr(meta, name) is not None
        ]
        return f"{expectation(args[0])} {' and '.join(bounds)}"
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(expectation, args))
    if origin is tuple:
        return f"a list, each {expectation(args[0])}"
    if origin is dict:
        return "a table of NAME = VALUE"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]


def _derive(values: dict[str, object], origins: dict[str, str]) -> None:
    """Defaults that follow from what was set.

    Nodes of this machine are the job's nodes unless --nnodes says otherwise, a rendezvous id names the job (its run
    folder too, hence the characters), and no phase gets less time than a step.
    """
    local_nodes = values.get("nodes.local_nodes")
    if local_nodes is not None and not values.keys() & {"nodes.min", "nodes.max"}:
        for key in ("nodes.min", "nodes.max"):
            values[key], origins[key] = local_nodes, f"follows {origins['nodes.local_nodes']}"
    if values.get("rendezvous.id") and "job" not in values:
        values["job"] = re.sub(JOB_NAME_REFUSED, "-", str(values["rendezvous.id"]))
        origins["job"] = f"follows {origins['rendezvous.id']}"
    timeout = values.get("hang.timeout_s")
    for name in ("first_step_s", "save_s", "eval_s"):
        key = f"hang.{name}"
        if isinstance(timeout, float) and key not in values and timeout > getattr(Hang(), name):
            values[key], origins[key] = timeout, f"follows {origins['hang.timeout_s']}"


def _nest(flat: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = _path(key)
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[name] = value
    return tree


def _path(key: str) -> list[str]:
    """Parts of a key. What is below a mapping is one part: names there may hold dots."""
    for name, kind in known_keys().items():
        if _is_mapping(kind) and key.startswith(name + "."):
            return [*name.split("."), key[len(name) + 1 :]]
    return key.split(".")


def to_toml(resolved: Resolved) -> str:
    """The whole configuration as a file which `--config` reads back, each set key with where it came from."""
    tables: dict[str, list[str]] = {"": []}
    for key, kind in known_keys().items():
        value: Any = resolved.config
        for name in key.split("."):
            value = getattr(value, name)
        if _is_mapping(kind):
            lines = [f"{_literal(name)} = {_literal(item)}" for name, item in value.items()]
            tables[key] = lines
            continue
        group, _, name = key.rpartition(".")
        origin = resolved.origins.get(key)
        tables.setdefault(group, []).append(f"{name} = {_literal(value)}" + (f"  # {origin}" if origin else ""))
    blocks = ["\n".join(([f"[{name}]"] if name else []) + lines) for name, lines in tables.items() if lines]
    return "\n\n".join(blocks) + "\n"


def _literal(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)
