"""Any saved layout loads into any other: replicas, FSDP, tensor parallel, stages, and two of them at once."""

from __future__ import annotations

import functools

import layouts
from images import BytesSource, take

from everstep.state.fingerprint import fingerprints
from everstep.state.restore import load


@functools.cache
def saved(name: str) -> list[BytesSource]:
    layout = layouts.LAYOUTS[name]
    sources = []
    for role in range(layout.roles):
        with layouts.world(role, layout.roles):
            objects = layouts.build(layout, role)
            layouts.fill(objects)
            sources.append(take(objects, role, layout.roles))
    return sources


def test_every_layout_loads_every_other() -> None:
    """Into what holds other values, with and without a state of the optimizer."""
    images = {name: saved(name) for name in layouts.LAYOUTS}
    for target, layout in layouts.LAYOUTS.items():
        for role in range(layout.roles):
            with layouts.world(role, layout.roles):
                objects = layouts.build(layout, role)
                for number, (name, sources) in enumerate(images.items()):
                    layouts.scramble(objects, fresh=bool(number % 2))
                    load(objects, sources)
                    assert layouts.check(objects) >= 10, (name, target, role)


def test_replicas_of_a_shard_have_equal_fingerprints() -> None:
    layout, sources = layouts.LAYOUTS["hsdp 2x2"], saved("fsdp 3")
    found = []
    for role in range(layout.roles):
        with layouts.world(role, layout.roles):
            objects = layouts.build(layout, role)
            load(objects, sources)
            found.append(fingerprints(objects))
    assert found[0] == found[2] != found[1] == found[3]
    assert set(found[0]) == {"model", "optimizer"}


def test_a_role_reads_only_what_it_needs() -> None:
    sources = saved("fsdp 4")
    layout = layouts.LAYOUTS["fsdp 4"]
    for source in sources:
        source.reads.clear()
    with layouts.world(1, 4):
        load(layouts.build(layout, 1), [sources[1], *sources])
    assert [len(source.reads) for source in sources] == [0, 1, 0, 0]
