"""All that a `Viewer` knows, as plain data: what its dump consists of."""

from __future__ import annotations

import msgspec

from everstep.observe.cases import Cases
from everstep.observe.goodput import Goodput
from everstep.observe.places import Places
from everstep.observe.series import Curve
from everstep.observe.view import Series, View

VERSION = 1  # of a dump; another one cannot be loaded


class Steps(msgspec.Struct):
    """Of the running epoch. `began`: steps of a kept state that its workers count on from."""

    epoch: int = 0
    made: int = 0
    first_total: int = -1
    began: int = 0
    fresh: bool = True  # none was made in it
    saves: int = 0
    saved_step: int = -1
    stalled_s: float = 0.0
    twice_s: float = 0.0
    brief: tuple[float, int] = (0.0, 0)  # seconds and steps since the last of `paces`
    paces: list[tuple[float, int]] = []  # of the last intervals: seconds, steps


class Known(msgspec.Struct):
    version: int = VERSION
    view: View = msgspec.field(default_factory=View)
    places: Places = msgspec.field(default_factory=Places)
    cases: Cases = msgspec.field(default_factory=Cases)
    goodput: Goodput = msgspec.field(default_factory=Goodput)
    steps: Steps = msgspec.field(default_factory=Steps)
    curves: dict[str, Curve] = {}  # by the names of View.series
    seats: tuple[str, ...] = ()  # workers (of a formation) or nodes of the newest epoch, in order
    seated: bool = False  # these are workers
    saves_told: bool = False  # sessions tell of each save; else steps do
    began_s: float = -1.0  # on the controller's clock
    offset_s: float = 0.0  # added to that clock, to keep one time line over its lives
    last_t_s: float = 0.0
    last_wall_s: float = 0.0
    waits: bool = False  # the job re-seats, and waits for somebody
    owner: str = ""  # incident for which the job stands still
    told_costs: dict[str, float] = {}  # cause -> accelerator-seconds of incidents that are not listed any more

    def at(self, t_s: float) -> float:
        """Controller's clock to seconds since the submission."""
        return t_s + self.offset_s - self.began_s

    def curve(self, name: str, at_s: float, value: float) -> None:
        curve = self.curves.get(name)
        if curve is None:
            curve = self.curves[name] = Curve()
            self.view.series[name] = Series()
        curve.add(self.view.series[name], at_s, float(value))

    def counted(self) -> bool:
        """After a change of who is where. True: another number is missing."""
        goodput = self.goodput
        missing, warming = goodput.missing, goodput.warming
        goodput.fleet(*self.places.count(self.view))
        if goodput.warming and not warming:
            goodput.blamed = self.cases.recent(goodput.now_s)
        if goodput.missing > missing and not goodput.short:
            self.lacks()
        return goodput.missing != missing

    def lacks(self) -> None:
        """What is missing from now on is charged to the open incident."""
        case = self.cases.stopping()
        self.goodput.short = case.id if case is not None else ""
