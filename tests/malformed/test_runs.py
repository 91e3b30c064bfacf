"""What is left of a run, damaged or changed, and predictions from it: nothing that was good is touched."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from redco_cli.recipe.shipped import shipped_recipes

TRAIN = ("train", "recipe.yaml", "output_dir=it")
PREDICT = ("predict", "it")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_folder):
    """A folder with a finished run, `run`, of two checkpoints. Tests get copies of the run: `it`."""
    folder = make_folder(tmp_path_factory.mktemp("trained"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder.root)
        folder.done("train", "recipe.yaml")
    return folder


@pytest.fixture
def copied(trained, monkeypatch: pytest.MonkeyPatch):
    """The folder, with a run `it` that a test may damage."""
    monkeypatch.chdir(trained.root)
    shutil.copytree("run", "it")
    yield trained
    shutil.rmtree("it")
    for path in trained.root.iterdir():
        if path.name not in ("run", "plugin.py", "recipe.yaml"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    trained.plugin()


def cut_off(pattern: str, checkpoint: str = "checkpoint-4") -> Callable[[], None]:
    """Empties those files of the newest checkpoint whose path has the pattern."""

    def damage() -> None:
        files = [path for path in Path("it", checkpoint).rglob("*") if path.is_file() and re.search(pattern, str(path))]
        assert files
        for path in files:
            path.write_bytes(b"")

    return damage


def holding(name: str, content: str) -> Callable[[], None]:
    """Writes a file."""
    return lambda: Path(name).write_text(content) and None


def emptied() -> None:
    """Takes all files out of the newest checkpoint."""
    shutil.rmtree("it/checkpoint-4")
    Path("it/checkpoint-4").mkdir()


@dataclass(frozen=True)
class Case:
    """A command, what went wrong before it, and the whole error."""

    error: str
    command: Sequence[str]
    before: Callable[[], object] = lambda: None
    code: int = 1


CASES = {
    "train: the newest damaged, and asked for": Case(
        (
            "it/checkpoint-4: is damaged: meta/metadata has 0 bytes of SIZE\n"
            "  -> choose another, such as it/checkpoint-2"
        ),
        (*TRAIN, "checkpoint.resume=it/checkpoint-4"),
        cut_off("meta/metadata"),
    ),
    "predict: the newest damaged, and asked for": Case(
        ("it/checkpoint-4: is damaged: manifest.json is missing\n  -> choose another, such as it/checkpoint-2"),
        (*PREDICT, "--checkpoint", "it/checkpoint-4"),
        emptied,
    ),
    "train: all damaged": Case(
        (
            "it: no checkpoint is whole: it/checkpoint-4 is damaged: manifest.json is missing; "
            "it/checkpoint-2 is damaged: manifest.json is no manifest\n"
            "  -> restore one from a copy, or move all of them away to start anew"
        ),
        TRAIN,
        lambda: (emptied(), cut_off("manifest.json", "checkpoint-2")()),
    ),
    "train: metrics of another program": Case(
        ("FOLDER/it/metrics.jsonl:1: is no record of redco\n  -> delete the line, or move the file away"),
        TRAIN,
        holding("it/metrics.jsonl", "step,loss\n"),
    ),
    "predict: the recipe of the run broken": Case(
        (
            "it/recipe.resolved.yaml:1: not valid YAML: while parsing a flow node expected the node "
            "content, but found '<stream end>'\n"
            "  -> check the indentation and quotes near that line"
        ),
        PREDICT,
        holding("it/recipe.resolved.yaml", "a: ["),
    ),
    "predict: the plugin gone": Case(
        (
            "it/recipe.resolved.yaml:2: plugin.module: no such plugin file: looked for it/gone.py and "
            "gone.py\n"
            "  -> correct the path"
        ),
        PREDICT,
        holding("it/recipe.resolved.yaml", "output_dir: it\nplugin: {module: gone.py}\n"),
    ),
    "predict: no run": Case(
        (".: is no run: it has no recipe.resolved.yaml\n  -> name an output directory or a recipe"),
        ("predict", "."),
        code=2,
    ),
    "predict: nothing of that name": Case(
        (f"runs/it: no such recipe, neither a file nor shipped with redco\n  -> known: {', '.join(shipped_recipes())}"),
        ("predict", "runs/it"),
        code=2,
    ),
    "predict: never trained": Case(
        ("new: holds no checkpoint\n  -> train first: redco train"), ("predict", "recipe.yaml", "output_dir=new")
    ),
    "predict: a checkpoint that there is not": Case(
        (
            "--checkpoint: it/checkpoint-9 is no checkpoint\n"
            "  -> give last, best, or a directory such as runs/x/checkpoint-100"
        ),
        (*PREDICT, "--checkpoint", "it/checkpoint-9"),
    ),
    "predict: an unknown word for a checkpoint": Case(
        ("--checkpoint: newest is no checkpoint\n  -> give last, best, or a directory such as runs/x/checkpoint-100"),
        (*PREDICT, "--checkpoint", "newest"),
    ),
    "predict: no input": Case(
        ("in.jsonl: cannot be read: No such file or directory\n  -> check the path"), (*PREDICT, "--input", "in.jsonl")
    ),
    "predict: a folder as input": Case(
        ("it: cannot be read: Is a directory\n  -> check the path"), (*PREDICT, "--input", "it")
    ),
    "predict: an empty input": Case(
        ('in.jsonl: holds no examples\n  -> write one JSON object per line, such as {"text": "..."}, in UTF-8'),
        (*PREDICT, "--input", "in.jsonl"),
        holding("in.jsonl", "\n"),
    ),
    "predict: an input with a bad line": Case(
        (
            "in.jsonl:2: not JSON: Expecting value at column 10\n"
            '  -> write one JSON object per line, such as {"text": "..."}, in UTF-8'
        ),
        (*PREDICT, "--input", "in.jsonl"),
        holding("in.jsonl", '{"x": [1, 2], "y": 0}\n{"x": [1,\n'),
    ),
    "predict: an input without a column": Case(
        (
            'plugin.py:23: collate_fn: collate_fn raised KeyError at `x = np.array([e["x"] for e in '
            "examples], np.float32)`: 'x'\n"
            "  on 1 examples, the first with keys text\n"
            '  -> add it to the examples; or, where only a loss needs it, read it only where ctx.stage != "predict"'
        ),
        (*PREDICT, "--input", "in.jsonl"),
        holding("in.jsonl", '{"text": "a"}\n'),
    ),
    "predict: the output is the input": Case(
        ("in.jsonl: is the input as well\n  -> choose another file: --output FILE"),
        (*PREDICT, "--input", "in.jsonl", "--output", "in.jsonl"),
        holding("in.jsonl", '{"x": [1, 2], "y": 0}\n'),
        2,
    ),
    "predict: the output is something else": Case(
        ("plugin.py: is there already, and holds no predictions\n  -> choose another file: --output FILE"),
        (*PREDICT, "--output", "plugin.py"),
        code=2,
    ),
    "predict: the output is a folder": Case(
        ("it: is a directory, but predictions go to a file\n  -> choose another file: --output FILE"),
        (*PREDICT, "--output", "it"),
        code=2,
    ),
    "predict: the output is below a file": Case(
        (
            "plugin.py/out.jsonl: plugin.py cannot be made: plugin.py is no directory\n"
            "  -> choose another file: --output FILE"
        ),
        (*PREDICT, "--output", "plugin.py/out.jsonl"),
    ),
    "predict: the output cannot be made": Case(
        (
            "/proc/out.jsonl: cannot be written: No such file or directory\n"
            "  -> free space or correct the permissions, then run the same command again: it continues"
        ),
        (*PREDICT, "--output", "/proc/out.jsonl"),
    ),
    "train: another optimizer": Case(
        (
            "command line: train.optimizer: 'lion', but checkpoint-4 was trained with 'sgd'\n"
            "  -> restore the value, or choose another output_dir for a new run"
        ),
        (*TRAIN, "train.optimizer=lion"),
    ),
    "train: never resume": Case(
        (
            "command line: checkpoint.resume: never, but it/checkpoint-4 exists\n"
            "  -> set checkpoint.resume: auto to continue it, or choose another output_dir"
        ),
        (*TRAIN, "checkpoint.resume=never"),
    ),
    "train: resume an older checkpoint": Case(
        (
            "command line: checkpoint.resume: it/checkpoint-2 is older than it/checkpoint-4\n"
            "  -> choose another output_dir, or move the newer ones away"
        ),
        (*TRAIN, "checkpoint.resume=it/checkpoint-2"),
    ),
    "train: resume from nowhere": Case(
        (
            "command line: checkpoint.resume: it/checkpoint-9 is no checkpoint\n"
            "  -> give auto, never, or a directory such as runs/x/checkpoint-100"
        ),
        ("train", "recipe.yaml", "output_dir=new", "checkpoint.resume=it/checkpoint-9"),
    ),
    "train: into a file": Case(
        (
            "command line: output_dir: plugin.py cannot be made: plugin.py is no directory\n"
            "  -> choose another output_dir, or correct its permissions"
        ),
        ("train", "recipe.yaml", "output_dir=plugin.py"),
    ),
    "train: where nothing can be made": Case(
        (
            "command line: output_dir: /proc/run cannot be written: No such file or directory\n"
            "  -> choose another output_dir, or correct its permissions"
        ),
        ("train", "recipe.yaml", "output_dir=/proc/run"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_is_refused(copied, name: str) -> None:
    case = CASES[name]
    case.before()
    assert re.sub(r"of \d+\n", "of SIZE\n", copied.refused(*case.command, code=case.code)) == case.error


DAMAGES = {
    "tree of arrays cut off": (cut_off("_METADATA"), r"params/_METADATA has 0 bytes of \d+"),
    "everything cut off": (cut_off("."), "manifest.json is no manifest"),
    "empty": (emptied, "manifest.json is missing"),
    "arrays cut off": (cut_off("params.*/d/"), r"params/(\S+/)?d/\w+ has 0 bytes of \d+"),
    "list of arrays cut off": (cut_off("params.*manifest"), r"params/\S*manifest\S* has 0 bytes of \d+"),
    "other bytes": (holding("it/checkpoint-4/params/_sharding", "{}"), r"params/_sharding has 2 bytes of \d+"),
}


@pytest.mark.parametrize("command", [TRAIN, PREDICT], ids=["train", "predict"])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_skipped(copied, command: Sequence[str], name: str) -> None:
    spoil, problem = DAMAGES[name]
    spoil()
    taken = r"; checkpoint-2 is taken instead\n.*(continuing from|with the parameters of) it/checkpoint-2\n"
    assert re.match(rf"warning: it/checkpoint-4 is damaged: {problem}{taken}", copied.done(*command)[1])


DESCRIPTIONS = [
    ("checkpoint-4", cut_off("meta/metadata"), "checkpoint-2 is taken instead\ncontinuing from it/checkpoint-2\n"),
    (
        "checkpoint-4",
        holding("it/checkpoint-4/meta/metadata", '{"a": 1}'),
        "checkpoint-2 is taken instead\ncontinuing from it/checkpoint-2\n",
    ),
    (
        "checkpoint-2",
        cut_off("meta/metadata", "checkpoint-2"),
        "it is ignored\nit is finished: all 4 steps were done before; nothing is trained\n",
    ),
]


@pytest.mark.parametrize(("checkpoint", "spoil", "then"), DESCRIPTIONS, ids=["newest", "another", "older"])
def test_a_checkpoint_that_cannot_say_what_it_is_does_not_count(copied, checkpoint, spoil, then) -> None:
    spoil()
    problem = rf"warning: it/{checkpoint} is damaged: meta/metadata has \d bytes of \d+; {then}"
    assert re.match(problem, copied.done(*TRAIN)[1])


@pytest.mark.slow
def test_a_damaged_checkpoint_makes_no_library_speak(copied) -> None:
    cut_off("params/")()
    cut_off("params/", "checkpoint-2")()
    process = copied.start(*PREDICT)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, out) == (1, "")
    assert re.fullmatch(
        r"it: no checkpoint is whole: it/checkpoint-4 is damaged: \S+ has 0 bytes of \d+; "
        r"it/checkpoint-2 is damaged: \S+ has 0 bytes of \d+\n"
        r"  -> restore one from a copy, or move all of them away to start anew\n",
        err,
    )


OTHER = "\n  -> restore the recipe and the plugin that wrote it, or choose another checkpoint or output_dir"


@pytest.mark.parametrize(
    ("old", "new", "command", "difference"),
    [
        (
            "Dense(3)",
            "Dense(4)",
            PREDICT,
            "params Dense_0/bias is [3], not [4], params Dense_0/kernel is [2, 3], not [2, 4]",
        ),
        (
            "Dense(3)",
            "Dense(3, name='out')",
            TRAIN,
            "params out/bias is missing, params out/kernel is missing, params Dense_0/bias is not used, and 5 more",
        ),
        (
            "def metric_fn",
            "def optimizer_fn(ctx, schedule):\n    return optax.adam(schedule)\n\n\ndef metric_fn",
            TRAIN,
            "training opt_state/0/count is missing, training opt_state/0/mu/Dense_0/bias is missing, "
            "training opt_state/0/mu/Dense_0/kernel is missing, and 6 more",
        ),
    ],
    ids=["another width", "another name", "another optimizer"],
)
def test_a_good_checkpoint_of_another_plugin_is_not_called_damaged(copied, old, new, command, difference) -> None:
    copied.plugin((old, new))
    newest = 4
    if command == TRAIN:  # from the one before: a finished run is not continued
        shutil.rmtree(copied.root / "it/checkpoint-4")
        newest = 2
    consent = ["checkpoint.accept=plugin"] if command == TRAIN else []
    error = f"it/checkpoint-{newest}: is of another model or optimizer: {difference}{OTHER}"
    assert copied.refused(*command, *consent) == error
