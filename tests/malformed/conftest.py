"""A user's folder, and what must hold whenever a command refuses: see `Folder.refused`."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from redco_cli.cli import app
from redco_cli.recipe.shipped import shipped_directory

PLUGIN = """
import flax.linen as nn
import numpy as np
import optax
from redco_cli.plugin.contract import Loss


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


def build_model(ctx):
    return Net()


def load_examples(ctx, split):
    return [{"x": [i, 1.0], "y": i % 3} for i in range(40 if split == "train" else 4)]


def collate_fn(ctx, examples):
    x = np.array([e["x"] for e in examples], np.float32)
    y = np.array([e["y"] for e in examples])
    return {"x": x, "y": y}


def loss_fn(ctx, params, batch, rng, train):
    logits = ctx.model(params, batch["x"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return Loss(each.sum(), each.size)


def predict_fn(ctx, params, batch, rng):
    return ctx.model(params, batch["x"]).argmax(-1)


def output_fn(ctx, outputs):
    return outputs.tolist()


def metric_fn(ctx, examples, predictions):
    return {"exact": 0.5}
"""

RECIPE = """plugin: {module: plugin.py}
train: {global_batch_size: 4, steps: 4, optimizer: sgd, schedule: constant, max_grad_norm: null}
eval: {every: 2}
checkpoint: {every: 2, keep: 2}
logging: {every: 1, plot: false}
mesh: {data: 1}
output_dir: run
"""

SAID_BY_LIBRARIES = re.compile(r"^\s*(ERROR|WARNING|INFO):|^[\w.]*(Error|Exception|Warning):", re.MULTILINE)
PROGRESS = re.compile(
    r"(compil(ing|ed) |step \d+/|eval \d+/|predicting |continuing from |warning: |\d+ examples, with ).*\n"
)
"""What a command says on its way; the rest of stderr is the error."""


class Folder:
    """A working directory with `recipe.yaml` and `plugin.py`, and the command line run in it."""

    recipe = RECIPE

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **files: str | bytes) -> None:
        """Writes files; `__` in a name stands for `.`, and `___` for `/`: `train__jsonl="..."`."""
        for name, content in files.items():
            path = self.root / name.replace("___", "/").replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def plugin(self, *replacements: tuple[str, str], plus: str = "") -> None:
        """`plugin.py` with each text of the pairs replaced by the other, and `plus` at its end."""
        text = PLUGIN
        for old, new in replacements:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        self.write(plugin__py=text + plus)

    def files(self) -> dict[str, bytes | None]:
        """Every file with its contents and every directory, but for caches."""
        found = (path for path in sorted(self.root.rglob("*")) if "__pycache__" not in path.parts)
        return {str(path.relative_to(self.root)): path.read_bytes() if path.is_file() else None for path in found}

    def done(self, *arguments: str) -> tuple[str, str]:
        """Stdout and stderr of a command that must succeed."""
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command in a process of its own, as from a user's shell: one device, and warnings as they come."""
        environ = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONWARNINGS")}
        listening = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background is deaf
        )
        command = [sys.executable, "-c", f"{listening}; from redco_cli.cli import main; main()", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.root, env=environ, text=True, stdout=pipe, stderr=pipe)

    def usage(self, *arguments: str) -> str:
        """What a command that was used wrongly says; it must not have done anything."""
        before = self.files()
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert self.files() == before
        assert "Traceback" not in result.stderr
        return result.stderr

    def refused(self, *arguments: str, code: int = 1, leaves: Sequence[str] = ()) -> str:
        """The error of a command that must refuse: places, problems and remedies.

        Args:
            arguments: of the command.
            code: its exit code.
            leaves: patterns of what it may leave behind; whatever was there before must be as it was.
        """
        before = self.files()
        result = CliRunner().invoke(app, list(arguments))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        assert result.exit_code == code, result.output
        after = self.files()
        assert {name: after.get(name) for name in before} == before
        new = [name for name in after if name not in before]
        assert [name for name in new if not any(re.fullmatch(pattern, name) for pattern in leaves)] == []
        assert result.stdout == ""
        assert "Traceback" not in result.stderr, result.stderr
        error = PROGRESS.sub("", result.stderr).rstrip("\n")
        error = error.replace(str(self.root), "FOLDER").replace(str(shipped_directory()), "SHIPPED")
        assert not SAID_BY_LIBRARIES.search(error), error
        problems = re.split(
            r"(?m)^  -> \S.*\n?", error
        )  # each ends with its remedy, so nothing is left behind the last
        assert problems.pop() == "", error
        for problem in problems:
            assert re.match(r"\S[^\n]*: \S", problem), problem
        return error


def _make_folder(root: Path) -> Folder:
    folder = Folder(root)
    folder.write(recipe__yaml=RECIPE, plugin__py=PLUGIN)
    return folder


@pytest.fixture(scope="session")
def make_folder() -> Callable[[Path], Folder]:
    """Puts recipe and plugin into a directory, for fixtures of a larger scope than `folder`."""
    return _make_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    return _make_folder(tmp_path)
