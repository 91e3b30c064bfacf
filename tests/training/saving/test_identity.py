"""A run continues with the code and the data that it was trained with, or says what has changed."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from redco_cli.errors import DataError, PluginError, RedcoError
from redco_cli.job import prepare
from redco_cli.recipe.load import RESOLVED_NAME, load_recipe
from redco_cli.run import train, validate
from redco_cli.training.loop import TrainingRun
from redco_cli.training.saving import identity as module
from redco_cli.training.saving.identity import CONTINUATION_NAME, Identity
from redco_cli.training.saving.meta import Meta
from tests.training.tiny import PLUGIN, interrupted, recorded

QUICK = ["eval.predict=false", "eval.at_start=false", "eval.every=12"]
SLOWER = ('seconds", 0.0', 'seconds", 0.0001')
"""An edit that is code all the same."""
FILES = [*QUICK, *(f"data.{split}={{path: json, data_files: {split}.jsonl}}" for split in ("train", "eval"))]
AS_FLOAT = ("np.asarray(e[name])", 'np.asarray(e[name], np.float32 if name == "x" else np.int32)')
REMEDY = (
    "\n  -> restore it, or choose another output_dir for a new run; or, to go on with it nevertheless, "
    "add checkpoint.accept={} to the command"
)
LOOP = """

def run_fn(run):
    while run.step < 12:
        run.train(steps=3)
        run.save()
        if run.step == 6:
            raise ValueError("six")
"""


def put(plugin: str) -> None:
    Path("plugin.py").write_text(plugin)


def refused(*overrides: str) -> str:
    """Why a run is refused; by `validate`, which says what training would."""
    with pytest.raises(RedcoError) as error:
        validate("recipe.yaml", overrides)
    return str(error.value)


def meta(step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"run/checkpoint-{step}/meta/metadata").read_text())
    return found


def killed(step: int, *overrides: str) -> None:
    """Trains until it is killed before it can save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "_is_milestone", lambda _, at: 1 // (at != step) > 1)
        with pytest.raises(ZeroDivisionError):
            train("recipe.yaml", overrides)


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_an_edited_plugin_is_refused_until_that_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """Once: and what was accepted is in checkpoints and records, and in no recipe."""
    interrupted(4, *QUICK)
    for old, new in (
        ("import time", "import time  # to wait"),
        ("def predict_fn(ctx", '"""Unused."""\n\n\ndef predict_fn( ctx'),
        ("argmax(-1)", "argmin(-1)"),
        ('{{"exact"'.replace("{{", "{"), '{"exactly"'),
    ):
        assert old in PLUGIN
        put(PLUGIN.replace(old, new))
        validate("recipe.yaml", QUICK)
    put(PLUGIN.replace("nn.tanh", "nn.relu"))
    said = "recipe.yaml:2: plugin.module: checkpoint-4 was trained with other code: plugin.py: Net differs"
    assert refused(*QUICK) == said + REMEDY.format("plugin")
    assert refused("checkpoint.accept=data", *QUICK) == said + REMEDY.format("plugin")
    other, changes = PLUGIN.replace(*SLOWER), ["plugin.py: collate_fn differs"]
    put(other)
    capsys.readouterr()
    killed(5, "checkpoint.accept=plugin", *QUICK)
    by = "checkpoint-4 goes on with other code, by checkpoint.accept=plugin: plugin.py: collate_fn differs"
    assert f"warning: {by}\n" in capsys.readouterr().err
    interrupted(7, *QUICK)  # what was killed had saved nothing
    assert "checkpoint-4 goes on with other code, as accepted before: " in capsys.readouterr().err
    (accepted,) = meta(7)["accepted"]
    assert (accepted["step"], accepted["what"], accepted["changed"]) == (4, "plugin", changes)
    (record,) = [row for row in recorded("run") if row["kind"] == "run"]
    assert (record["step"], record["accepted"], record["changed"]) == (4, "plugin", changes)
    assert "accept" not in Path("run", RESOLVED_NAME).read_text()
    assert "accept" not in meta(7)["recipe"]["checkpoint"]
    validate("recipe.yaml", [*QUICK, "checkpoint.accept=[plugin,data]"])
    assert "accept=plugin: there is nothing to accept, the code is that of checkpoint-7" in capsys.readouterr().err
    put(PLUGIN)
    assert "checkpoint-7 was trained with other code: plugin.py: collate_fn differs" in refused(*QUICK)


