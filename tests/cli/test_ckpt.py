"""`everstep ckpt`: what it says, its exit codes, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import small_images as images
from safetensors.torch import load_file

from everstep.cli.main import main
from everstep.core.errors import ExitCode
from everstep.state.disk import Checkpoints


@pytest.fixture
def place(tmp_path: Path) -> Path:
    where = tmp_path / "saved"
    for step in (9900, 10000):
        Checkpoints(where).write(*images.image(images.state(step), step))
    return where


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["ckpt", *map(str, words)])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_ls_show_and_prune(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpoints(place).write(*images.image(images.state(5), 5, num_shards=2))
    code, text = said(capsys, "ls", place)
    assert code == ExitCode.OK
    assert [line.split()[0] for line in text.splitlines()] == ["step", "10000", "9900", *text.split()[-2:-1]]
    assert "unfinished" in text.splitlines()[-1] and "train-1234" in text
    code, text = said(capsys, "show", place / "step-0000009900")
    assert code == ExitCode.OK and "step 9900, epoch 1, of train-1234" in text
    assert "model.blocks.0.weight" in text and "12 x 8" in text and "bfloat16" in text
    code, text = said(capsys, "prune", place, "--keep", 1, "--dry-run")
    assert code == ExitCode.OK and "would remove step-0000009900" in text and "1 kept" in text
    assert said(capsys, "prune", place, "--keep", 1)[0] == ExitCode.OK
    code, text = said(capsys, "ls", place, "--json")
    assert [(row["step"], row["state"]) for row in json.loads(text)] == [(10000, "complete")]


def test_verify_names_the_damage(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", place, "--all") == (0, "step-0000010000: whole\nstep-0000009900: whole\n")
    data = place / "step-0000010000/__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    code, text = said(capsys, "verify", place)
    assert code == ExitCode.FAILED and "  __0_0.distcp: is damaged between bytes 0 and" in text
    data.write_bytes(data.read_bytes()[:500])
    code, text = said(capsys, "verify", place)  # the newest that was completed, not the newest that is whole
    assert code == ExitCode.FAILED and "__0_0.distcp: has 500 bytes and not" in text
    assert said(capsys, "verify", place / "step-0000009900")[0] == ExitCode.OK
    code, text = said(capsys, "ls", place)
    assert code == ExitCode.FAILED and "damaged" in text


def test_diff_and_export(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "diff", place, place / "step-0000010000")[0] == ExitCode.OK
    code, text = said(capsys, "diff", place / "step-0000009900", place)
    assert code == ExitCode.FAILED and "model.scale" in text and "100" in text
    out = tmp_path / "model.safetensors"
    code, text = said(capsys, "export", place, out)
    assert code == ExitCode.OK and f"{out}: 3 tensors" in text
    assert load_file(out)["scale"] == 10000
    code, text = said(capsys, "export", place, out, "--of", "modle")
    assert code == ExitCode.USAGE and "it holds model, optimizer" in text


def test_what_cannot_be(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, word in (
        (("show", tmp_path / "nothing"), "no complete checkpoint in"),
        (("verify", place / "step-0000000007"), "never completed"),
        (("prune", place, "--keep", 0), "at least the newest checkpoint is kept"),
        (("ls", "nowhere://x"), "Protocol not known: nowhere"),
        (("frobnicate", place), "Unknown command"),
    ):
        code, text = said(capsys, *words)
        assert code in (ExitCode.USAGE, ExitCode.FAILED) and word in text, text


def test_no_verb_needs_torch(place: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from everstep.cli.main import main; where, out = sys.argv[1:]\n"
        "for verb in ('ls', 'show', 'verify', 'prune'): assert main(['ckpt', verb, where]) == 0\n"
        "assert 'numpy' not in sys.modules\n"
        "assert main(['ckpt', 'export', where, out]) == 0 and main(['ckpt', 'diff', where, where]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(place), str(tmp_path / "out")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_reshape(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "reshape", place, tmp_path / "other", "--shards", 3)
    assert code == ExitCode.OK and "step 10000 in" in text and "3 shards" in text
    assert said(capsys, "diff", place, tmp_path / "other")[0] == ExitCode.OK
    code, text = said(capsys, "reshape", place, tmp_path / "other", "--shards", 2)
    assert code == ExitCode.USAGE and "is in" in text
