"""Environments with packages of others, beside .venv: `.venv-peers*` in the root, made on first use.

What they install keeps to the versions of requirements/lock.txt, so everybody has the same torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"
ASK = """
import importlib.metadata, sys
for pinned in sys.argv[1:]:
    name, _, version = pinned.partition("==")
    if importlib.metadata.version(name).partition("+")[0] != version:
        sys.exit(1)
"""


class NotInstalled(Exception):
    """pip could not get or build a package; the text says which, and what pip said last."""


def prepare(folder: Path, *pinned: str, editable: bool = False) -> Path:
    """The interpreter of the environment in `folder`; what it lacks of `pinned` ("name==version") is installed.

    editable: Everstep too, as it is in this tree. Raises NotInstalled.
    """
    python = folder / "bin" / "python"
    own = [f"everstep=={_own_version()}"] if editable else []
    if python.exists() and _has(python, [*pinned, *own]):
        return python
    print(f"installing {', '.join(pinned)} into {folder}, once: this may take minutes", file=sys.stderr, flush=True)
    if not python.exists():
        venv.create(folder, with_pip=True)
    _install(python, *pinned, *(["hatchling", "editables"] if editable else []))
    if editable:
        _install(python, "--no-build-isolation", "--editable", str(ROOT))
    return python


def locked(name: str) -> str:
    """ "name==version" of the lock."""
    (line,) = (line for line in LOCK.read_text().splitlines() if line.startswith(f"{name}=="))
    return line


def _own_version() -> str:
    (version,) = re.findall(r'(?m)^version = "(.+)"$', (ROOT / "pyproject.toml").read_text())
    return version


def _has(python: Path, pinned: list[str]) -> bool:
    asked = [str(python), "-c", ASK, *pinned]
    return subprocess.run(asked, stderr=subprocess.DEVNULL, check=False).returncode == 0


def _install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--constraint", str(LOCK)]
    done = subprocess.run([*command, *what], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotInstalled(f"pip install {' '.join(what)} failed: {done.stderr.strip()[-500:]}")