@pytest.mark.slow
def test_changed_data_is_refused_until_that_is_accepted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Eval data only once it has ranked a checkpoint."""
    put(PLUGIN.replace(*AS_FLOAT))
    lines = [json.dumps({"x": [i % 7 / 7, *[0.5] * 7], "y": i % 3, "id": i}) + "\n" for i in range(203)]
    rows, evaluated = project / "train.jsonl", project / "eval.jsonl"
    rows.write_text("".join(lines))
    evaluated.write_text("".join(lines[:9]))
    interrupted(4, *FILES)
    evaluated.write_text("".join(lines[:8]))
    validate("recipe.yaml", FILES)
    said = "data.train: checkpoint-{} was trained with other data: data.train: train.jsonl differs"
    for changed in (lines[:150], lines[::-1], [*lines, lines[0]]):
        rows.write_text("".join(changed))
        assert refused(*FILES) == f"command line: {said.format(4)}{REMEDY.format('data')}"
    put(PLUGIN.replace(*AS_FLOAT).replace("nn.tanh", "nn.relu"))
    both = refused(*FILES)
    assert "other code: plugin.py: Net differs" in both
    assert said.format(4) in both
    validate("recipe.yaml", [*FILES, "checkpoint.accept=[plugin,data]"])
    put(PLUGIN.replace(*AS_FLOAT))
    train("recipe.yaml", [*FILES, "checkpoint.accept=data"])
    changes = ["data.train: train.jsonl differs"]
    assert [(one["what"], one["changed"]) for one in meta(12)["accepted"]] == [("data", changes)]
    assert not Path("run", CONTINUATION_NAME).exists()
    rows.write_text("".join(lines))
    assert said.format(12) in refused(*FILES)
    rows.write_text("".join(changed))
    evaluated.write_text("".join(lines[:9]))
    assert "other data: data.eval: eval.jsonl differs" in refused(*FILES)
    capsys.readouterr()
    validate("recipe.yaml", [*FILES, "checkpoint.accept=data"])
    assert "checkpoint-12 goes on with other data, by checkpoint.accept=data: data.eval" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_a_run_that_ended_by_an_error_goes_on_with_the_repair(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no checkpoint could be saved of where it ended, as in an outer loop; and once only."""
    put(PLUGIN + LOOP)
    with pytest.raises(RedcoError, match="run_fn raised ValueError"):
        train("recipe.yaml", QUICK)
    put(PLUGIN + LOOP.replace("raise ValueError", "print"))
    why = "as the run had ended by an error of its plugin"
    capsys.readouterr()
    validate("recipe.yaml", QUICK)
    assert f"checkpoint-6 goes on with other code, {why}: plugin.py: run_fn differs" in capsys.readouterr().err
    train("recipe.yaml", QUICK)
    assert [one["why"] for one in meta(12)["accepted"]] == [why]
    put(PLUGIN + LOOP)
    assert "checkpoint-12 was trained with other code: plugin.py: run_fn differs" in refused(*QUICK)


@pytest.mark.parametrize(
    ("error", "makes_data", "permits"),
    [
        (PluginError("p", "x"), True, ["plugin", "data"]),
        (DataError("p", "x"), True, ["plugin", "data"]),
        (DataError("p", "x"), False, ["data"]),
        (RedcoError("p", "x"), True, None),
    ],
)
def test_what_may_repair_an_error(
    tmp_path: Path, error: RedcoError, makes_data: bool, permits: list[str] | None
) -> None:
    class Data:
        train = None if makes_data else "a source"

    job = type("Job", (), {"recipe": type("Recipe", (), {"data": Data, "output_dir": str(tmp_path)})})
    with pytest.raises(RedcoError), module.remembering(Identity(job()), module.Continued(), lambda: 7, lambda: None):  # type: ignore[arg-type]
        raise error
    found = module._read(tmp_path)["failed"]
    assert (found["permits"], found["step"]) == ((permits, 7) if permits else ([], -1))
    for torn in ("", "[]", "{", '{"failed": 1}', '{"failed": {"step": "x", "permits": [], "whose": ""}}'):
        (tmp_path / CONTINUATION_NAME).write_text(torn)
        assert module._read(tmp_path)["failed"]["permits"] == []


