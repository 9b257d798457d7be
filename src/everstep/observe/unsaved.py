"""In words: a job ended, and nothing of what it trained is on disk, as far as was seen."""

from __future__ import annotations

from everstep.observe.units import plural
from everstep.observe.view import View


def unsaved(view: View) -> str:
    """A clause that begins with "its state"; empty while the job runs, and where there is nothing to say."""
    if view.simulated or not view.ended or view.steps <= 0 or view.num_saves or view.saved_step >= 0:
        return ""
    return f"its state was never saved to disk: {_why(view)}"


def _why(view: View) -> str:
    if view.saves_failed:
        return f"{plural(view.saves_failed, 'save')} failed, and none succeeded"
    if view.memory_steps:
        return "it was kept in the nodes' memory only, which went with the job"
    return f"no save was seen, so unless the script kept it elsewhere, {plural(view.steps, 'step')} left nothing"
