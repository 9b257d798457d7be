"""Other systems as data, for the simulator: which actions they have, what these take, how they save.

Constants are those that SYSTEMS states, with the section; where a system published none, the number of another one
stands in, and `source` says so. `decide(situation, preset.costs, preset.actions)` is then that system's policy.
"""

from __future__ import annotations

import msgspec

from everstep.core.decisions import Action
from everstep.core.errors import UsageError
from everstep.plan.costs import PRIORS, Costs, Curve, flat, key, table

A = Action
CERTAIN = 1e9  # weight of a preset's times: what happens in a simulation changes nothing of them


class Saving(msgspec.Struct, frozen=True):
    """How a system keeps state. `every_steps` before `every_s`; both 0: nothing is saved but what live copies hold."""

    every_s: float = 0.0
    every_steps: int = 0
    cost_s: float = 0.0  # the job stands still for it
    load_s: float = 0.0


class Preset(msgspec.Struct, frozen=True):
    name: str
    actions: frozenset[Action]
    curves: dict[str, Curve]  # downtime, instead of `plan.costs.PRIORS`
    saving: Saving
    source: str
    standbys: int = 0
    slowdown: float = 1.0  # of the whole job, always: what its redundancy costs without a fault
    after_fault: float = 1.0  # of a pipeline that does the work of a dead member too
    shipped: bool = False  # it is this runtime: `plan.barred`
    in_steps: bool = True  # the processes of survivors live on, and hold the state: `Situation.in_steps`

    @property
    def costs(self) -> Costs:
        return Costs(priors={**PRIORS, **self.curves}, weight=CERTAIN)


MEGATRON = PRIORS[key(A.RESTART)]
IN_PROCESS = PRIORS[key(A.ROLL_BACK)]
HOURLY = Saving(every_s=3600.0, cost_s=0.0, load_s=93.6)  # section 15.3: dt 60 min; section 1: load 1.56 min at 8,192
MINUTES = Saving(every_s=300.0, cost_s=0.0, load_s=0.0)  # section 15.3: dt 5 min, as local copies allow

# Section 12, artifact constants: samples a step; reconfiguration of Oobleck; restart and save of Varuna; local
# rendezvous of Bamboo. Seconds.
ARTIFACT = {
    "BERT-large": (8192, 2.0, 76.0, 15.8, 76.0),
    "GPT-2": (1024, 2.0, 83.0, 11.5, 80.0),
    "GPT-3-medium": (819, 3.0, 78.7, 11.2, 100.0),
    "GPT-3-2_7b": (512, 6.0, 515.0, 50.0, 230.0),
    "GPT-3-6_7b": (1024, 10.0, 701.0, 120.0, 450.0),
}
BAMBOO_GLOBAL_S = 30.0
VARUNA_STEPS = 10

PRESETS = {
    preset.name: preset
    for preset in (
        Preset(
            "everstep",
            frozenset(Action) - {A.REROUTE, A.TAKE_OVER, A.REPARTITION},  # of pipelines, which it does not run yet
            {},
            Saving(),
            "the priors of plan.costs; state comes from live copies, so that only the interrupted step is made again",
            standbys=1,
            shipped=True,
        ),
        Preset(
            "restart",
            frozenset({A.RESTART, A.RESCHEDULE}),
            table({A.RESTART: MEGATRON}),
            HOURLY,
            "torchrun: section 1, Megatron restart",
            in_steps=False,
        ),
        Preset(
            "nvrx",
            frozenset({A.ROLL_BACK, A.RESTART}),
            table({A.ROLL_BACK: IN_PROCESS, A.RESTART: MEGATRON}),
            MINUTES,
            "section 4 for what it does; times of in-process recovery from section 10, as it published none",
        ),
        Preset(
            "trainmover",
            frozenset({A.PROMOTE, A.EVICT, A.GROW, A.RESCHEDULE}),
            {},
            Saving(),
            "section 1, planned and unplanned downtime; without a standby 59.2 s",
            standbys=1,
        ),
        Preset(
            "oobleck",
            frozenset({A.REPARTITION, A.RESTART}),
            table({A.REPARTITION: flat(57.0, "section 1: 57 s at 32 GPUs"), A.GROW: flat(100.0, "section 1")}),
            HOURLY,
            "section 1 and 12; per model with `for_model`",
        ),
        Preset(
            "varuna",
            frozenset({A.RESTART}),
            table({A.RESTART: flat(76.0, "section 12: BERT-large")}),
            Saving(every_steps=VARUNA_STEPS, cost_s=15.8),
            "section 12; per model with `for_model`",
            in_steps=False,
        ),
        Preset(
            "bamboo",
            frozenset({A.TAKE_OVER, A.RESTART}),
            table({A.TAKE_OVER: flat(76.0, "section 12: BERT-large, local rendezvous"), A.RESTART: MEGATRON}),
            HOURLY,
            "section 12; overhead of redundancy 19.77 %; per model with `for_model`",
            slowdown=1.1977,
            after_fault=1.5,
        ),
        Preset(
            "parcae",
            frozenset({A.REPARTITION, A.EVICT, A.GROW, A.RESTART}),
            table(
                {
                    A.REPARTITION: Curve(((32, 21.0), (1024, 221.0)), "section 1: 21 s at 32 GPUs, 221 s projected"),
                    A.EVICT: Curve(((32, 21.0), (1024, 221.0)), "section 1"),
                    A.GROW: flat(200.0, "section 1: more than 200 s"),
                }
            ),
            HOURLY,
            "section 1 and 12",
        ),
        Preset(
            "recycle",
            frozenset({A.REROUTE, A.RESTART}),
            {},
            HOURLY,
            "section 12: the period after a fault is `plan.closed.rerouting_slowdown`; section 1: two-phase switching",
        ),
    )
}


def preset(name: str) -> Preset:
    """Raises UsageError for a name that there is not."""
    if name not in PRESETS:
        raise UsageError(f"there is no preset {name!r}; there are: {', '.join(PRESETS)}")
    return PRESETS[name]


def for_model(name: str, model: str) -> Preset:
    """The preset with Oobleck's artifact's constants for one of its models. Raises UsageError."""
    base = preset(name)
    if model not in ARTIFACT:
        raise UsageError(f"there are no constants for the model {model!r}; there are: {', '.join(ARTIFACT)}")
    _, oobleck_s, varuna_s, save_s, bamboo_s = ARTIFACT[model]
    source = f"section 12: {model}"
    replace = msgspec.structs.replace
    match name:
        case "oobleck":
            return replace(base, curves={**base.curves, key(A.REPARTITION): flat(oobleck_s, source)})
        case "varuna":
            saving = replace(base.saving, cost_s=save_s)
            return replace(base, curves={**base.curves, key(A.RESTART): flat(varuna_s, source)}, saving=saving)
        case "bamboo":
            return replace(base, curves={**base.curves, key(A.TAKE_OVER): flat(bamboo_s, source)})
    raise UsageError(f"the artifact has no constants for {name!r}, only for oobleck, varuna and bamboo")
