"""Every page keeps what it promises: its code compiles, its commands parse, its links and its file tree are real."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.cli import main, options

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
# A name in a file tree, after indentation and the strokes of a drawn tree.
ENTRY = re.compile(r"^[\s│├└─|`+-]*(?P<name>[\w.][\w./-]*)")


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[1] == language:
                found.append(Block(page, text[: match.start()].count("\n") + 2, match[1], match[2]))
    return found


def commands(shell: str) -> Iterator[list[str]]:
    """Words of each simple command, comments and prompts removed."""
    for line in shell.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                yield words
                words = []
            else:
                words.append(word)


def everstep_arguments(words: list[str]) -> list[str] | None:
    """What a command hands to everstep; None when it runs something else. Leading VARIABLE=value are skipped."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words[1:] if words and words[0].split("/")[-1] == "everstep" else None


def check_everstep(arguments: list[str]) -> None:
    """Raise UsageError, or fail, when the command line would not be understood."""
    verb = arguments[0] if arguments else "--help"
    assert verb in (*main.COMMANDS, "--help", "--version"), f"no such command: everstep {verb}"
    if verb == "run":
        options.split(arguments[1:])


def tree_paths(text: str) -> Iterator[Path]:
    """The paths of a file tree: folders end with a slash, what is indented deeper lies in them."""
    above: list[tuple[int, Path]] = []
    for line in text.splitlines():
        match = ENTRY.match(line)
        if match is None:
            continue
        column = match.start("name")
        while above and above[-1][0] >= column:
            above.pop()
        path = (above[-1][1] if above else Path()) / match["name"]
        yield path
        if match["name"].endswith("/"):
            above.append((column, path))


def file_trees() -> list[Block]:
    """Blocks of the README, without a language or of `text`, whose first entry is a folder."""
    plain = [block for language in ("", "text") for block in blocks(language) if block.page.name == "README.md"]
    return [block for block in plain if re.match(r"[\w./-]+/(\s|$)", block.text)]


def test_pages_are_there() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert names >= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/design.md", "docs/log.md"}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.where)
def test_python_compiles(block: Block) -> None:
    compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.where)
def test_commands_are_understood(block: Block) -> None:
    for words in commands(block.text):
        arguments = everstep_arguments(words)
        if arguments is not None:
            check_everstep(arguments)
        elif words[:1] == ["make"]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            targets = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
            assert all(re.search(rf"^{re.escape(target)}:", makefile, re.M) for target in targets), words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [
        target for target in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()
    ]
    assert broken == []


def test_file_trees_are_real() -> None:
    named = [(block, path) for block in file_trees() for path in tree_paths(block.text)]
    missing = [f"{block.where}: {path}" for block, path in named if not (ROOT / path).exists()]
    assert missing == []


def test_tree_is_read_in_both_styles() -> None:
    indented = "src/everstep/   the package\n  core/   words\n    clock.py  time\n  cli/\ntests/\n"
    drawn = "src/everstep/\n├── core/   # words\n│   └── clock.py\n└── cli/\ntests/\n"
    expected = ["src/everstep", "src/everstep/core", "src/everstep/core/clock.py", "src/everstep/cli", "tests"]
    assert [path.as_posix() for path in tree_paths(indented)] == expected
    assert [path.as_posix() for path in tree_paths(drawn)] == expected


def test_commands_are_split() -> None:
    text = "$ A=1 .venv/bin/everstep run --x \\\n  'a b'  # why\ncd x && make test; everstep status | head\n"
    assert [everstep_arguments(words) for words in commands(text) if words] == [
        ["run", "--x", "a b"], None, None, ["status"], None,
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="no such command"):
        check_everstep(["fly"])


BRAIN = [block for language in ("python", "bash") for block in blocks(language) if block.page.name == "brain.md"]


@pytest.mark.parametrize("block", BRAIN, ids=lambda block: block.where)
def test_examples_of_the_brain_run(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    if block.language == "python":
        exec(compile(block.text, str(block.page), "exec"), {})
    else:
        assert [main.main(words[1:]) for words in commands(block.text) if words] == [0] * len(block.text.splitlines())
