"""A small part of PromQL, enough for deploy/prometheus/alerts.yml: python scripts/promql.py EXPRESSION < metrics.txt

So that our own tests can show that each alert fires where it should, without a Prometheus. It differs in one place:
`increase` and `delta` are last minus first (of an increase: over resets), not extrapolated to the ends of the range.
What it does not know is an error, never a guess. Names of a metric are kept as the label __name__.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Value = float | Vector
Points = list[tuple[float, float]]  # seconds, value; oldest first

STALE_S = 300.0  # a series without a newer sample is gone
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")
PAIR = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
TOKEN = re.compile(
    r"\s*(?:(?P<range>\[\d+[smhd]\])|(?P<number>\d+(?:\.\d+)?)(?![\w])|(?P<word>[a-zA-Z_:][\w:]*)"
    r'|(?P<matchers>\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})|(?P<sign>==|!=|<=|>=|[-+*/<>(),]))'
)
UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LEVELS = (("or",), ("and", "unless"), ("==", "!=", "<=", "<", ">=", ">"), ("+", "-"), ("*", "/"))
COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
}  # fmt: skip
COMPUTE: dict[str, Callable[[float, float], float]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "/": lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan,
}  # fmt: skip
TOGETHER: dict[str, Callable[[Iterable[float]], float]] = {"sum": math.fsum, "max": max, "min": min}


def read_text(text: str) -> Vector:
    """Prometheus' text format."""
    found: Vector = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = SAMPLE.match(line)
            if match is None:
                raise ValueError(f"not a sample: {line!r}")
            pairs = [(name, value) for name, _, value in PAIR.findall(match["labels"] or "")]
            found[frozenset([("__name__", match["name"]), *pairs])] = float(match["value"])
    return found


class Store:
    """Samples over time."""

    def __init__(self) -> None:
        self.series: dict[Labels, Points] = {}

    def add(self, at_s: float, samples: Mapping[Labels, float], **target: str) -> None:
        """What one scrape found; `target`: labels that Prometheus adds."""
        for labels, value in samples.items():
            self.series.setdefault(labels | frozenset(target.items()), []).append((at_s, value))

    def select(self, matches: Callable[[Labels], bool], first_s: float, last_s: float) -> dict[Labels, Points]:
        chosen = {labels: points for labels, points in self.series.items() if matches(labels)}
        inside = {labels: [p for p in points if first_s < p[0] <= last_s] for labels, points in chosen.items()}
        return {labels: points for labels, points in inside.items() if points}


