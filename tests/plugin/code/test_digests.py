"""Which code counts for training: what its functions reach, and nothing that cannot change what they compute."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from redco_cli.plugin.code.digests import prediction_code, training_code
from redco_cli.plugin.code.reach import digests_of

PLUGIN = '''
"""A plugin."""
import numpy as np
import helper
from helper import scale as grow
from dataclasses import dataclass

FACTOR, OTHER = 2, 3
NAMES = ["a"]
UNUSED = 1


@dataclass(frozen=True)
class Options:
    """Options."""
    width: int = 4


class Base:
    def depth(self):
        return 1


class Net(Base):
    def __call__(self, x):
        return np.tanh(x) * FACTOR


def build_model(ctx):
    return Net()


def collate_fn(ctx, examples):
    return {"x": [grow(one) for one in examples]}


def loss_fn(ctx, params, batch, rng, train):
    """The loss."""
    return helper.inner.sum_of(batch)  # summed


def predict_fn(ctx, params, batch, rng):
    return shown(batch)


def shown(batch):
    return batch


def output_fn(ctx, outputs):
    return list(outputs)


def metric_fn(ctx, examples, predictions):
    return {"right": NAMES}
'''
HELPER = """
import inner


def scale(x):
    return x * unit()


def unit():
    return 1.0


def plot(x):
    return x
"""
INNER = """
START = 0


def sum_of(batch):
    return sum(batch, START)


def mean_of(batch):
    return 0
"""


class Project:
    """A plugin and its helpers on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.put(plugin=PLUGIN, helper=HELPER, inner=INNER)

    def put(self, **sources: str) -> None:
        for name, text in sources.items():
            path = self.folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def plugin(self, name: str = "plugin.py", **functions: object) -> SimpleNamespace:
        return SimpleNamespace(name=name, file=str(self.folder / "plugin.py"), **{"run_fn": None, **functions})

    def code(self) -> dict[str, str]:
        return training_code(self.plugin())  # type: ignore[arg-type]

    def changed(self, module: str, old: str, new: str) -> list[str]:
        """What counts as changed when one text takes the place of another."""
        before, source = self.code(), (self.folder / f"{module}.py").read_text()
        assert source.count(old) >= 1, old
        self.put(**{module: source.replace(old, new, 1)})
        now = self.code()
        self.put(**{module: source})
        return sorted(name for name in {**before, **now} if before.get(name) != now.get(name))


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("module", "old", "new", "expected"),
    [
        ("plugin", "np.tanh", "np.sin", ["plugin.py: Net"]),
        ("plugin", "FACTOR, OTHER = 2", "FACTOR, OTHER = 4", ["plugin.py: FACTOR"]),
        ("plugin", "return 1\n", "return 2\n", ["plugin.py: Base"]),
        ("plugin", "width: int = 4", "width: int = 5", ["plugin.py: Options"]),
        ("plugin", "frozen=True", "frozen=False", ["plugin.py: Options"]),
        ("plugin", "import numpy as np", "import jax.numpy as np", ["plugin.py: np"]),
        ("plugin", "train):", "train=True):", ["plugin.py: loss_fn"]),
        ("helper", "def unit", "unit = 2\ndef unit", ["helper.py: unit"]),
        ("helper", "x * unit()", "x / unit()", ["helper.py: scale"]),
        ("helper", "1.0", "1", ["helper.py: unit"]),
        ("inner", "START = 0", "START = 1", ["inner.py: START"]),
        ("inner", "START)", "START, START)", ["inner.py: sum_of"]),
        ("plugin", "UNUSED = 1", "print(1)", ["plugin.py: what runs at import"]),
        ("helper", "import inner", "import inner\nprint(1)", ["helper.py: what runs at import"]),
        ("plugin", "UNUSED = 1", "Net.depth = None", ["plugin.py: what runs at import"]),
        ("plugin", "UNUSED = 1", "whole_batch = True", ["plugin.py: whole_batch"]),
    ],
)  # fmt: skip
def test_what_training_reaches_counts(project: Project, module: str, old: str, new: str, expected: list[str]) -> None:
    assert project.changed(module, old, new) == expected


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("plugin", "  # summed", "  # added up"),
        ("plugin", '"""The loss."""', '"""Another\n    text."""'),
        ("plugin", '"""Options."""', ""),
        ("plugin", '"""A plugin."""', "# a plugin"),
        ("plugin", 'return {"x": [grow(one) for one in examples]}', 'return {\n"x": [grow(one) for one in examples],}'),
        ("plugin", "return shown(batch)", "return -shown(batch)"),
        ("plugin", "def shown(batch):\n    return batch", "def shown(batch):\n    return -batch"),
        ("plugin", "list(outputs)", "tuple(outputs)"),
        ("plugin", "NAMES}", "len(NAMES)}"),
        ("plugin", 'NAMES = ["a"]', 'NAMES = ["b"]'),
        ("plugin", "UNUSED = 1", "UNUSED = 2\nfrom typing import TYPE_CHECKING"),
        ("plugin", "UNUSED = 1", "if __name__ == '__main__':\n    print('tried')"),
        ("helper", "def plot(x):\n    return x", "def plot(x):\n    return -x"),
        ("inner", "return 0", "return 1"),
    ],
)  # fmt: skip
def test_what_it_does_not_reach_is_free(project: Project, module: str, old: str, new: str) -> None:
    assert project.changed(module, old, new) == []


