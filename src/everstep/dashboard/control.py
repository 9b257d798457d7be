"""Drain, save and stop from the page: a wish that names the job is handed to the job's controller, which decides.

As with `everstep drain`, what the controller answers is that the wish is in its journal; what becomes of it comes back
through the journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from everstep.core import wire

Question = wire.DrainRequest | wire.SaveRequest | wire.StopRequest
MEDIA_TYPE = "application/json"  # which a foreign page's form cannot send


class Commands(Protocol):
    """The way to the job's controller. `cli` knows it."""

    grace_s: float

    async def ask(self, question: Question) -> Mapping[str, Any] | str:
        """What the controller says; why not, when it does not answer."""


class Wish(msgspec.Struct, forbid_unknown_fields=True):
    """`confirm` is the job's name, as the person typed it."""

    confirm: str
    target: str = ""
    undo: bool = False


class Answer(NamedTuple):
    status: int
    payload: dict[str, str]


async def carry_out(verb: str, media_type: str, body: bytes, job: str, commands: Commands | None) -> Answer:
    """Hand one wish on. Whoever sent it has shown the token."""
    if media_type.partition(";")[0].strip().lower() != MEDIA_TYPE:
        return Answer(415, {"error": f"expected {MEDIA_TYPE}"})
    try:
        wish = msgspec.json.decode(body, type=Wish)
    except (msgspec.DecodeError, RecursionError) as error:
        return Answer(400, {"error": f"no wish: {error}"})
    if commands is None:
        return Answer(409, {"refused": "this job does not run, or its controller cannot be reached from here"})
    if wish.confirm != job:
        return Answer(409, {"refused": f"not confirmed: type the job's name, {job}"})
    question = _question(verb, wish, commands.grace_s)
    if isinstance(question, Answer):
        return question
    answer = await commands.ask(question)
    if isinstance(answer, str):
        return Answer(409, {"refused": answer})
    if "refused" in answer:
        return Answer(409, {"refused": str(answer["refused"])})
    return Answer(200, {"ok": _words(question, answer)})


def _question(verb: str, wish: Wish, grace_s: float) -> Question | Answer:
    match verb:
        case "drain" if not wish.target:
            return Answer(400, {"error": "drain needs a target: a node, a rank, or node/local_rank"})
        case "drain":
            return wire.DrainRequest(wish.target, wish.undo)
        case "save":
            return wire.SaveRequest()
        case "stop":
            return wire.StopRequest("a person asked for it on the dashboard", grace_s=grace_s)
    return Answer(404, {"error": f"no such control: {verb[:20]}"})


def _words(question: Question, answer: Mapping[str, Any]) -> str:
    match question:
        case wire.DrainRequest(undo=undo):
            return f"{answer.get('target')} {'is to be filled again' if undo else 'is asked to leave'}"
        case wire.SaveRequest():
            return "a save after the next step is asked for"
        case wire.StopRequest(grace_s=grace_s):
            return f"the job is asked to stop, within {grace_s:g} s"
