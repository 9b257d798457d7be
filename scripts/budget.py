"""Measures our own code against the size budget of CONTRIBUTING.md, with `ast`: python scripts/budget.py

The median file and nine functions of ten are judged over src together; the hard limits hold for each file and
function of the whole repository. `tests/test_architecture.py` asserts the same numbers.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "examples", "benchmarks", "scripts")
MEDIAN_FILE_LINES = 150
P90_FUNCTION_LINES = 35
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# "path" or "path:function" -> why it may break a hard limit. An entry that is no longer needed is an error.
EXCEPTIONS: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Broken(NamedTuple):
    """One broken limit. `where` is the key that EXCEPTIONS uses."""

    where: str
    what: str


class Source(NamedTuple):
    """One parsed file; `path` is relative to the root, with forward slashes."""

    path: str
    num_lines: int
    tree: ast.Module


def sources(root: Path, folders: Sequence[str] = FOLDERS) -> list[Source]:
    """All Python files of our own below these folders."""
    found = []
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        found.append(Source(file.relative_to(root).as_posix(), text.count("\n"), ast.parse(text, str(file))))
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def num_lines(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def untyped(function: Function) -> list[str]:
    """Names of the parameters without an annotation, and "return". A method's own object needs none."""
    spec = function.args
    positional = [*spec.posonlyargs, *spec.args]
    if positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    rest = [argument for argument in (spec.vararg, spec.kwarg) if argument is not None]
    names = [argument.arg for argument in (*positional, *spec.kwonlyargs, *rest) if argument.annotation is None]
    return names if function.returns is not None else [*names, "return"]


def percentile(values: Sequence[int], share: float) -> int:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def broken_limits(files: Sequence[Source]) -> Iterator[Broken]:
    """The hard limits that single files and functions break, exceptions included."""
    for source in files:
        if source.num_lines > MAX_FILE_LINES:
            yield Broken(source.path, f"{source.num_lines} lines, the limit is {MAX_FILE_LINES}")
        if not ast.get_docstring(source.tree):
            yield Broken(source.path, "no docstring: say in a paragraph what the module is for")
        for function in functions(source.tree):
            where = f"{source.path}:{function.name}"
            if num_lines(function) > MAX_FUNCTION_LINES:
                yield Broken(where, f"{num_lines(function)} lines, the limit is {MAX_FUNCTION_LINES}")
            if missing := untyped(function):
                yield Broken(where, f"line {function.lineno}: no type for {', '.join(missing)}")


class Figures(NamedTuple):
    """Size of a tree, in lines but for the counts."""

    num_files: int
    median_file: float
    largest_file: int
    num_functions: int
    median_function: float
    p90_function: int
    longest_function: int


def figures(files: Sequence[Source]) -> Figures:
    lengths = [num_lines(function) for source in files for function in functions(source.tree)]
    sizes = [source.num_lines for source in files]
    return Figures(
        num_files=len(sizes),
        median_file=statistics.median(sizes),
        largest_file=max(sizes),
        num_functions=len(lengths),
        median_function=statistics.median(lengths),
        p90_function=percentile(lengths, 0.9),
        longest_function=max(lengths),
    )


def judge(root: Path) -> list[str]:
    """Everything that is over budget, one line each; empty when all is well."""
    files = sources(root)
    size = figures([source for source in files if source.path.startswith("src/")])
    lines = []
    if size.median_file > MEDIAN_FILE_LINES:
        lines.append(f"src: the median file has {size.median_file:.0f} lines, the limit is {MEDIAN_FILE_LINES}")
    if size.p90_function > P90_FUNCTION_LINES:
        lines.append(f"src: one function of ten is over {size.p90_function} lines, the limit is {P90_FUNCTION_LINES}")
    broken = list(broken_limits(files))
    lines += [f"{where}: {what}" for where, what in broken if where not in EXCEPTIONS]
    unneeded = EXCEPTIONS.keys() - {where for where, _ in broken}
    return lines + [f"{where}: its exception is no longer needed: remove it" for where in sorted(unneeded)]


def main() -> int:
    for folder in FOLDERS:
        files = sources(ROOT, [folder])
        if any(True for source in files for _ in functions(source.tree)):
            size = figures(files)
            print(
                f"{folder}: {size.num_files} files, median {size.median_file:.0f} lines, largest {size.largest_file};"
                f" {size.num_functions} functions, median {size.median_function:.0f} lines,"
                f" p90 {size.p90_function}, longest {size.longest_function}"
            )
    complaints = judge(ROOT)
    for line in complaints:
        print(line, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