def test_what_only_prediction_reaches_counts_for_predictions(project: Project) -> None:
    def code() -> dict[str, str]:
        return prediction_code(project.plugin())  # type: ignore[arg-type]

    before = code()
    project.put(plugin=PLUGIN.replace("return shown(batch)", "return -shown(batch)"))
    assert {name for name, digest in code().items() if before.get(name) != digest} == {"plugin.py: predict_fn"}
    project.put(plugin=PLUGIN.replace("sum_of", "mean_of"))
    assert code() == before


@pytest.mark.parametrize(
    ("loop", "free"),
    [
        ("run.train()", ["predict_fn", "output_fn", "metric_fn"]),
        ("run.train(); run.evaluate()", ["predict_fn", "output_fn", "metric_fn"]),
        ("run.train(roll_out(run))", ["metric_fn"]),
        ("loss = run.evaluate()['loss']", []),
        ("getattr(run, 'predict')()", ["metric_fn"]),
    ],
)
def test_an_outer_loop_that_predicts_trains_on_predictions(project: Project, loop: str, free: list[str]) -> None:
    """As reinforcement learning does."""
    more = f"\n\ndef roll_out(run):\n    return run.predict([])\n\n\ndef run_fn(run):\n    {loop}\n"
    project.put(plugin=PLUGIN + more)
    code = training_code(project.plugin(run_fn=lambda run: None))  # type: ignore[arg-type]
    names = {name.removeprefix("plugin.py: ") for name in code}
    assert [name for name in ("predict_fn", "output_fn", "metric_fn") if name not in names] == free


ENTANGLED = {
    "star": "from inner import *\ndef loss_fn():\n    return mean_of([])",
    "module passed on": "import inner\ndef loss_fn():\n    return vars(inner)",
    "getattr": "import inner\ndef loss_fn():\n    return getattr(inner, 'mean' + '_of')",
    "import in a function": "def loss_fn():\n    from inner import mean_of\n    return mean_of",
    "module in a function": "def loss_fn():\n    import inner as i\n    return i.mean_of",
    "try": "try:\n    import inner\nexcept ImportError:\n    pass\ndef loss_fn():\n    return inner.mean_of",
    "by name": "import importlib\ndef loss_fn():\n    return importlib.import_module('inner')",
    "by any name": "import importlib\ndef loss_fn(ctx):\n    return importlib.import_module(ctx)",
    "reexported": "from helper import inner as deep\ndef loss_fn():\n    return deep.mean_of",
    "assigned": "import inner\nloss_fn = inner.mean_of",
    "lambda": "import inner\nloss_fn = lambda ctx: inner.mean_of",
    "default": "from inner import mean_of\ndef loss_fn(ctx, how=mean_of):\n    return how",
    "decorator": "from inner import mean_of\n@mean_of\ndef loss_fn(ctx):\n    return 1",
    "method": "import inner\nclass Net:\n    def deep(self):\n        return inner.mean_of\ndef loss_fn():\n    Net()",
    "exec": "def loss_fn(ctx):\n    exec(open('inner.py').read())",
    "eval": "from inner import mean_of\ndef loss_fn(ctx):\n    return eval(ctx)",
}


@pytest.mark.parametrize("kind", ENTANGLED)
def test_names_are_followed_however_they_are_found(project: Project, kind: str) -> None:
    project.put(plugin=ENTANGLED[kind])
    assert project.changed("inner", "return 0", "return 1")


