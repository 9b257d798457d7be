"""The mesh of a session: replicas of a sharded model, over torch's default group. Nothing is sent to make one."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

AXES = ("replicate", "shard")


def make_mesh(replicas: int, shards: int) -> DeviceMesh:
    """Rank r holds shard r % shards of replica r // shards. All members call it, in one order with other new groups.

    Each axis costs one communicator, not one for each row: rows have no member in common, so they share its number.
    """
    replica, shard = divmod(dist.get_rank(), shards)
    ranks = torch.arange(replicas * shards).view(replicas, shards)
    rows = (ranks[:, shard], ranks[replica])
    groups = [dist.new_group(row.tolist(), group_desc=axis) for axis, row in zip(AXES, rows, strict=True)]
    return DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=AXES)
