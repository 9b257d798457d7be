"""Writes the part of docs/journal.md that describes each event, from the code: python scripts/journal_page.py [--check]

What stands above the line MADE is written by hand. tests/test_journal_page.py asserts that the rest is current.
"""

from __future__ import annotations

import enum
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.core import events

PAGE = Path(__file__).resolve().parents[1] / "docs" / "journal.md"
MADE = "<!-- From here on written by scripts/journal_page.py -->"


def page(text: str) -> str:
    """The page with what is made from the code made anew."""
    head, line, _ = text.partition(MADE)
    if not line:
        raise ValueError(f"no line {MADE}")
    return head + line + "\n\n" + "\n".join(made()) + "\n"


def made() -> Iterator[str]:
    kinds = {"Inputs": typing.get_args(events.Input), "Records": typing.get_args(events.Record)}
    for title, members in kinds.items():
        yield f"## {title}"
        yield ""
        for member in members:
            yield from described(member)
    yield "## Types in them"
    yield ""
    roots = [member for members in kinds.values() for member in members]
    for kind in sorted(reachable(roots) - set(roots), key=lambda kind: kind.__name__):
        yield from described(kind)


def reachable(roots: list[type]) -> set[type]:
    """Structs and enums of ours that the fields of these hold, and theirs."""
    found: set[type] = set()
    todo = list(roots)
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct | enum.Enum):
            if kind not in found:
                found.add(kind)
                todo += typing.get_type_hints(kind).values() if issubclass(kind, msgspec.Struct) else []
        else:
            todo += typing.get_args(kind)
    return found


def described(kind: type) -> Iterator[str]:
    yield f"### {kind.__name__}"
    yield ""
    if text := documentation(kind):
        yield text
        yield ""
    if issubclass(kind, enum.Enum):
        notes = comments(kind)
        yield from (f"- `{each.value}` {notes.get(each.name, '')}".rstrip() for each in kind)
    elif fields := msgspec.structs.fields(typing.cast(type[msgspec.Struct], kind)):
        notes = comments(kind)
        yield "| field | type | when absent | |"
        yield "|---|---|---|---|"
        hints = annotations(kind)
        yield from (
            f"| `{f.encode_name}` | {cell(hints[f.name])} | {cell(default(f))} | {notes.get(f.name, '')} |"
            for f in fields
        )
    else:
        yield "No fields."
    yield ""


def documentation(kind: type) -> str:
    """Its own: neither its base's nor what enum and msgspec put there."""
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    return "" if text.startswith("An enumeration") else text


def comments(kind: type) -> dict[str, str]:
    """By field: what stands behind it in the source."""
    found = {}
    for line in inspect.getsource(kind).splitlines():
        if match := re.match(r"    (\w+)\b.*?  # (.*)$", line):
            found[match[1]] = match[2]
    return found


def annotations(kind: type) -> dict[str, str]:
    named: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        named |= {name: str(text) for name, text in inspect.get_annotations(base).items()}
    return named


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return str(msgspec.to_builtins(field.default_factory()))[:20]
    if field.default is msgspec.NODEFAULT:
        return ""
    return msgspec.json.encode(field.default).decode()


def cell(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def main() -> int:
    text = PAGE.read_text(encoding="utf-8")
    new = page(text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
