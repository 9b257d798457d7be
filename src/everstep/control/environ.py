"""The environment of a worker: torchrun's contract, name for name, plus who it is in this job.

A pure function of the launcher's environment and the plan. Everything an earlier epoch (or a launcher around us)
could have set is removed first, so no worker reads the ranks, the store or the error file of another life.
"""

from __future__ import annotations

from collections.abc import Mapping

from everstep.core.errors import UsageError
from everstep.core.types import EpochPlan

# Set anew for each worker, never inherited.
PER_WORKER = frozenset(
    (
        "LOCAL_RANK",
        "RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_TIMER_FILE",
        "EVERSTEP_JOB_ID",
        "EVERSTEP_NODE",
        "EVERSTEP_EPOCH",
    )
)


def worker_env(
    base: Mapping[str, str],
    plan: EpochPlan,
    node: str,
    local_rank: int,
    *,
    job: str,
    role: str = "default",
    error_file: str = "",
    max_restarts: int = 0,
    omp_threads: int = 1,
    virtual_local_rank: bool = False,
) -> dict[str, str]:
    """The whole environment of one worker of `node` in this epoch.

    `base`: what the user started the launcher with. `error_file` is where `@record` writes the traceback (empty:
    nowhere). `omp_threads` is used, as torchrun does, only with several workers and OMP_NUM_THREADS unset.
    `virtual_local_rank`: each worker sees one device, as device 0. Raises UsageError when it has none to see.
    """
    member = plan.member(node)
    assert member is not None, f"node {node} is not in epoch {plan.epoch}"
    rank = str(plan.rank(node, local_rank))
    world = str(plan.world_size)
    env = {name: value for name, value in base.items() if name not in PER_WORKER}
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if member.slots > 1:
        env.setdefault("OMP_NUM_THREADS", str(omp_threads))
    if virtual_local_rank:
        env["CUDA_VISIBLE_DEVICES"] = _one_device(base.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return env | {
        "LOCAL_RANK": "0" if virtual_local_rank else str(local_rank),
        "RANK": rank,
        "GROUP_RANK": str(member.group_rank),
        "ROLE_RANK": rank,  # one role a job: its ranks are the job's
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(member.slots),
        "WORLD_SIZE": world,
        "GROUP_WORLD_SIZE": str(len(plan.members)),
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(plan.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "EVERSTEP_JOB_ID": job,
        "EVERSTEP_NODE": node,
        "EVERSTEP_EPOCH": str(plan.epoch),
    }


def _one_device(visible: str | None, local_rank: int) -> str:
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise UsageError(f"CUDA_VISIBLE_DEVICES={visible} names {len(devices)} devices: none for worker {local_rank}")
    return devices[local_rank]
