"""The command line of `everstep run`: torchrun's flags, the script's arguments, layers, errors, the table in docs."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.cli import options
from everstep.cli.main import main
from everstep.cli.options import FLAGS, Request, split
from everstep.core.config import RunConfig, Std
from everstep.core.errors import ExitCode, UsageError
from everstep.core.layers import known_keys

TABLE = Path(__file__).parents[2] / "docs" / "torchrun.md"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").touch()
    return tmp_path


def asked(line: str, **environ: str) -> Request:
    return options.request(split(line.split()), environ)


def config(line: str, **environ: str) -> RunConfig:
    return asked(line, **environ).config


def refused(line: str, **environ: str) -> str:
    with pytest.raises(UsageError) as caught:
        asked(line, **environ)
    return str(caught.value)


def torch_actions() -> Iterator[argparse.Action]:
    from torch.distributed.run import get_args_parser

    for action in get_args_parser()._actions:
        if action.option_strings and "--help" not in action.option_strings:
            yield action


SAMPLES = {
    "nnodes": "1:4", "nproc_per_node": "2", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:29400",
    "rdzv_id": "42", "rdzv_conf": "join_timeout=60,last_call_timeout=3,read_timeout=9", "max_restarts": "3",
    "monitor_interval": "0.5", "start_method": "fork", "event_log_handler": "null", "role": "trainer",
    "log_dir": "logs", "redirects": "3", "tee": "0:1,1:2", "local_ranks_filter": "0,1",
    "duplicate_stdout_filters": "a,b", "duplicate_stderr_filters": "a,b", "node_rank": "0", "master_addr": "n0",
    "master_port": "29501", "local_addr": "10.0.0.1", "logs_specs": "default", "numa_binding": "node",
    "signals_to_handle": "SIGTERM,SIGUSR1", "shutdown_timeout": "15",
}  # fmt: skip


def test_every_flag_of_torchrun_is_accepted() -> None:
    actions = list(torch_actions())
    assert len(actions) >= 26
    for action in actions:
        sample = SAMPLES.get(action.dest, "")
        for spelled in action.option_strings:
            for tokens in ([spelled, sample], [f"{spelled}={sample}"]) if sample else ([spelled],):
                line = split(["--dry-run", *tokens, "train.py", spelled])
                assert line.script == ("train.py", spelled)
                options.request(line, {})
        variable = f"PET_{action.dest.upper()}"
        flag = next(flag for flag in FLAGS if set(flag.names) & set(action.option_strings))
        assert bool(flag.metavar) == bool(sample) == (action.nargs != 0)
        assert (variable in flag.env) == (type(action).__name__ in ("env", "check_env"))
        options.request(split(["--dry-run", "train.py"]), {variable: sample or "1"})


def test_every_flag_is_in_the_table_of_the_docs() -> None:
    cells = re.findall(r"^\| (`-.*?) \|", TABLE.read_text(), re.MULTILINE)
    table = {name for cell in cells for name in re.findall(r"`(-\S+?)[ `]", cell)}
    theirs = {name.replace("_", "-") for action in torch_actions() for name in action.option_strings}
    assert theirs <= table
    assert table == {name for flag in FLAGS for name in flag.names}


def test_every_exit_code_is_in_the_docs() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", TABLE.read_text(), re.MULTILINE)}
    assert table == set(ExitCode) - {ExitCode.NO_JOURNAL}  # a controller's, which its launcher answers


def test_streams_mean_what_torchrun_means() -> None:
    from torch.distributed.elastic.multiprocessing.api import Std as TorchStd
    from torch.distributed.elastic.multiprocessing.api import to_map

    for text in ("0", "1", "2", "3", "0:1", "0:3,1:0,2:1,3:2"):
        theirs = to_map(TorchStd.from_str(text), 4)
        logs = config(f"-r {text} train.py").logs
        assert [int(logs.console(rank)) for rank in range(4)] == [3 & ~int(theirs[rank]) for rank in range(4)]


def test_the_scripts_arguments_are_its_own() -> None:
    worker = config("--nnodes 1 train.py --nnodes 7 -m --set a.b=c -- --help").worker
    assert (worker.kind, worker.target) == ("script", "train.py")
    assert worker.args == ("--nnodes", "7", "-m", "--set", "a.b=c", "--", "--help")
    assert split(["--nproc-per-node=2", "--", "--odd.py", "x"]).script == ("--odd.py", "x")


@pytest.mark.parametrize(
    ("line", "kind", "target"),
    [
        ("train.py", "script", "train.py"),
        ("-m pkg.train -m", "module", "pkg.train"),
        ("--module pkg.train", "module", "pkg.train"),
        ("--no-python bash -c", "program", "bash"),
        ("--run-path train.py", "script", "train.py"),
        ("--run-path --no-python train.py", "script", "train.py"),
    ],
)
def test_kinds_of_scripts(line: str, kind: str, target: str) -> None:
    worker = config(line).worker
    assert (worker.kind, worker.target) == (kind, target)


def test_torchruns_usual_lines() -> None:
    made = config(
        "--nnodes=1:4 --nproc_per_node=8 --max_restarts=3 --rdzv_id=J --rdzv_backend=c10d --rdzv_endpoint=n0 train.py"
    )
    assert (made.nodes.min, made.nodes.max, made.nodes.nproc_per_node) == (1, 4, 8)
    assert (made.restart.max_restarts, made.job, made.rendezvous.endpoint) == (3, "J", "n0")
    made = config("--nnodes 2 --node_rank 1 --master_addr n0 --master_port 1234 --nproc-per-node gpu train.py")
    assert (made.nodes.min, made.nodes.max, made.nodes.node_rank, made.nodes.nproc_per_node) == (2, 2, 1, "gpu")
    assert (made.rendezvous.master_addr, made.rendezvous.master_port) == ("n0", 1234)
    made = config("--standalone -r3 -t=0:1 --local-ranks-filter 0,2 train.py")
    assert made.rendezvous.standalone
    assert (made.logs.redirects, made.logs.tee, made.logs.local_ranks_filter) == ("3", "0:1", (0, 2))
    assert made.logs.console(0) == Std.OUT
    conf = config("--rdzv-conf join_timeout=60,last_call_timeout=3,is_host=1 train.py")
    assert (conf.control.join_timeout_s, conf.control.last_call_s) == (60, 3)
    assert conf.rendezvous.conf["is_host"] == "1"


def test_our_own_flags() -> None:
    made = config(
        "--grace 5 --hang-timeout 2 --first-step-timeout 20 --save-timeout 30 --eval-timeout 40 --standbys 1 "
        "--local-nodes 2 --controller n0:7 --token-file t --run-dir r --preload a,b --preload c --no-zygote "
        "--expect-steps 9 --job j --no-dashboard --set restart.crash_loop=4 --set env.X=1 train.py"
    )
    hang = made.hang
    assert (made.restart.grace_s, made.restart.crash_loop, made.expect_steps, made.job) == (5, 4, 9, "j")
    assert (hang.timeout_s, hang.first_step_s, hang.save_s, hang.eval_s) == (2, 20, 30, 40)
    assert (made.nodes.standbys, made.nodes.local_nodes, made.nodes.min) == (1, 2, 2)
    assert (made.control.controller, made.control.token_file, made.logs.run_dir) == ("n0:7", "t", "r")
    assert (made.dashboard.enabled, config("train.py").dashboard.enabled) == (False, True)
    assert (made.worker.preload, made.worker.zygote, made.env) == (("a", "b", "c"), False, {"X": "1"})


def test_layers_from_the_weakest_to_the_strongest(folder: Path) -> None:
    assert config("train.py").restart.max_restarts == 100
    (folder / "everstep.toml").write_text("[restart]\nmax_restarts = 1\n[worker]\ntarget = 'train.py'\nargs = ['-x']\n")
    outcome = asked("")
    assert outcome.config.restart.max_restarts == 1
    assert outcome.config.worker.args == ("-x",)
    assert "settings from ./everstep.toml" in outcome.said
    assert config("train.py").worker.args == ()  # a script on the command line comes with its own
    assert config("train.py", PET_MAX_RESTARTS="2").restart.max_restarts == 2
    assert config("--max-restarts 3 train.py", PET_MAX_RESTARTS="2").restart.max_restarts == 3
    assert config("--set restart.max_restarts=4 --max-restarts 3 train.py").restart.max_restarts == 4
    (folder / "other.toml").write_text("expect_steps = 8\n")
    made = config("--config other.toml train.py")
    assert (made.expect_steps, made.restart.max_restarts) == (8, 100)


def test_variables_of_torchrun() -> None:
    environ = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_STANDALONE": "0", "PET_RDZV_ENDPOINT": "n0:1"}
    made = config("train.py", **environ, PET_RUN_PATH="1", PET_TEE="", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="11")
    assert (made.nodes.min, made.nodes.max, made.nodes.nproc_per_node) == (2, 2, 4)
    assert (made.rendezvous.standalone, made.rendezvous.endpoint) == (False, "n0:1")
    assert (made.worker.run_path, made.logs.tee, made.restart.grace_s) == (True, "0", 11)
    assert config("train.py", PET_SHUTDOWN_TIMEOUT="12", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="11").restart.grace_s == 12
    assert config("pkg.train", PET_MODULE="1").worker.kind == "module"
    other = shutil.which("sh") or ""
    python = config("train.py", PYTHON_EXEC=other).worker
    assert (python.python, python.zygote) == (other, False)
    assert config("train.py", PYTHON_EXEC=sys.executable).worker.zygote


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--nprocs-per-node 2 train.py", "unknown flag '--nprocs-per-node'; did you mean '--nproc-per-node'?"),
        ("--hang-timeut 2 train.py", "did you mean '--hang-timeout'?"),
        ("-x train.py", "unknown flag '-x'"),
        ("--nnodes", "--nnodes needs a value: --nnodes MIN:MAX"),
        ("--nnodes --standalone train.py", "--nnodes needs a value"),
        ("--standalone=1 train.py", "--standalone takes no value, got '1'"),
        ("--nnodes two train.py", "--nnodes 'two': expected a number of nodes, or MIN:MAX"),
        ("--nnodes 3:2 train.py", "nodes.min = 3 (--nnodes) must not be above nodes.max = 2 (--nnodes)"),
        ("--nnodes 0 train.py", "--nnodes: nodes.min = 0: expected a whole number at least 1"),
        ("--nproc_per_node all train.py", "--nproc_per_node: nodes.nproc_per_node = 'all': expected a whole number"),
        ("--max-restarts -1 train.py", "restart.max_restarts = '-1': expected a whole number at least 0"),
        ("--grace soon train.py", "--grace: restart.grace_s = 'soon': expected a number"),
        ("-r 4 train.py", "logs.redirects (-r) = '4': expected 0 (none)"),
        ("--local-ranks-filter a train.py", "expected local ranks with commas"),
        ("--rdzv-conf a train.py", "expected NAME=VALUE"),
        ("--rdzv-conf join_timeout=x train.py", "--rdzv-conf: control.join_timeout_s = 'x': expected a number"),
        ("--rdzv-endpoint n0:x --nnodes 2 train.py", "rendezvous.endpoint (--rdzv-endpoint) = 'n0:x': expected HOST"),
        ("--start-method thread train.py", "expected one of spawn, fork, forkserver"),
        ("--monitor-interval x train.py", "--monitor-interval 'x': expected a number"),
        ("--no-python -m train.py", "--no-python and -m exclude each other"),
        ("--standalone --nnodes 2 train.py", "--standalone is one machine"),
        ("--node-rank 2 --nnodes 2 train.py", "nodes.node_rank = 2 (--node-rank) must be below nodes.max = 2"),
        ("--hang-timeout 60 --save-timeout 30 train.py", "time-outs in the wrong order"),
        ("--config no.toml train.py", "no.toml: cannot be read"),
        ("--set nodes.mni=2 train.py", "did you mean 'nodes.min'?"),
        ("", "no script given"),
        ("nope.py", "nope.py: no such file"),
        ("pkg", "pkg is a directory without a __main__.py"),
        ("-m pkg.nope", "-m pkg.nope: no module named nope in package pkg"),
        ("--no-python nope", "nope: no such program in any folder on PATH"),
    ],
)
def test_errors_say_what_where_and_how(line: str, said: str) -> None:
    assert said in refused(line)


def test_a_host_without_workers_needs_no_script() -> None:
    assert config("--nnodes 2 --local-nodes 0 elsewhere.py").worker.target == "elsewhere.py"


def test_a_wrong_variable_is_named() -> None:
    assert "PET_NNODES 'x': expected a number of nodes" in refused("train.py", PET_NNODES="x")
    assert "PET_STANDALONE = 'yes': expected 0 or 1" in refused("train.py", PET_STANDALONE="yes")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--monitor-interval 1 train.py", "--monitor-interval: ignored"),
        ("--numa-binding node train.py", "--numa-binding: ignored"),
        ("--logs_specs x train.py", "--logs_specs: ignored"),
        ("--start-method fork train.py", "--start-method: no effect"),
        ("--rdzv-backend etcd-v2 train.py", "--rdzv-backend etcd-v2: no such service is contacted"),
        ("--rdzv-conf read_timeout=3 train.py", "--rdzv-conf: no effect here: read_timeout"),
        ("--nnode 1 train.py", "--nnode is taken as --nnodes"),
        ("--master-port 1 --rdzv-backend c10d train.py", "--master-addr and --master-port: no effect"),
        ("--rdzv-backend c10d --node-rank 3 train.py", "--node-rank: no effect"),
        ("--nnodes 2 train.py", "the controller's address 127.0.0.1 is this machine's own"),
    ],
)
def test_what_has_no_meaning_here_is_said(line: str, said: str) -> None:
    assert any(said in text for text in asked(line).said)


def test_a_plain_line_is_silent() -> None:
    assert asked("--standalone --nproc-per-node 2 train.py").said == ()


def test_every_key_that_flags_name_exists() -> None:
    samples = SAMPLES | {"controller": "n0:1", "preload": "a"}
    for flag in FLAGS:
        text = samples.get(flag.name[2:].replace("-", "_"), "1")
        for key in flag.assign(text if flag.metavar else ""):
            assert key in known_keys() or key.startswith("rendezvous.conf."), key


def test_dry_run_prints_what_config_reads_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dry-run", "--nproc-per-node", "2", "--set", "env.A=x y", "nope.py", "--nnodes", "3"]) == 0
    text = capsys.readouterr().out
    assert "nproc_per_node = 2  # --nproc-per-node" in text
    (folder / "again.toml").write_text(text)
    assert main(["run", "--dry-run", "--config", "again.toml"]) == 0
    again = capsys.readouterr().out
    assert [line.partition("  #")[0] for line in again.splitlines()] == [
        line.partition("  #")[0] for line in text.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--nprok", "2"], "unknown flag '--nprok'"),
        (["run", "nope.py"], "nope.py: no such file"),
        (["run", "--log-dir", "train.py", "train.py"], "train.py (--log-dir): it is no folder"),
        (["run", "--log-dir", "train.py/logs", "train.py"], "train.py/logs (--log-dir): Not a directory"),
        (["run", "--nproc-per-node", "100000", "train.py"], "100000 workers a node (--nproc-per-node) are too many"),
        (["runn"], "unknown command 'runn'; did you mean 'run'?"),
        (["--what"], "--what"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("everstep: error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for flag in FLAGS for name in flag.names)
    assert max(map(len, text.splitlines())) <= 120
    assert main(["--help"]) == 0
    assert "run" in capsys.readouterr().out


def test_a_command_line_is_read_without_heavy_imports() -> None:
    code = (
        "import sys; from everstep.cli.main import main; main(['run', '--dry-run', 'x.py'])\n"
        "print([n for n in ('torch', 'rich', 'cyclopts', 'asyncio', 'numpy') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=os.environ, timeout=30
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"
