"""How much longer a step takes when some stages of a pipeline are slow: the longest path through the step's graph.

Who is off that path may be slow without anybody waiting for it, and who is on it is so for a part of the step only.
"""

from __future__ import annotations

from functools import lru_cache

from everstep.detect.critical import Op, Task, timeline
from everstep.sim.schedule import MAKERS
from everstep.sim.workload import Pipeline

MOST_TASKS = 50_000  # a graph of so many takes half a second; of larger ones the closed form tells as much


@lru_cache(maxsize=1024)
def growth(pipeline: Pipeline, replicas: int, slow: range, factor: float) -> float:
    """How many times as long a step of all replicas takes when these stages of one take `factor` times as long."""
    if len(slow) == pipeline.stages:
        ratio = factor
    elif 2 * pipeline.stages * pipeline.micro_batches > MOST_TASKS:
        ahead = pipeline.stages - 1  # whose passes come before and after those of the slow one
        ratio = (pipeline.micro_batches * factor + ahead) / (pipeline.micro_batches + ahead)
    else:
        ratio = _path_s(pipeline, slow, factor) / _path_s(pipeline, slow, 1.0)
    after_s = pipeline.after_s(replicas)  # nobody reduces or updates more slowly
    if not after_s:
        return ratio
    passes_s = pipeline.played(pipeline.micro_batches).makespan_s
    return (passes_s * ratio + after_s) / (passes_s + after_s)


def _path_s(pipeline: Pipeline, slow: range, factor: float) -> float:
    usual_s = {Op.FORWARD: pipeline.forward_s, Op.RECOMPUTE: pipeline.forward_s, Op.BACKWARD: pipeline.backward_s}
    orders = MAKERS[pipeline.schedule](pipeline.stages, pipeline.micro_batches).orders
    tasks = [[Task(op.kind, op.stage, op.micro_batch) for op in order] for order in orders]

    def seconds(task: Task, worker: int) -> float:
        return usual_s[task.op] * (factor if worker in slow else 1.0)

    return timeline(tasks, seconds, pipeline.send_s).step_s
