"""Drain, save, stop, stacks and profile from the page: a wish that names the job is handed to the job's controller,
which decides. Of stacks and profiles the answer is what there is to see (`shown`).

As with `everstep drain`, what the controller answers is that the wish is in its journal; what becomes of it comes back
through the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from everstep.core import wire
from everstep.dashboard.shown import shown

Question = wire.DrainRequest | wire.SaveRequest | wire.StopRequest | wire.LookRequest
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
    seconds: float = 5.0
    threads: bool = False


class Answer(NamedTuple):
    status: int
    payload: dict[str, Any]


async def carry_out(verb: str, media_type: str, body: bytes, job: str, commands: Commands | None, run: Path) -> Answer:
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
    why = answer.get("refused", answer.get("nothing"))
    if why is not None:
        return Answer(409, {"refused": str(why)})
    if isinstance(question, wire.LookRequest):
        return Answer(200, await asyncio.to_thread(shown, run, answer))
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
        case "stacks" | "profile" if not wish.target:
            return Answer(400, {"error": f"{verb} needs a worker: its rank, or node/local_rank"})
        case "stacks" | "profile" as what:
            return wire.LookRequest(what, (wish.target,), wish.seconds, wish.threads)
    return Answer(404, {"error": f"no such control: {verb[:20]}"})


def _words(question: wire.DrainRequest | wire.SaveRequest | wire.StopRequest, answer: Mapping[str, Any]) -> str:
    match question:
        case wire.DrainRequest(undo=undo):
            return f"{answer.get('target')} {'is to be filled again' if undo else 'is asked to leave'}"
        case wire.SaveRequest():
            return "a save after the next step is asked for"
        case wire.StopRequest(grace_s=grace_s):
            return f"the job is asked to stop, within {grace_s:g} s"
