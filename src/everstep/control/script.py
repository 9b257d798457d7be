"""Runs a script or a module as `__main__`, the way `python script.py` and `python -m module` do.

A real module stands in sys.modules["__main__"], so classes defined in the script can be pickled and
multiprocessing finds the file again. How it ended is told to the agent at once, before any tear-down.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import time
import traceback
import zipimport
from types import CodeType, ModuleType, TracebackType

from everstep.control import target
from everstep.control.launch import Kind, SpawnRequest
from everstep.core.page import Page, Word
from everstep.probe import boot


class NotRunnable(Exception):
    """There is no such script or module."""


def run(request: SpawnRequest, page: Page) -> int:
    """Run it to its end; the exit status. Word.FINISHED_NS or FAILED_NS is set when this returns.

    Everything about an error is written by then: the agent may kill the process as soon as it sees FAILED_NS.
    """
    status = _execute(request)
    page[Word.EXIT_STATUS] = (status & 0xFF) + 1
    page[Word.FAILED_NS if status & 0xFF else Word.FINISHED_NS] = time.monotonic_ns()
    boot.done()
    return status


def _execute(request: SpawnRequest) -> int:
    try:
        code, module = _load(request)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as leave:
        return _status(leave.code)
    except NotRunnable as error:
        print(f"everstep: {error}", file=sys.stderr)
        return 2 if request.kind is Kind.SCRIPT else 1  # as python does
    except BaseException as error:  # noqa: BLE001 - whatever escapes the script is its failure
        return _report(error)
    return 0


def _status(code: object) -> int:
    """What sys.exit(code) makes of its argument."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> int:
    """Error file and traceback of an exception that escaped the script, without our own frames."""
    trace = _own_frames_dropped(error.__traceback__)
    error.__traceback__ = trace
    _write_error_file(error)
    sys.last_value = error  # as python does: handlers at exit ask for it
    sys.excepthook(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def _own_frames_dropped(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen importlib._bootstrap>"):
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException) -> None:
    """What torch's @record writes, for scripts that do not use it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"py_callstack": "".join(traceback.format_exception(error)), "timestamp": str(int(time.time()))}
    record = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    try:
        with open(path, "w") as file:
            json.dump(record, file)
    except OSError as problem:
        print(f"everstep: no error file {path}: {problem.strerror}", file=sys.stderr)


def _load(request: SpawnRequest) -> tuple[CodeType, ModuleType]:
    """Code and empty `__main__` module; sets sys.argv and sys.path[0]."""
    return _load_file(request) if request.kind is Kind.SCRIPT else _load_module(request)


def _set_arguments(argv0: str, directory: str, request: SpawnRequest) -> None:
    sys.argv = [argv0, *request.args]
    sys.orig_argv = [sys.executable, request.target, *request.args]
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, directory)


def _load_file(request: SpawnRequest) -> tuple[CodeType, ModuleType]:
    path = os.path.abspath(request.target)
    found = target.container(path)
    if found is not None:
        return _load_container(path, found[0], request)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise NotRunnable(f"can't open file {path!r}: {error.strerror}") from error
    _set_arguments(request.target, os.path.dirname(os.path.realpath(path)), request)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__spec__ = None
    return compile(source, path, "exec", dont_inherit=True), _with_builtins(module)


def _load_container(
    path: str, spec: importlib.machinery.ModuleSpec | None, request: SpawnRequest
) -> tuple[CodeType, ModuleType]:
    """A directory or zip file with a __main__ module, as `python PATH` runs it: it comes first on sys.path, always."""
    code = _code(spec)
    if spec is None or code is None:
        raise NotRunnable(f"can't find '__main__' module in {path!r}")
    sys.argv = [request.target, *request.args]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path.insert(0, path)
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__spec__ = spec.origin, spec.loader, spec
    module.__package__ = ""
    module.__dict__["__cached__"] = spec.cached
    return code, _with_builtins(module)


def _load_module(request: SpawnRequest) -> tuple[CodeType, ModuleType]:
    name = request.target
    _set_arguments("-m", os.getcwd(), request)
    spec = _find(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{name}.__main__")
    code = _code(spec)
    if spec is None or code is None:
        raise NotRunnable(f"no module named {name}, or nothing in it to run")
    sys.argv[0] = spec.origin or name
    module = ModuleType("__main__")
    module.__file__, module.__loader__, module.__spec__ = spec.origin, spec.loader, spec
    module.__package__ = spec.parent
    module.__dict__["__cached__"] = spec.cached
    return code, _with_builtins(module)


def _code(spec: importlib.machinery.ModuleSpec | None) -> CodeType | None:
    """None when nothing was found, or only what has no Python code."""
    loader = spec.loader if spec else None
    if spec and isinstance(loader, importlib.abc.InspectLoader | zipimport.zipimporter):
        return loader.get_code(spec.name)
    return None


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.util.find_spec(name)
    return None


def _with_builtins(module: ModuleType) -> ModuleType:
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    return module