class _Token(NamedTuple):
    kind: str
    text: str


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while text[at:].strip():
        match = TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError(f"not understood: {text[at:]!r}")
        found.append(_Token(match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return found


def evaluate(expression: str, store: Store, now_s: float) -> Value:
    """The value at that moment. Raises ValueError for what this part of PromQL does not have."""
    query = _Query(_tokens(expression), store, now_s)
    value = query.binary(0)
    if query.left:
        raise ValueError(f"not understood: {[token.text for token in query.left]}")
    return value


class _Query:
    """Reads an expression and computes it on the way."""

    def __init__(self, tokens: list[_Token], store: Store, now_s: float) -> None:
        self.left, self.store, self.now_s = tokens, store, now_s

    def peek(self) -> str:
        return self.left[0].text if self.left else ""

    def take(self, expected: str = "") -> _Token:
        if not self.left or (expected and self.peek() != expected):
            raise ValueError(f"expected {expected or 'more'}, got {self.peek() or 'the end'}")
        return self.left.pop(0)

    def binary(self, level: int) -> Value:
        """Operators of one level, from left to right; all that we have are left-associative."""
        if level == len(LEVELS):
            return self.operand()
        value = self.binary(level + 1)
        while self.peek() in LEVELS[level]:
            operator = self.take().text
            on = self.names() if self.peek() == "on" and self.take() else None
            value = _combine(operator, value, self.binary(level + 1), on)
        return value

    def names(self) -> tuple[str, ...]:
        self.take("(")
        found = []
        while self.peek() != ")":
            found.append(self.take().text)
            if self.peek() == ",":
                self.take()
        self.take(")")
        return tuple(found)

    def operand(self) -> Value:
        token = self.take()
        if token.kind == "number":
            return float(token.text)
        if token.text == "(":
            value = self.binary(0)
            self.take(")")
            return value
        if token.kind == "word" and token.text in TOGETHER:
            return self.aggregated(token.text)
        if token.kind == "word" and self.peek() == "(":
            return self.called(token.text)
        if token.kind == "word":
            return {labels: points[-1][1] for labels, points in self.selected(token.text, STALE_S).items()}
        raise ValueError(f"not understood: {token.text}")

    def selected(self, name: str, range_s: float | None) -> dict[Labels, Points]:
        """Series by name and matchers; `range_s` None: the expression names the range."""
        matchers = PAIR.findall(self.take().text) if self.left and self.left[0].kind == "matchers" else []
        if range_s is None:
            if not self.left or self.left[0].kind != "range":
                raise ValueError(f"{name} needs a range")
            text = self.take().text
            range_s = float(text[1:-2]) * UNIT_S[text[-2]]

        def matches(labels: Labels) -> bool:
            values = dict(labels)
            return values["__name__"] == name and all(_fits(values.get(k, ""), op, v) for k, op, v in matchers)

        return self.store.select(matches, self.now_s - range_s, self.now_s)

    def called(self, function: str) -> Value:
        self.take("(")
        value: Value
        if function == "time":
            value = self.now_s
        elif function in OVER_TIME:
            series = self.selected(self.take().text, None)
            values = {_nameless(labels): OVER_TIME[function](points) for labels, points in series.items()}
            value = {labels: found for labels, found in values.items() if found is not None}
        else:
            raise ValueError(f"no such function here: {function}")
        self.take(")")
        return value

    def aggregated(self, function: str) -> Value:
        self.take("by")
        by = self.names()
        self.take("(")
        vector = self.binary(0)
        self.take(")")
        assert isinstance(vector, dict)
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(_only(labels, by), []).append(value)
        return {labels: TOGETHER[function](values) for labels, values in groups.items()}


def _fits(value: str, operator: str, wanted: str) -> bool:
    same = re.fullmatch(wanted, value) is not None if "~" in operator else value == wanted
    return same != operator.startswith("!")


def _increase(points: Points) -> float | None:
    steps = [b - a if b >= a else b for (_, a), (_, b) in zip(points, points[1:], strict=False)]
    return math.fsum(steps) if steps else None


def _delta(points: Points) -> float | None:
    return points[-1][1] - points[0][1] if len(points) > 1 else None


def _max_over_time(points: Points) -> float | None:
    return max(value for _, value in points)


OVER_TIME = {"increase": _increase, "delta": _delta, "max_over_time": _max_over_time}


def _nameless(labels: Labels) -> Labels:
    return frozenset(pair for pair in labels if pair[0] != "__name__")


def _only(labels: Labels, names: tuple[str, ...]) -> Labels:
    return frozenset(pair for pair in labels if pair[0] in names)


def _combine(operator: str, left: Value, right: Value, on: tuple[str, ...] | None) -> Value:
    if operator in ("and", "unless", "or"):
        assert isinstance(left, dict) and isinstance(right, dict)
        there = {_match(labels, on) for labels in right}
        if operator == "or":
            here = {_match(labels, on) for labels in left}
            return left | {labels: value for labels, value in right.items() if _match(labels, on) not in here}
        return {labels: v for labels, v in left.items() if (_match(labels, on) in there) == (operator == "and")}
    if not isinstance(left, dict) and not isinstance(right, dict):
        if operator in COMPARE:
            raise ValueError("two numbers are compared with `bool` only")
        return COMPUTE[operator](left, right)
    result: Vector = {}
    for labels, a, b in _pairs(left, right, on):
        if operator in COMPUTE:
            result[_nameless(labels)] = COMPUTE[operator](a, b)
        elif COMPARE[operator](a, b):
            result[labels] = a if isinstance(left, dict) else b
    return result


def _match(labels: Labels, on: tuple[str, ...] | None) -> Labels:
    return _nameless(labels) if on is None else _only(labels, on)


def _pairs(left: Value, right: Value, on: tuple[str, ...] | None) -> list[tuple[Labels, float, float]]:
    """What meets what. One to one: PromQL refuses more without group_left, and so do we."""
    if not isinstance(right, dict):
        assert isinstance(left, dict)
        return [(labels, value, right) for labels, value in left.items()]
    if not isinstance(left, dict):
        return [(labels, left, value) for labels, value in right.items()]
    others = {_match(labels, on): value for labels, value in right.items()}
    mine = [_match(labels, on) for labels in left]
    if len(others) < len(right) or len(set(mine)) < len(mine):
        raise ValueError("many-to-many matching: labels are not unique on one side")
    return [(labels, v, others[key]) for (labels, v), key in zip(left.items(), mine, strict=True) if key in others]


def main() -> None:
    store = Store()
    store.add(0.0, read_text(sys.stdin.read()))
    print(evaluate(sys.argv[1], store, 0.0))


if __name__ == "__main__":
    main()