def test_functions_that_decorators_register_count() -> None:
    """Nothing names them: they are found in a table."""
    source = """
LOSSES = {}
def register(function):
    LOSSES[function.__name__] = function
    return function
@register
def square(x):
    return x ** 2
def loss_fn(ctx):
    return LOSSES[ctx]
"""
    was = digests_of(source, "loss_fn")
    assert was != digests_of(source.replace("x ** 2", "x ** 3"), "loss_fn")


def test_the_order_in_which_a_generator_is_drawn_from_counts() -> None:
    source = (
        "import numpy as np\nR = np.random.default_rng(0)\nA = R.normal()\nB = R.normal()\ndef loss_fn():\n    return A"
    )
    first = digests_of(source, "loss_fn")
    assert first != digests_of(source.replace("A = R", "C = R").replace("B = R", "A = R"), "loss_fn")
    assert first != digests_of(source.replace("A = R", "A = -R"), "loss_fn")
    plain = "A = 1\nB = 2\ndef loss_fn():\n    return A + B"
    assert digests_of(plain, "loss_fn") == digests_of("B = 2\nA = 1\ndef loss_fn():\n    return A + B", "loss_fn")


def test_a_local_name_is_not_a_name_of_the_module() -> None:
    source = "def scale(x):\n    return x\ndef loss_fn(scale):\n    return [scale for one in scale]"
    assert list(digests_of(source, "loss_fn")) == ["plugin.py: loss_fn"]
    hidden = "def scale(x):\n    return x\ndef loss_fn(x):\n    y = scale(x)\n    return [scale for scale in y]"
    assert list(digests_of(hidden, "loss_fn")) == ["plugin.py: loss_fn", "plugin.py: scale"]


def test_packages_are_followed_and_moving_them_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []
    for place in ("one", "two"):
        folder = tmp_path / place
        sources = {
            "mine/__init__": "SEED = 0",
            "mine/task/__init__": "from .losses import square",
            "mine/task/plugin": "from . import square\nfrom ..tools import pad\ndef loss_fn():\n    return square(pad)",
            "mine/task/losses": "def square(x):\n    return x * x\ndef cube(x):\n    return x",
            "mine/tools": "from mine import SEED\ndef pad(x):\n    return SEED",
        }
        project = Project(folder)
        project.put(**sources)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(folder), *sys.path])
            file = str(folder / "mine/task/plugin.py")
            codes.append(training_code(SimpleNamespace(name="mine.task.plugin", file=file, run_fn=None)))  # type: ignore[arg-type]
    assert codes[0] == codes[1]
    assert set(codes[0]) == {
        *("mine/__init__.py: SEED", "mine/task/__init__.py: square", "mine/task/losses.py: square"),
        *("mine/task/plugin.py: loss_fn", "mine/task/plugin.py: pad", "mine/task/plugin.py: square"),
        *("mine/tools.py: SEED", "mine/tools.py: pad"),
    }


def test_modules_elsewhere_on_the_path_of_python_count(
    project: Project, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For predictions too, whose file must not mix those of two programs."""
    elsewhere = Project(tmp_path_factory.mktemp("elsewhere"))
    elsewhere.put(**{"our_lab/nets": "def named(x):\n    return x"})
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere.folder)])
    project.put(plugin="from our_lab import nets\ndef output_fn(ctx, outputs):\n    return nets.named(outputs)")
    before = prediction_code(project.plugin())  # type: ignore[arg-type]
    assert "our_lab/nets.py: named" in before
    elsewhere.put(**{"our_lab/nets": "def named(x):\n    return -x"})
    assert prediction_code(project.plugin()) != before  # type: ignore[arg-type]


def test_installed_modules_are_not_followed_but_an_installed_plugin_counts(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    project = Project(folder)
    plugin = project.plugin(name="plugin")
    assert {name.partition(":")[0] for name in training_code(plugin)} == {"plugin.py"}  # type: ignore[arg-type]


def test_code_that_cannot_be_read_counts_by_its_bytes(project: Project) -> None:
    project.put(plugin="import helper\ndef loss_fn():\n    return helper.x", helper="def broken(:")
    before = project.code()
    assert "helper.py" in before
    project.put(helper="def broken(::")
    assert project.code() != before
