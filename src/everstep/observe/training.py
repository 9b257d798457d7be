"""Steps, saves and metrics of a job, as a fold: what was made, what of it is made again, and how fast."""

from __future__ import annotations

from everstep.core import events as e
from everstep.observe import goodput as g
from everstep.observe.known import Known
from everstep.observe.view import KEPT_SAVES, SaveView

KEPT_METRICS = 12  # with a curve of their own; of others the newest value is shown
KEPT_VALUES = 64  # metrics
KEPT_PACES = 16  # intervals that the recent time of a step is a mean of
KEPT_REDONE = 64  # spans
LEAST_S = 0.5  # that a pace is told of: records lie close together now and then, and heartbeats are late


class Training:
    """Works on what a Viewer knows; has nothing of its own."""

    def __init__(self, known: Known) -> None:
        self.known = known
        self.view, self.goodput, self.cases = known.view, known.goodput, known.cases

    # Steps ----------------------------------------------------------------------------------------------

    def seen(self, seen: e.StepsSeen, at_s: float) -> bool:
        """True: the first step of its epoch was made, or of a script that was entered anew in it."""
        known, goodput, view = self.known, self.goodput, self.view
        steps = known.steps
        made = seen.step - steps.began
        if seen.epoch != steps.epoch or made < 1:
            return False
        made_at_s = min(at_s, max(0.0, known.at(seen.step_at_s)))
        goodput.stalled_s += seen.stall_s - (steps.stalled_s if seen.stall_s >= steps.stalled_s else 0.0)
        goodput.twice_s += seen.twice_s - (steps.twice_s if seen.twice_s >= steps.twice_s else 0.0)
        steps.stalled_s, steps.twice_s = seen.stall_s, seen.twice_s
        since_s, first = goodput.last_s, steps.fresh
        if first:
            first_s = known.at(seen.first_step_at_s) if seen.first_step_at_s >= 0 else made_at_s
            since_s = self._first(seen, made, max(0.0, min(first_s, made_at_s)))
        elif self._anew(seen, made):
            since_s, first = self._entered(seen, made), True
        new = made - steps.made
        total = steps.first_total + made - 1
        if seen.saves > steps.saves or seen.saved_step > steps.saved_step:
            self._saved(seen, at_s)
        if new > 0:
            steps.made = made
            view.steps += new
            view.last_step_s = made_at_s
            view.step = max(view.step, total)
            if not first and made_at_s > since_s:
                self._pace(made_at_s - since_s, new, made_at_s)
            if made_at_s >= since_s:
                goodput.stepped(total, made_at_s, since_s)
            self._curves(made_at_s)
            if view.epochs and view.epochs[-1].first_step_s < 0 and made_at_s >= view.epochs[-1].formed_s:
                view.epochs[-1].first_step_s = made_at_s
        return first

    def _anew(self, seen: e.StepsSeen, made: int) -> bool:
        """The script was entered again in the same processes: its steps count from 1, the optimizer's own go on.

        A newcomer to a session counts from 1 too, but only until it has the job's count, after its first step."""
        steps, further = self.known.steps, seen.total_step >= made + self.known.steps.first_total
        later = self.known.at(seen.first_step_at_s) > max(self.view.last_step_s, 0.0)
        return later and made > 1 and (made < steps.made or further)

    def _entered(self, seen: e.StepsSeen, made: int) -> float:
        """Since when steps are made in it."""
        steps, before = self.known.steps, self.goodput.made.step
        steps.first_total = max(1, seen.total_step - made + 1) if seen.total_step >= 0 else before + 1
        steps.made = 0
        if steps.first_total <= before:
            self._went_back(steps.first_total - 1)
        return max(self.known.at(seen.first_step_at_s), self.goodput.last_s)

    def _pace(self, seconds: float, count: int, at_s: float) -> None:
        steps = self.known.steps
        seconds, count = seconds + steps.brief[0], count + steps.brief[1]
        steps.brief = (seconds, count) if seconds < LEAST_S else (0.0, 0)
        if seconds < LEAST_S:
            return
        paces = steps.paces
        paces.append((seconds, count))
        if len(paces) > KEPT_PACES:
            del paces[0]
        seconds_all = count_all = 0.0
        for some, number in paces:
            seconds_all += some
            count_all += number
        self.view.step_s = seconds_all / count_all
        self.known.curve("step_s", at_s, seconds / count)
        self.known.curve("steps_per_s", at_s, count / seconds)

    def _curves(self, at_s: float) -> None:
        self.known.curve("members", at_s, self.goodput.acting)
        if at_s > 0:
            self.known.curve("ettr", at_s, self.goodput.effective_s / at_s)

    def _first(self, seen: e.StepsSeen, made: int, first_s: float) -> float:
        """Where the epoch took up the job: by the optimizer's count, else right after what was done before. Steps
        that were done before are made again."""
        steps, goodput, view = self.known.steps, self.goodput, self.view
        before = goodput.made.step
        steps.first_total = max(1, seen.total_step - made + 1) if seen.total_step >= 0 else before + 1
        if not goodput.started:
            goodput.made.begin(steps.first_total - 1, first_s)
        elif steps.first_total <= before:
            self._went_back(steps.first_total - 1)
        steps.fresh = False
        self.known.places.stepped(view)
        for epoch in view.epochs[-2:]:  # of the plan, and its first formation
            if epoch.first_step_s < 0:
                epoch.first_step_s = first_s
        self.cases.tell(first_s, "recover", f"first step of epoch {seen.epoch}: step {steps.first_total}")
        if view.simulated:  # it is told when steps begin to be made
            return goodput.last_s
        goodput.relabel(max(first_s, goodput.last_s), goodput.now_s, g.PRODUCTIVE)
        goodput.settle(first_s)
        return max(first_s, goodput.last_s)

    def _owner(self) -> str:
        return self.cases.recent(self.goodput.now_s)

    def _went_back(self, step: int) -> None:
        self.view.redone_steps += self.goodput.made.step - step
        self._redone(*self.goodput.went_back(step, self._owner()))

    def _redone(self, from_s: float, to_s: float) -> None:
        if to_s > from_s:
            self.view.redone.append((from_s, to_s))
            del self.view.redone[:-KEPT_REDONE]

    def restored(self, event: e.StateRestored, at_s: float) -> None:
        steps, made = self.known.steps, self.goodput.made
        text = f"all go on from step {event.step}"
        self.cases.tell(at_s, "recover", f"{text}: {event.lost} steps are made again" if event.lost else text)
        if steps.fresh:
            steps.began = event.step
        unseen = event.lost - max(0, made.step - event.step)
        if unseen > 0 and self.goodput.started:
            self.view.steps += unseen
            self.view.redone_steps += unseen
            self.view.step = max(self.view.step, event.before)
            self.goodput.unseen(unseen * self.view.step_s, self._owner())
        if event.step < made.step:
            if not steps.fresh:
                steps.made = max(0, event.step - steps.first_total + 1)
            self._went_back(event.step)

    def from_scratch(self) -> None:
        """The epoch began anew. Only needed where the optimizer keeps no count: it was taken to go on."""
        steps, before = self.known.steps, self.known.steps.first_total - 1
        if steps.fresh or before < 1:
            return
        self.view.redone_steps += before
        self._redone(*self.goodput.lost_before(before, self._owner()))
        steps.first_total = 1
        self.view.step = max(before, steps.made)

    def resumed(self, event: e.StepResumed, at_s: float) -> None:
        gap = f", {event.gap_s:.3f} s after the one before" if event.gap_s > 0 else ""
        self.cases.tell(at_s, "recover", f"all made step {event.committed} in formation {event.epoch}{gap}")
        self.known.places.stepped(self.view)
        epochs = self.view.epochs
        if epochs and epochs[-1].first_step_s < 0:
            epochs[-1].first_step_s = at_s

    def metrics(self, event: e.MetricsSeen, at_s: float) -> None:
        metrics, curves = self.view.metrics, self.known.curves
        for name, value in event.values.items():
            if name in metrics or len(metrics) < KEPT_VALUES:
                metrics[name] = value
                key = f"metric:{name}"
                if key in curves or len(metrics) <= KEPT_METRICS:
                    self.known.curve(key, at_s, value)

    # Saves ----------------------------------------------------------------------------------------------

    def _save(self, step: int) -> SaveView:
        for save in reversed(self.view.saves):
            if save.step == step:
                return save
        made = SaveView(step)
        self.view.saves.append(made)
        del self.view.saves[:-KEPT_SAVES]
        return made

    def save_requested(self, event: e.SaveRequested, at_s: float) -> None:
        self.known.saves_told = True
        save = self._save(event.step)
        save.requested_s, save.durable_s, save.failed = at_s, -1.0, ""

    def save_durable(self, event: e.SaveDurable, at_s: float) -> None:
        self.known.saves_told = True
        self._save(event.step).durable_s = at_s
        self.view.num_saves += 1
        self.view.saved_step = max(self.view.saved_step, event.step)

    def save_failed(self, event: e.SaveFailed, at_s: float) -> None:
        self._save(event.step).failed = event.why[:200]
        self.view.saves_failed += 1

    def _saved(self, seen: e.StepsSeen, at_s: float) -> None:
        """The script saves by itself: workers count what they finished."""
        steps, view = self.known.steps, self.view
        new, steps.saves = max(0, seen.saves - steps.saves), max(steps.saves, seen.saves)
        steps.saved_step = seen.saved_step
        if self.known.saves_told:
            return
        view.num_saves += new
        if seen.saved_step >= 0:
            step = steps.first_total - 1 + seen.saved_step
            view.saved_step = max(view.saved_step, step)
            self._save(step).durable_s = at_s