@pytest.mark.usefixtures("project")
def test_a_checkpoint_of_an_earlier_version_continues(capsys: pytest.CaptureFixture[str]) -> None:
    loaded, earlier = load_recipe("recipe.yaml"), Meta(4, None, None, False, {})
    identity: Any = None  # it is not asked
    assert module.compared(loaded, identity, Path("run/checkpoint-4"), earlier, ranked=True) == module.Continued()
    said = "checkpoint-4 does not say with which code and data it was trained: nothing is compared"
    assert capsys.readouterr().err == f"{said}\n"


@pytest.mark.usefixtures("project")
def test_consent_is_given_on_the_command_line_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path("recipe.yaml").read_text()
    Path("written.yaml").write_text(recipe.replace("keep: 3", "keep: 3, accept: [plugin]"))
    with pytest.raises(RedcoError, match=r"written.yaml:5: checkpoint.accept: is consent to one change, and what"):
        load_recipe("written.yaml")
    monkeypatch.setenv("REDCO_CHECKPOINT__ACCEPT", "plugin")
    with pytest.raises(RedcoError, match=r"environment REDCO_CHECKPOINT__ACCEPT: checkpoint.accept: is consent"):
        load_recipe("recipe.yaml")
    monkeypatch.delenv("REDCO_CHECKPOINT__ACCEPT")
    with pytest.raises(RedcoError, match=r"checkpoint.accept"):
        load_recipe("recipe.yaml", ["checkpoint.accept=code"])
    assert load_recipe("recipe.yaml", ["checkpoint={accept: data}"]).recipe.checkpoint.accept == ("data",)
    validate("recipe.yaml", ["checkpoint.accept=plugin", *QUICK])
    assert "checkpoint.accept=plugin: there is nothing to accept, the run begins" in capsys.readouterr().err


@pytest.mark.usefixtures("project")
def test_processes_with_other_files_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipe("recipe.yaml", QUICK)
    now = Identity(prepare(loaded, stages=("train", "eval"))).now()

    def gathered(name: str, value: Any) -> list[Any]:
        return [value, {**value, "plugin.py: Net": "0"} if name == "plugin code" else None]

    monkeypatch.setattr(module, "process_allgather", gathered)
    with pytest.raises(RedcoError, match=r"plugin.py: process 1 has another plugin than process 0: plugin.py: Net"):
        Identity(prepare(loaded, stages=("train", "eval"))).now()
    monkeypatch.setattr(module, "process_allgather", lambda _, value: [now["data"] if value is None else value, value])
    monkeypatch.setattr(module, "is_main_process", lambda: False)
    monkeypatch.setattr(Identity, "_data", lambda _: pytest.fail("only the first process reads"))
    assert Identity(prepare(loaded, stages=("train", "eval"))).now() == now


@pytest.mark.slow
@pytest.mark.usefixtures("project")
def test_no_edit_of_what_trains_goes_unseen() -> None:
    """Edits drawn at random, all of which change the program: each is refused, and undone, the run continues."""
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed: {seed}")
    dice = random.Random(seed)
    trains = PLUGIN.partition("def predict_fn")[0]
    interrupted(4, *QUICK)
    places = list(re.finditer(r"\b\d+\b(?![^\n]*f\")", trains))
    for _ in range(20):
        match = dice.choice(places)
        put(f"{PLUGIN[: match.start()]}{int(match[0]) + dice.randint(1, 8)}{PLUGIN[match.end() :]}")
        with pytest.raises(RedcoError) as error:
            validate("recipe.yaml", QUICK)
        print(match, error.value)
        put(PLUGIN)
        validate("recipe.yaml", QUICK)
