"""What the plugin guide says is so: its plugins are run, its errors provoked, its options those of the code."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.plugin.calls import OWN_METRICS
from redco_cli.plugin.load import OPTIONAL, REQUIRED, load_plugin
from redco_cli.plugin.parts import builtin
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_plugins
from redco_cli.run import train, validate
from tests.architecture.source import ROOT

GUIDE = (ROOT / "plugins" / "README.md").read_text(encoding="utf-8")
FILES = {
    match["name"]: match["text"]
    for match in re.finditer(
        r"^```(?:python|yaml)\n(?P<text># (?P<name>\w+\.(?:py|yaml))\n.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL
    )
}
"""Every example that begins with the name of its file."""
RECIPES = [name for name in FILES if name.endswith(".yaml")]
DATA = {
    "lines.jsonl": [{"question": "2 + 2 = ", "answer": "4"}, {"question": "2 + 3 = ", "answer": "5"}],
    "pairs.jsonl": [{"source": "three", "target": "3"}] * 2,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The guide's files beside each other, as it says, in the working directory."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name, examples in DATA.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REDCO_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.usefixtures("folder")
class TestExamples:
    def test_every_plugin_has_its_recipe(self):
        plugins = [name.removesuffix(".py") for name in FILES if name.endswith(".py")]
        assert plugins == [name.removesuffix(".yaml") for name in RECIPES]
        assert plugins

    @pytest.mark.parametrize("name", RECIPES)
    def test_a_plugin_is_proved(self, name, folder):
        for data in DATA:  # more than a step has examples
            (folder / data).write_text((folder / data).read_text() * 64)
        document, sequences = validate(name, ["mesh.data=1"])
        assert document["plugin"] == name.replace(".yaml", ".py")
        assert document["warnings"] == []
        if name == "lines.yaml":
            said = sequences[0]
            assert f"{said.title} ({sum(said.carries_loss)} of {len(said.tokens)} tokens carry loss)\n" in GUIDE

    def test_a_whole_run(self):
        outcome = train("circles.yaml", ["train.steps=20", "eval.every=20", "mesh.data=1", "logging.plot=false"])
        ((step, values),) = outcome.evaluations
        assert (step, values.keys()) == (20, {"loss", "accuracy", "recall"})
        assert values["loss"] < 0.65  # a coin's is 0.69

    @pytest.mark.slow
    def test_an_outer_loop(self):
        outcome = train("rounds.yaml", ["mesh.data=1", "logging.plot=false"])
        losses = [values["loss"] for _, values in outcome.evaluations]
        assert outcome.step == 200
        assert losses[-1] < 0.1 < losses[0]
        again = train("rounds.yaml", ["mesh.data=1", "logging.plot=false"])
        assert again.was_finished
        assert again.evaluations == outcome.evaluations

    def test_metrics_of_a_changed_plugin(self):
        loaded = load_recipe("shorter.yaml")
        plugin = load_plugin(loaded.recipe.plugin, loaded.directory, loaded.where)
        context = type("Ctx", (), {"options": plugin.options})
        found = plugin.metric_fn(context, [{"target": "ab"}, {"target": "cd"}], ["ab", "c"])
        assert found == {"exact_match": 0.5, "relative_length": 0.75}

    def test_errors_read_as_the_guide_says(self, folder):
        text = FILES["circles.py"].replace('(logits, batch["inside"])', '(logits, batch["insde"])')
        assert text != FILES["circles.py"]
        (folder / "circles.py").write_text(text, encoding="utf-8")
        for overrides in ([], ["plugin.options.witdh=3"]):
            with pytest.raises(RedcoError) as refused:
                validate("circles.yaml", ["mesh.data=1", *overrides])
            assert f"```\n{refused.value}\n```" in GUIDE

    def test_bad_rows_read_as_the_guide_says(self, folder):
        lines = (folder / "lines.jsonl").read_text()
        (folder / "lines.jsonl").write_text(lines + '{"question": 7, "answer": "7"}\n')
        with pytest.raises(RedcoError) as refused:
            validate("lines.yaml", ["mesh.data=1"])
        assert f"```\n{refused.value}\n```" in GUIDE

    @pytest.mark.slow
    def test_cut_rows_are_told_as_the_guide_says(self, folder, capsys):
        lines = (folder / "lines.jsonl").read_text()
        long = {"question": "2 + " * 20, "answer": "40"}
        (folder / "lines.jsonl").write_text(f"{lines}{json.dumps(long)}\n")
        train("lines.yaml", ["mesh.data=1", "train.steps=2", "logging.plot=false"])
        (told,) = [line for line in capsys.readouterr().err.splitlines() if " rows " in line]
        assert f"```\n{told}\n```" in GUIDE


def test_every_function_is_explained():
    for name, arguments in (REQUIRED | OPTIONAL).items():
        assert f"| `{name}({', '.join(arguments)})` |" in GUIDE


def test_names_of_metrics_that_are_taken():
    (sentence,) = re.findall(r"names are redco's own: (.*?)\.\n", GUIDE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == OWN_METRICS


@pytest.mark.parametrize("name", shipped_plugins())
def test_options_and_defaults_of_built_in_plugins(name):
    """A plugin that builds on another lists only what it adds."""
    options = builtin(name).Options
    plugins = [base for base in options.__mro__[1:-1] if not base.__module__.startswith("redco_cli.")]
    inherited = {field.name for base in plugins for field in dataclasses.fields(base)}
    (room,) = re.findall(rf"^### {name}\n(.*?)(?=^##|\Z)", GUIDE, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| \S", room, re.MULTILINE)
    own = [field for field in dataclasses.fields(options) if field.name not in inherited]
    assert listed == [(field.name, repr(field.default).replace("'", '"')) for field in own]
