"""Whether there is what a worker is to run: looked up as `python` does, without importing or running any of it.

`find_spec("package.module")` imports the package, so modules are looked for path by path. A package may change its own
search path when it is imported; one whose text looks like that gets the benefit of the doubt, and so does everything
that only another interpreter could tell.
"""

from __future__ import annotations

import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path

from everstep.control.launch import Kind

REARRANGED = (
    "__path__",
    "meta_path",
    "sys.modules",
    "declare_namespace",
)  # in a package that finds modules its own way


def container(path: str) -> tuple[ModuleSpec | None] | None:
    """For a directory or zip file its __main__ module, if it has one; None for a plain file. As `python PATH`."""
    finder = pkgutil.get_importer(path)
    return None if finder is None else (finder.find_spec("__main__"),)


def why_not(kind: Kind, target: str, python: str, env: Mapping[str, str]) -> str:
    """What keeps workers from running it on this machine, and what to do about it; empty when nothing is known to.

    `python`: the workers' interpreter, empty for this one. `env`: their environment; they start in our folder.
    """
    if python and not shutil.which(python):
        return f"{python}: there is no such interpreter on this machine (PYTHON_EXEC, worker.python)"
    if kind is Kind.PROGRAM:
        return _why_not_program(target, env)
    if kind is Kind.SCRIPT:
        return _why_not_script(target)
    return "" if python else _why_not_module(target, env)


def _why_not_script(target: str) -> str:
    if not os.path.exists(target):
        return f"{target}: no such file in {Path.cwd()} (for a module use -m, for a program --no-python)"
    if not os.access(target, os.R_OK):
        return f"{target}: this user may not read it"
    found = container(os.path.abspath(target))
    if found == (None,):
        what = "directory" if os.path.isdir(target) else "zip file"
        return f"{target} is a {what} without a __main__.py: name the script in it, or put that file there"
    return ""


def _why_not_program(target: str, env: Mapping[str, str]) -> str:
    path = os.pathsep.join(os.get_exec_path(env))
    if shutil.which(target, path=path):
        return ""
    if os.path.isfile(target) and os.path.dirname(target):
        return f"{target} is not executable: chmod +x it, or leave --no-python out if it is a Python script"
    if os.path.isfile(target):
        return f"{target} is no program on PATH: for the file in {Path.cwd()} write ./{target}"
    return f"{target}: no such program in {Path.cwd() if os.path.dirname(target) else 'any folder on PATH'}"


# Modules ------------------------------------------------------------------------------------------------


def _why_not_module(target: str, env: Mapping[str, str]) -> str:
    top, *inner = target.split(".")
    spec = _top_level(top, env)
    if spec is None:
        return f"-m {target}: no module named {top}{_instead(target)}"
    name = top
    for part in inner:
        where = _locations(spec)
        if where is None:
            return f"-m {target}: {name} is a module and not a package{_instead(target)}"
        if _rearranged(spec):
            return ""
        spec = PathFinder.find_spec(part, where)
        if spec is None:
            return f"-m {target}: no module named {part} in package {name} ({', '.join(where)}){_instead(target)}"
        name += f".{part}"
    where = _locations(spec)
    if where is not None:
        if _rearranged(spec):
            return ""
        spec = PathFinder.find_spec("__main__", where)
        if spec is None:
            return f"-m {target}: package {target} has no __main__.py ({', '.join(where)}): name a module in it"
    if isinstance(spec.loader, ExtensionFileLoader) or spec.origin == "built-in":
        return f"-m {target}: it is compiled, and python -m runs Python modules only"
    return ""


def _top_level(name: str, env: Mapping[str, str]) -> ModuleSpec | None:
    """Python's own path first, then what else can find modules (those of editable installs, for one)."""
    if not name:
        return None
    found = PathFinder.find_spec(name, list(_search_path(env)))
    others = (finder for finder in sys.meta_path if finder is not PathFinder)
    return found or next(filter(None, (finder.find_spec(name, None) for finder in others)), None)


def _search_path(env: Mapping[str, str]) -> Iterator[str]:
    """Where a worker looks: its folder, as `python -m` does, then what its environment and interpreter say."""
    if not env.get("PYTHONSAFEPATH"):
        yield os.getcwd()
    yield from (os.path.abspath(entry) for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry)
    yield from sys.path


def _locations(spec: ModuleSpec) -> list[str] | None:
    """Folders of a package; None for a module. The names looked up here have no dots, so that a namespace's list of
    folders does not ask for its parent, which is not imported."""
    return None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)


def _rearranged(spec: ModuleSpec) -> bool:
    if spec.origin is None or not spec.has_location:
        return False
    try:
        text = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:  # inside a zip file
        return True
    return any(word in text for word in REARRANGED)


def _instead(target: str) -> str:
    if os.path.exists(target):
        return f"; to run the file {target} leave -m out"
    return f"; it must be in {os.getcwd()}, on PYTHONPATH or installed for {sys.executable}"
