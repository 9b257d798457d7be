"""Incidents, as a fold: who, why, what was done, with a time line of each. The newest are kept, some of them whole."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from everstep.core import events as e
from everstep.core.types import Blame, Verdict
from everstep.observe.view import KEPT_EVENTS, KEPT_INCIDENTS, IncidentView, Moment, View

KEPT_WHOLE = 24  # newest ones with time line, alternatives and evidence; `History.incident` has those of others
KEPT_LONG = 8  # of these, the newest with a time line of up to KEPT_EVENTS lines; the others have
KEPT_HEAD, KEPT_TAIL = 24, 8  # the first and the last ones
KEPT_KINDS = 64  # different kinds and causes that are told apart
KEPT_NAMES = 16  # culprits and files of an incident
KEPT_SIGNS = 32
SIGN_S = 300.0  # what happened so long before an incident can have been its sign
RECENT_S = 60.0  # what a worker's place is filled again after
LONG, BRIEF = 360, 100  # characters of a text, and of one in an incident that is not kept whole
OTHER = "other"
PLANNED = ("drain", "grow", "stop")  # no fault
ASIDE = (*e.WATCHED, "save-failed")  # nobody stops for these


class Sign(msgspec.Struct, frozen=True):
    """Something that may belong to an incident which is not open yet. `node` empty: of whoever."""

    at_s: float
    node: str
    rank: int
    text: str
    ended: bool = False  # a worker did


class Cases(msgspec.Struct):
    """`open`: incidents without an end, oldest first."""

    known: dict[str, IncidentView] = {}  # those of the view, by id
    open: list[str] = []
    signs: list[Sign] = []
    whole: list[str] = []  # ids of those that are kept whole
    latest: str = ""  # that was opened or closed, and had to do with who acts
    latest_s: float = -math.inf
    died: dict[str, float] = {}  # open incident -> when its first worker ended

    # What the other folds ask ---------------------------------------------------------------------------

    def stopping(self) -> IncidentView | None:
        """The oldest open one for which the job stops."""
        for name in self.open:
            case = self.known[name]
            if case.kind not in ASIDE:
                return case
        return None

    def recent(self, now_s: float) -> str:
        """The one that is to blame for what follows now; empty: none."""
        case = self.stopping()
        if case is not None:
            return case.id
        return self.latest if now_s - self.latest_s <= RECENT_S else ""

    def cause(self, case: IncidentView) -> str:
        if case.cause is not None and case.cause.culprits:
            return case.cause.culprits[0].cause
        return case.culprits[0].cause if case.culprits else case.kind

    def ended_s(self, case: IncidentView, since_s: float) -> float:
        """When the first of its workers ended, if it was since then; -1: none did."""
        ended_s = self.died.get(case.id, -1.0)
        return ended_s if ended_s >= since_s else -1.0

    # Signs ----------------------------------------------------------------------------------------------

    def sign(self, sign: Sign) -> None:
        """It belongs to an open incident of that node or worker, or to one that is opened soon."""
        for name in reversed(self.open):
            case = self.known[name]
            mine = sign.ended and case.kind not in PLANNED  # who ends while the job stands still does so for that
            if case.kind not in ASIDE and (mine or _concerns(case.culprits + case.collateral, sign)):
                note(case, sign.at_s, "sign", sign.text)
                return
        self.signs.append(sign)
        if len(self.signs) > KEPT_SIGNS:
            del self.signs[0]

    def tell(self, at_s: float, phase: str, text: str) -> None:
        """Of what the job does: for all open incidents for which it stopped."""
        for name in self.open:
            case = self.known[name]
            if case.kind not in ASIDE:
                note(case, at_s, phase, text)

    # Events ---------------------------------------------------------------------------------------------

    def opened(self, view: View, event: e.IncidentOpened, at_s: float) -> list[IncidentView]:
        """Those that are not listed any more from now on."""
        if event.incident in self.known:  # a new controller tells what the one before did not write down
            return []
        culprits = _blames(event.culprits)
        case = IncidentView(
            event.incident, event.kind, view.newest_epoch, at_s, _cut(event.why), culprits, first_sign_s=at_s
        )  # fmt: skip
        self.known[case.id] = case
        self.open.append(case.id)
        self.whole.append(case.id)
        self._concerns_members(case, at_s)
        view.incidents.append(case)
        view.num_incidents += 1
        _more(view.by_kind, case.kind)
        _more(view.by_cause, self.cause(case))
        for blame in case.culprits:
            _blamed(view, blame)
        if case.kind not in ASIDE:
            self._signs(case, view, at_s)
        note(case, at_s, "detect", f"{case.kind}: {case.why}" if case.why else case.kind)
        return self._bound(view)

    def _concerns_members(self, case: IncidentView, at_s: float) -> None:
        if case.kind not in ("anomaly", "save-failed", "stop"):
            self.latest, self.latest_s = case.id, at_s

    def _signs(self, case: IncidentView, view: View, at_s: float) -> None:
        case.step = view.step
        mine = [s for s in self.signs if s.at_s >= at_s - SIGN_S and _concerns(case.culprits, s)]
        self.signs = [sign for sign in self.signs if sign not in mine]
        for sign in mine:
            note(case, sign.at_s, "sign", sign.text)
        ends = [sign.at_s for sign in mine if sign.ended]
        if case.kind not in PLANNED and view.last_step_s >= 0:
            case.first_sign_s = min(view.last_step_s, at_s)
        if ends:
            case.first_sign_s = self.died[case.id] = min(ends)

    def _bound(self, view: View) -> list[IncidentView]:
        if len(self.whole) > KEPT_LONG:
            _shorten(self.known[self.whole[-KEPT_LONG - 1]])
        if len(self.whole) > KEPT_WHOLE:
            _strip(self.known[self.whole.pop(0)])
        dropped = []
        while len(view.incidents) > KEPT_INCIDENTS:
            n = next((n for n, case in enumerate(view.incidents) if case.outcome), 0)
            case = view.incidents.pop(n)
            dropped.append(case)
            del self.known[case.id]
            for names in (self.open, self.whole):
                if case.id in names:
                    names.remove(case.id)
        return dropped

    def updated(self, view: View, event: e.IncidentUpdated, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is None:
            return
        before = self.cause(case)
        for blame in event.culprits:
            if not any((blame.node, blame.rank) == (old.node, old.rank) for old in case.culprits):
                _blamed(view, blame)
        case.culprits = _blames(event.culprits) or case.culprits
        case.collateral = _blames(event.collateral) or case.collateral
        if event.why and event.why != case.why:
            case.why = _cut(event.why)
            note(case, at_s, "detect", case.why)
        self._recount(view, case, before)

    def _recount(self, view: View, case: IncidentView, before: str) -> None:
        after = self.cause(case)
        if after != before:
            _less(view.by_cause, before)
            _more(view.by_cause, after)

    def found(self, view: View, event: e.CauseFound, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is None:
            return
        before = self.cause(case)
        case.cause = _verdict(event.verdict)
        case.evidence = tuple((name, _verdict(verdict)) for name, verdict in event.evidence[:KEPT_NAMES])
        note(case, at_s, "detect", f"cause found: {event.verdict.why}")
        self._recount(view, case, before)

    def judged(self, event: e.SlowJudged | e.AnomalyJudged, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is not None:
            case.cause = case.cause or (_verdict(event.verdict) if event.verdict.culprits else None)
            note(case, at_s, "detect", event.verdict.why)

    def decided(self, event: e.Decided, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is None:
            return
        made = event.decision
        case.answer, case.answer_why, case.answer_loss_s = made.action.value, _cut(made.why), made.loss_s
        case.alternatives = made.alternatives
        target = f" ({made.target})" if made.target else ""
        note(case, at_s, "decide", f"{made.action.value}{target}: {made.why}")

    def saved(self, event: e.EvidenceSaved, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is None:
            return
        new = tuple(file for file in event.files if file not in case.files)
        case.files = (*case.files, *new)[:KEPT_NAMES]
        if new:
            note(case, at_s, "act", f"evidence written: {', '.join(new[:4])}{' ...' if new[4:] else ''}")

    def survivors(self, event: e.SurvivorsTold, at_s: float) -> None:
        case = self.known.get(event.incident)
        if case is not None and not case.outcome:
            case.told_s = at_s
            note(case, at_s, "act", f"every survivor was told, {event.after_s:.3f} s after the first sign")

    def closed(self, view: View, event: e.IncidentClosed, at_s: float) -> IncidentView | None:
        case = self.known.get(event.incident)
        if case is None:
            return None
        if event.incident in self.open:
            self.open.remove(event.incident)
        self.died.pop(event.incident, None)
        self._concerns_members(case, at_s)
        if case.kind not in ASIDE:
            self.signs = []  # whatever was seen belonged to it
        view.downtime_s += max(0.0, event.downtime_s) - max(0.0, case.downtime_s)
        case.closed_s, case.outcome, case.downtime_s = at_s, event.outcome or "closed", event.downtime_s
        case.phases, case.redone_steps = event.phases, event.redone_steps
        down = f", {event.downtime_s:.2f} s without a step" if event.downtime_s >= 0 else ""
        redone = f", {event.redone_steps} steps are made again" if event.redone_steps else ""
        note(case, at_s, "close", f"{case.outcome}{down}{redone}")
        return case


def note(case: IncidentView, at_s: float, phase: str, text: str) -> None:
    """In the order of time: what is learned later may have happened before."""
    line = Moment(at_s, phase, _cut(text))
    lines = case.timeline
    if len(lines) >= KEPT_EVENTS:
        return
    n = len(lines)
    while n > 0 and lines[n - 1].at_s > at_s:
        n -= 1
    lines.insert(n, line)


def _blames(blames: tuple[Blame, ...], count: int = KEPT_NAMES, length: int = LONG) -> tuple[Blame, ...]:
    kept = blames[:count]
    if all(len(blame.detail) <= length for blame in kept):
        return kept
    return tuple(msgspec.structs.replace(blame, detail=_cut(blame.detail, length)) for blame in kept)


def _verdict(verdict: Verdict, count: int = KEPT_NAMES, length: int = LONG) -> Verdict:
    culprits = _blames(verdict.culprits, count, length)
    return msgspec.structs.replace(verdict, culprits=culprits, why=_cut(verdict.why, length))


def _shorten(case: IncidentView) -> None:
    if len(case.timeline) > KEPT_HEAD + KEPT_TAIL:
        case.timeline[KEPT_HEAD:-KEPT_TAIL] = []


def _strip(case: IncidentView) -> None:
    """What takes room of one that is long over."""
    case.timeline, case.alternatives, case.evidence = [], (), ()
    case.culprits, case.collateral = _blames(case.culprits, 2, BRIEF), _blames(case.collateral, 2, BRIEF)
    case.why, case.answer_why, case.files = _cut(case.why, BRIEF), _cut(case.answer_why, BRIEF), case.files[:2]
    case.cause = _verdict(case.cause, 1, BRIEF) if case.cause is not None else None


def _concerns(blames: tuple[Blame, ...], sign: Sign) -> bool:
    """A sign without a node is one of whatever comes; so is an incident without culprits of whatever came."""
    if not sign.node or not blames:
        return True
    return any(blame.node == sign.node and (blame.rank in (-1, sign.rank) or sign.rank < 0) for blame in blames)


def _blamed(view: View, blame: Blame) -> None:
    node = next((node for node in view.nodes if node.name == blame.node), None)
    if node is not None:
        node.incidents += 1


def name_in(counts: Mapping[str, object], what: str) -> str:
    """So that not more than so many things are told apart."""
    return what if what in counts or len(counts) < KEPT_KINDS else OTHER


def _more(counts: dict[str, int], what: str) -> None:
    what = name_in(counts, what)
    counts[what] = counts.get(what, 0) + 1


def _less(counts: dict[str, int], what: str) -> None:
    what = what if what in counts else OTHER
    counts[what] = counts.get(what, 0) - 1
    if counts[what] <= 0:
        del counts[what]


def _cut(text: str, length: int = LONG) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
