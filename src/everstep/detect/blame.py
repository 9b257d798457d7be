"""First cause and collateral: when one worker dies, its peers fail too, and may well be the first to say so.

What counts is what kind of end it was, not who reported first. An end that no peer can cause (a signal, out of
memory, an error of the worker's own, a vanished process) beats every broken connection; time decides only among
equals. The sentences are for a person on call.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

from everstep.core.events import NodeLost, WorkerEnded
from everstep.core.types import Blame, Exit, ExitCause, NodeLoss
from everstep.detect.repeat import normalised

# What gloo, NCCL, TCPStore and the kernel say to those whose peer is gone, or whose sockets we shut to wake them.
BROKEN_BY_PEER = re.compile(
    r"connection (?:was )?(?:reset|closed|refused|aborted)|closed by peer|broken pipe|reset by peer|remote peer"
    r"|remote process exited|nccl ?remote ?error|ncclsystemerror|ncclinternalerror|unhandled system error"
    r"|nccl communicator was aborted|distnetworkerror|diststoreerror|distbackenderror|tcpstore"
    r"|application timeout caused pair closure|timed out waiting \d+ ?ms for (?:recv|send)|gloo/transport"
    r"|watchdog caught collective operation timeout|recvvalue failed|failed to recv, got 0 bytes|socket timeout"
    r"|transport endpoint is not connected|connection timed out|monitoredbarrier|bad file descriptor.*gloo"
    r"|heartbeat monitor timed out|connect(?:full)?mesh"
    # A session whose peers went on without it, or died with the state.
    r"|others went on without (?:this worker|it)|steps were committed, and nobody here holds more",
    re.IGNORECASE,
)
# C++ code that throws in a thread of its own aborts; a write to a closed connection raises SIGPIPE (B16).
ENDS_OF_VICTIMS = (signal.SIGABRT, signal.SIGPIPE)
NATIVE_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP)
TOGETHER_S = 2.0  # the same failure of several workers within this time is one cause that hit them all
LATE_S = 0.5  # a program's end is known only when it is reaped, after its connections closed
NOT_STARTED = "could not be started"  # how the message of a worker begins whose process never came to be
CONSEQUENCES = (NodeLoss.STUCK, NodeLoss.LEFT)  # losses that the eviction of the epoch brings about

Judged = tuple[tuple[Blame, ...], tuple[Blame, ...], str]


def first_cause(ended: Sequence[WorkerEnded], lost_nodes: Sequence[NodeLost] = ()) -> Judged:
    """Culprits, collateral, and why, for the ends of one epoch. Empty culprits: nothing failed.

    The first culprit is the first cause; the sentence speaks of it.
    """
    failed = sorted((w for w in ended if w.exit.failed), key=lambda w: (w.seen_s, w.rank))
    lost = [n for n in lost_nodes if n.how not in CONSEQUENCES or not failed]
    dead_nodes = {n.node for n in lost}
    own = [w for w in failed if not is_victim(w.exit) and not (w.node in dead_nodes and _went_with_node(w.exit))]
    culprits = _first_of(own)
    if not culprits and not lost:
        culprits = _without_own_cause(ended, failed)
    rest = [w for w in failed if w not in culprits]
    nodes = tuple(Blame(-1, n.node, f"node lost: {n.how.value}", _LOSSES[n.how]) for n in lost)
    why = "; ".join([*(_node_sentence(n) for n in lost), *_sentences(culprits)])
    if culprits and not lost and all(is_victim(w.exit) for w in culprits):
        why += "; no worker is known to have died before its peers' connections broke"
    return nodes + tuple(map(_blame, culprits)), tuple(map(_blame, rest)), why


def is_victim(end: Exit) -> bool:
    """Whether a peer's death, or our own stopping of the epoch, explains this end."""
    match end.cause:
        case ExitCause.GRACE:
            return True
        case ExitCause.SIGNAL:
            return end.signal in ENDS_OF_VICTIMS
        case ExitCause.ERROR | ExitCause.EXIT_CODE:
            return BROKEN_BY_PEER.search(end.message) is not None
    return False


def _went_with_node(end: Exit) -> bool:
    """A node that goes down ends its workers by signals first; out of memory stays a cause of its own."""
    return end.cause is ExitCause.SIGNAL


def _first_of(own: Sequence[WorkerEnded]) -> list[WorkerEnded]:
    """The first, those that failed alike at that time, and those that the kernel or an outsider killed as well."""
    if not own:
        return []
    first = own[0]
    return [w for w in own if w is first or _killed(w.exit) or _alike(w, first)]


