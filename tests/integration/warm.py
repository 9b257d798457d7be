"""multiprocessing's fork server with torch imported, one for each worker of pytest: what hundreds of processes of tests
need is imported once. `run` is `subprocess.run` of a script in a fork of it, `Ranks` are several, without a launcher.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import warnings
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self
from unittest import mock

# By names that are found without pytest's path: what the server cannot import it leaves out, and says nothing.
IMPORTED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "everstep.train.session",
]


@functools.cache
def context() -> ForkServerContext:
    """Of processes that are forks of the server, which runs."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(IMPORTED)
    # Read at the import of torch: a process with threads must not fork.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        forkserver.ensure_running()
    return made


def run(script: Path, *args: object, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """The script as under `python -W error::FutureWarning`; what it and its children said."""
    words = [str(script), *map(str, args)]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = context().Process(target=become, args=(words, dict(os.environ), os.getcwd(), str(out), str(err)))
        process.start()
        process.join(timeout_s)
        late = process.exitcode is None
        process.kill()
        process.join()
        code = process.exitcode
        process.close()
        assert not late, f"not over after {timeout_s} s; {out.read_text()}{err.read_text()}"
        return subprocess.CompletedProcess(words, code or 0, out.read_text(), err.read_text())


class Ranks:
    """The script in `size` processes as torchrun starts them, in `folder`: what nobody disturbs. They end with the
    context.
    """

    def __init__(self, folder: Path, script: Path, *args: str, size: int = 2) -> None:
        port = str(_free_port())
        env = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": "0"}
        self._output = folder / "output.txt"
        outputs = [str(self._output)] * 2
        envs = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
        words = [str(script), *args]
        self._processes = [context().Process(target=become, args=(words, e, str(folder), *outputs)) for e in envs]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()

    def wait(self, timeout_s: float = 60.0) -> str:
        """What they wrote; they must end well."""
        for process in self._processes:
            process.join(timeout_s)
        text, codes = self._output.read_text(), [process.exitcode for process in self._processes]
        assert codes == [0] * len(codes), f"exit codes {codes}; {text}"
        return text


def _free_port() -> int:
    """Not one that the kernel may give to a connection of another test before it is used."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def become(words: list[str], env: dict[str, str], folder: str, *outputs: str) -> None:
    """In the fork: `outputs` become standard output and error."""
    os.chdir(folder)
    for descriptor, path in enumerate(outputs, 1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # several processes write to it
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(env)
    warnings.simplefilter("error", FutureWarning)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
