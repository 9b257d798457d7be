"""torchrun's environment, name for name, and nothing of an earlier epoch in it."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from everstep.control.environ import PER_WORKER, worker_env
from everstep.core.errors import UsageError
from everstep.core.types import EpochPlan, Member

PLAN = EpochPlan(
    epoch=7,
    members=(Member("a", "i1", "10.0.0.1", 0, 0, 2), Member("b", "i2", "10.0.0.2", 1, 2, 3)),
    world_size=5,
    master_addr="10.0.0.1",
    master_port=29501,
    restart_count=3,
)


def test_the_whole_contract() -> None:
    env = worker_env({"PATH": "/bin"}, PLAN, "b", 2, job="j", role="trainer", error_file="/run/e.json", max_restarts=9)
    assert env == {
        "PATH": "/bin",
        "LOCAL_RANK": "2",
        "RANK": "4",
        "GROUP_RANK": "1",
        "ROLE_RANK": "4",
        "ROLE_NAME": "trainer",
        "LOCAL_WORLD_SIZE": "3",
        "WORLD_SIZE": "5",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_WORLD_SIZE": "5",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29501",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "9",
        "TORCHELASTIC_RUN_ID": "j",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/e.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
        "EVERSTEP_JOB_ID": "j",
        "EVERSTEP_NODE": "b",
        "EVERSTEP_EPOCH": "7",
    }


def test_nothing_of_an_earlier_life_leaks() -> None:
    stale = dict.fromkeys(PER_WORKER, "stale")
    env = worker_env(stale, PLAN, "a", 0, job="j")
    assert "stale" not in env.values()
    assert stale == dict.fromkeys(PER_WORKER, "stale")  # the base is not touched
    assert "TORCHELASTIC_TIMER_FILE" not in env


def test_what_the_user_set_wins() -> None:
    base = {"OMP_NUM_THREADS": "8", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_VISIBLE_DEVICES": "4,5"}
    env = worker_env(base, PLAN, "a", 1, job="j")
    assert {name: env[name] for name in base} == base


def test_one_worker_keeps_all_threads() -> None:
    alone = EpochPlan(1, (Member("a", "i", "h", 0, 0, 1),), 1, "h", 1, 0)
    assert "OMP_NUM_THREADS" not in worker_env({}, alone, "a", 0, job="j")


def test_one_visible_device_each() -> None:
    def device(base: dict[str, str], local_rank: int) -> tuple[str, str]:
        env = worker_env(base, PLAN, "a", local_rank, job="j", virtual_local_rank=True)
        return env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]

    assert device({}, 1) == ("0", "1")
    assert device({"CUDA_VISIBLE_DEVICES": "6, 7"}, 1) == ("0", "7")
    with pytest.raises(UsageError, match="none for worker 1"):
        device({"CUDA_VISIBLE_DEVICES": "6"}, 1)


def test_torchrun_sets_nothing_we_do_not() -> None:
    """Read from the installed launcher's source, so that a new name in a later torch fails here."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "worker_env":
            assert isinstance(node.value, ast.Dict)
            names |= {ast.literal_eval(key) for key in node.value.keys if key is not None}
    assert len(names) > 10
    assert names <= worker_env({}, PLAN, "a", 0, job="j").keys()