def _killed(end: Exit) -> bool:
    return end.cause is ExitCause.OOM or (end.cause is ExitCause.SIGNAL and end.signal == signal.SIGKILL)


def _alike(one: WorkerEnded, other: WorkerEnded) -> bool:
    if one.exit.cause is not other.exit.cause or one.seen_s - other.seen_s > TOGETHER_S:
        return False
    return normalised(one.exit.message) == normalised(other.exit.message)


def _without_own_cause(ended: Sequence[WorkerEnded], failed: Sequence[WorkerEnded]) -> list[WorkerEnded]:
    """Only broken connections: one that left early broke them, or the first that complained is the best we know."""
    if not failed:
        return []
    left = [w for w in ended if w.exit.cause is ExitCause.OK and w.seen_s <= failed[0].seen_s + LATE_S]
    fewest = min((w.exit.step for w in left), default=0)
    judged = [w for w in failed if w.exit.cause is not ExitCause.GRACE]
    return [w for w in left if w.exit.step == fewest] or judged[:1] or [failed[0]]


def _blame(worker: WorkerEnded) -> Blame:
    cause = "not-started" if _never_started(worker.exit) else worker.exit.cause.value
    return Blame(worker.rank, worker.node, cause, sentence(worker.exit))


def _never_started(end: Exit) -> bool:
    return end.cause is ExitCause.ERROR and end.message.startswith(NOT_STARTED)


def _sentences(culprits: Sequence[WorkerEnded]) -> list[str]:
    """What happened to the first of each kind, and who else met the same."""
    kinds: dict[object, list[WorkerEnded]] = {}
    for worker in culprits:
        kinds.setdefault((worker.exit.cause, worker.exit.signal, _never_started(worker.exit)), []).append(worker)
    texts = []
    for first, *others in kinds.values():
        texts.append(f"rank {first.rank} on {first.node} {sentence(first.exit)}")
        if others:
            ranks = [str(w.rank) for w in others]
            listed = " and ".join([", ".join(ranks[:-1]), ranks[-1]] if len(ranks) > 1 else ranks)
            texts[-1] += f"; the same happened to rank{'s' if len(ranks) > 1 else ''} {listed}"
    return texts


def sentence(end: Exit) -> str:
    """What happened to a worker, to follow "rank 2 on node1"."""
    at = f"at step {end.total_step if end.total_step >= 0 else end.step}"
    message = " ".join(end.message.split())[:300]
    match end.cause:
        case ExitCause.SIGNAL:
            if end.signal in NATIVE_CRASHES:
                return f"crashed in native code with {_signal(end.signal)} {at}"
            if end.signal is None:
                return f"died {at}; how is not known yet"
            return f"was killed by {_signal(end.signal)} (sent from outside) {at}"
        case ExitCause.OOM:
            memory = f", last seen with {end.rss_bytes / 2**30:.1f} GiB" if end.rss_bytes else ""
            return f"was killed by the kernel: out of memory {at}{memory}"
        case ExitCause.GRACE:
            return f"did not end within the grace time and was killed {at}"
        case ExitCause.ERROR if _never_started(end):
            return message
        case ExitCause.ERROR:
            return f"raised {message.rstrip('.') or 'an error'} {at}"
        case ExitCause.EXIT_CODE:
            said = f" ({message.rstrip('.')})" if message and message != f"exit status {end.code}" else ""
            return f"exited with status {end.code}{said} {at}"
        case ExitCause.UNFINISHED:
            return f"vanished with exit status 0 before its script had ended, {at}"
        case ExitCause.OK:
            return f"ended (exit 0) {at} while the others still communicate"
    return f"was stopped {at}"


def _signal(number: int | None) -> str:
    names = {int(s): s.name for s in signal.Signals}
    known = number is not None and number != signal.SIGKILL and number in names
    return f"signal {number}, {names[number or 0]}" if known else f"signal {number}"


_LOSSES = {
    NodeLoss.CLOSED: "its agent's connection ended",
    NodeLoss.DIED: "its agent died",
    NodeLoss.SILENT: "it sent nothing for the length of its lease",
    NodeLoss.STUCK: "it did not stop its workers in time",
    NodeLoss.REPLACED: "a new agent came under its name",
    NodeLoss.LEFT: "it left on its own wish",
}


def _node_sentence(lost: NodeLost) -> str:
    return f"node {lost.node} was lost: {_LOSSES[lost.how]}"
