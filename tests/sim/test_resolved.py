"""What the whole control plane cannot play of a scenario. That it decides as the engine does: test_parity.py."""

from __future__ import annotations

import pytest

from everstep.core.errors import UsageError
from everstep.sim.scenario import build
from everstep.testing.resolved import play


def test_what_cannot_be_played_is_said() -> None:
    with pytest.raises(UsageError) as error:
        play(build({"duration_s": 10.0, "cluster": {"nodes": 300}}, "test"))
    assert str(error.value).startswith("cluster.nodes = 300: at full resolution at most 256")
