import sys
from dataclasses import FrozenInstanceError
from types import MappingProxyType

import pytest

from redco_cli.plugin.load import OPTIONAL, REQUIRED
from redco_cli.recipe.shipped import shipped_plugins

FUNCTIONS = """\
def collate_fn(ctx, examples): return {}
def loss_fn(ctx, params, batch, rng, train): return 0.0
def predict_fn(ctx, params, batch, rng): return 0
"""
OPTIONS = """\
from dataclasses import dataclass, field
@dataclass(frozen=True)
class Inner:
    size: int
@dataclass(frozen=True)
class Options:
    count: int
    name: str = "x"
    sizes: tuple[int, ...] = ()
    rate: float = 1.0
    inner: Inner | None = None
    def __post_init__(self):
        if self.count < 0: raise ValueError("count must not be negative")
        if self.count == 13: raise KeyError("unlucky")
"""
BUILT_IN = ", ".join(shipped_plugins())
FIX = "\n  -> fix the plugin; `redco --traceback ...` shows the whole traceback"
IMPORTING = "importing the plugin raised"


def test_a_batch_is_whole_only_where_a_plugin_says_so(load, refusal):
    assert load(FUNCTIONS).whole_batch is False
    assert load(f"{FUNCTIONS}whole_batch = True\n").whole_batch is True
    assert refusal(f"{FUNCTIONS}whole_batch = 'yes'\n") == (
        "p.py: whole_batch is 'yes', neither True nor False\n"
        "  -> say whole_batch = True where loss_fn needs the batch as a whole"
    )


class TestFinding:
    @pytest.mark.parametrize("name", shipped_plugins())
    def test_every_built_in_plugin_keeps_the_contract(self, load, name):
        plugin = load(None, name)
        assert plugin.name == name
        assert plugin.file == str(shipped_plugins()[name])
        assert all(callable(getattr(plugin, function)) for function in REQUIRED)

    def test_beside_the_recipe_before_the_working_directory(self, load, folder):
        (folder / "recipes").mkdir()
        (folder / "recipes" / "p.py").write_text(FUNCTIONS.replace("0.0", "1.0"))
        plugin = load(FUNCTIONS)
        assert plugin.file == "recipes/p.py"
        assert plugin.loss_fn(None, {}, {}, None, True) == 1.0
        (folder / "recipes" / "p.py").unlink()
        assert load(FUNCTIONS).file == "p.py"

    def test_by_absolute_path(self, load, folder):
        assert load(FUNCTIONS, f"{folder}/p.py").file == "p.py"

    def test_by_dotted_name(self, load, folder, monkeypatch):
        (folder / "pkg_found").mkdir()
        (folder / "pkg_found" / "inside.py").write_text(FUNCTIONS)
        plugin = load(None, "pkg_found.inside")
        assert plugin.file == "pkg_found/inside.py"
        assert plugin.loss_fn is sys.modules["pkg_found.inside"].loss_fn

    def test_optional_functions_are_none_without(self, load):
        plugin = load(f"{FUNCTIONS}def metric_fn(ctx, examples, predictions): return {{}}\noutput_fn = None\n")
        assert plugin.metric_fn is not None
        assert [name for name in OPTIONAL if getattr(plugin, name) is not None] == ["metric_fn"]

    @pytest.mark.parametrize(
        ("module", "message"),
        [
            ("no.py", "no such plugin file: looked for {folder}/recipes/no.py and no.py\n  -> correct the path"),
            ("/no/p.py", "no such plugin file: looked for /no/p.py\n  -> correct the path"),
            (
                f"{'x' * 300}.py",
                f"no such plugin file: looked for {{folder}}/recipes/{'x' * 300}.py and {'x' * 300}.py\n"
                "  -> correct the path",
            ),
            ("causal_ml", "causal_ml is neither a built-in plugin nor a module\n  -> did you mean causal_lm?"),
            ("no.such.thing", f"no.such.thing is neither a built-in plugin nor a module\n  -> known: {BUILT_IN}"),
            ("json.nothing", f"json.nothing is neither a built-in plugin nor a module\n  -> known: {BUILT_IN}"),
            ("..up", f"..up is neither a built-in plugin nor a module\n  -> known: {BUILT_IN}"),
            ("", f" is neither a built-in plugin nor a module\n  -> known: {BUILT_IN}"),
        ],
    )
    def test_what_is_not_there(self, refusal, folder, module, message):
        assert refusal(None, module) == f"r.yaml:1: plugin.module: {message.format(folder=folder)}"


class TestImporting:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("x = 1\ndef f(:\n", f"p.py:2: {IMPORTING} SyntaxError: invalid syntax (p.py, line 2)"),
            ("x = 1\n  y = 2\n", f"p.py:2: {IMPORTING} IndentationError: unexpected indent (p.py, line 2)"),
            (
                b"x = 1\ny = '\xff'\n",
                f"p.py:2: {IMPORTING} SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xff in position 0: "
                "invalid start byte (p.py, line 2)",
            ),
            (
                "x = 1\nimport no_such_module\n",
                f"p.py:2: <module>: {IMPORTING} ModuleNotFoundError at `import no_such_module`: "
                "No module named 'no_such_module'",
            ),
            (
                "import json\ndef f():\n    json.loads('{')\nf()\n",
                f"p.py:3: f: {IMPORTING} JSONDecodeError at `json.loads('{{')`: "
                "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            ),
            ("raise RuntimeError\n", f"p.py:1: <module>: {IMPORTING} RuntimeError at `raise RuntimeError`"),
            ("import sys\nsys.exit(0)\n", f"p.py:2: <module>: {IMPORTING} SystemExit at `sys.exit(0)`: 0"),
        ],
    )
    def test_the_place_is_in_the_plugin(self, refusal, text, message):
        assert refusal(text) == message + FIX

    def test_a_syntax_error_in_what_the_plugin_imports(self, refusal, folder):
        (folder / "helper_with_typo.py").write_text("\n\ndef f(:\n")
        assert refusal("x = 1\nimport helper_with_typo\n") == (
            f"p.py:2: <module>: {IMPORTING} SyntaxError at `import helper_with_typo`: "
            f"invalid syntax (helper_with_typo.py, line 3){FIX}"
        )

    def test_a_file_of_a_similar_name_is_not_the_plugin(self, refusal, folder):
        (folder / "help.py").write_text("def f():\n    raise ValueError('inside')\n")
        assert refusal("import sys\nsys.modules.pop('help', None)\nimport help\nhelp.f()\n").startswith(
            "p.py:4: <module>: "
        )

    def test_packages(self, refusal, folder):
        (folder / "pkg_broken").mkdir()
        (folder / "pkg_broken" / "__init__.py").write_text("raise RuntimeError('broken')\n")
        (folder / "pkg_whole").mkdir()
        (folder / "pkg_whole" / "p.py").write_text("\nimport no_such_module\n")
        assert refusal(None, "pkg_broken.p") == (
            f"pkg_broken/__init__.py:1: <module>: {IMPORTING} RuntimeError at `raise RuntimeError('broken')`: "
            f"broken{FIX}"
        )
        assert refusal(None, "pkg_whole.p") == (
            f"pkg_whole/p.py:2: <module>: {IMPORTING} ModuleNotFoundError at `import no_such_module`: "
            f"No module named 'no_such_module'{FIX}"
        )

    def test_ctrl_c_passes(self, load):
        with pytest.raises(KeyboardInterrupt):
            load("raise KeyboardInterrupt\n")


class TestFunctions:
    def test_all_that_lack_are_named(self, refusal):
        assert refusal("def colate_fn(ctx, examples): pass\n") == (
            "p.py: has no collate_fn; the plugin has colate_fn\n  -> define collate_fn(ctx, examples)\n"
            "p.py: has no loss_fn; the plugin has colate_fn\n  -> define loss_fn(ctx, params, batch, rng, train)\n"
            "p.py: has no predict_fn; the plugin has colate_fn\n  -> define predict_fn(ctx, params, batch, rng)"
        )

    def test_a_module_that_is_no_plugin(self, refusal):
        assert refusal(None, "sys").startswith("sys: has no collate_fn\n  -> define collate_fn(ctx, examples)\n")

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                "rng, train)",
                "rng)",
                "p.py:2: loss_fn: takes (ctx, params, batch, rng), "
                "but is called with (ctx, params, batch, rng, train)\n"
                "  -> write loss_fn(ctx, params, batch, rng, train)",
            ),
            (
                "rng, train)",
                "*, rng, train)",
                "p.py:2: loss_fn: takes (ctx, params, batch, *, rng, train), "
                "but is called with (ctx, params, batch, rng, train)\n"
                "  -> write loss_fn(ctx, params, batch, rng, train)",
            ),
            (
                "ctx, params, batch, rng)",
                "params, ctx, batch, rng)",
                "p.py:3: predict_fn: takes (params, ctx, batch, rng), but is called with (ctx, params, batch, rng)\n"
                "  -> write predict_fn(ctx, params, batch, rng)",
            ),
            (
                "def collate_fn(ctx, examples): return {}",
                "collate_fn = lambda examples: {}",
                "p.py:1: collate_fn: takes (examples), but is called with (ctx, examples)\n"
                "  -> write collate_fn(ctx, examples)",
            ),
            (
                "return 0\n",
                "return 0\nmetric_fn = 3\n",
                "p.py: metric_fn: is int, not a function\n  -> write metric_fn(ctx, examples, predictions)",
            ),
        ],
    )
    def test_wrong_signatures(self, refusal, old, new, message):
        assert refusal(FUNCTIONS.replace(old, new)) == message

    @pytest.mark.parametrize(
        "new", ["(c, p, b, r, t)", "(*everything)", "(ctx, params, batch, rng, train, more=3)", "(ctx, *rest, **named)"]
    )
    def test_names_are_free(self, load, new):
        load(FUNCTIONS.replace("(ctx, params, batch, rng, train)", new))

    def test_a_function_that_tells_no_signature_is_taken_at_its_word(self, load):
        assert load(f"{FUNCTIONS}metric_fn = max\n").metric_fn is max


class TestOptions:
    def test_without_a_dataclass_they_are_a_frozen_mapping(self, load):
        options = load(FUNCTIONS, a=1).options
        assert options == {"a": 1}
        assert isinstance(options, MappingProxyType)

    def test_with_a_dataclass_they_are_typed(self, load):
        options = load(FUNCTIONS + OPTIONS, count=3, sizes=[1, 2], rate=2, inner={"size": 4}).options
        assert (options.count, options.name, options.sizes, options.rate, options.inner.size) == (
            3,
            "x",
            (1, 2),
            2.0,
            4,
        )
        with pytest.raises(FrozenInstanceError):
            options.count = 4
        assert type(options) is sys.modules["redco_plugin_p"].Options

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "plugin.options.count: the plugin needs this option\n  -> add it; see Options in p.py"),
            (
                {"count": 1, "nmae": "y"},
                "plugin.options.nmae: the plugin has no such option\n  -> did you mean name?",
            ),
            (
                {"count": 1, "zzz": "y"},
                "plugin.options.zzz: the plugin has no such option\n  -> known: count, name, sizes, rate, inner",
            ),
            (
                {"count": "1"},
                "plugin.options.count: '1' given: Input should be a valid integer\n  -> see Options in p.py",
            ),
            (
                {"count": True},
                "plugin.options.count: True given: Input should be a valid integer\n  -> see Options in p.py",
            ),
            (
                {"count": 1, "sizes": [1, "x"]},
                "plugin.options.sizes.1: 'x' given: Input should be a valid integer\n  -> see Options in p.py",
            ),
            (
                {"count": 1, "inner": {"size": 1, "extra": 2}},
                "plugin.options.inner.extra: the plugin has no such option\n  -> see Options in p.py",
            ),
            ({"count": -1}, "plugin.options: count must not be negative\n  -> see Options in p.py"),
        ],
    )
    def test_refusals(self, refusal, options, message):
        assert refusal(FUNCTIONS + OPTIONS, **options) == f"r.yaml:1: {message}"

    def test_all_mistakes_are_reported_at_once(self, refusal):
        assert refusal(FUNCTIONS + OPTIONS, name=1, x=2).count("r.yaml:1: plugin.options.") == 3

    def test_what_the_dataclass_raises_has_its_place(self, refusal):
        assert refusal(FUNCTIONS + OPTIONS, count=13) == (
            "p.py:17: __post_init__: Options raised KeyError at "
            f"`if self.count == 13: raise KeyError(\"unlucky\")`: 'unlucky'{FIX}"
        )

    def test_no_dataclass(self, refusal):
        assert refusal(f"{FUNCTIONS}class Options:\n    a: int = 3\n", a=1) == (
            "p.py: Options: is no dataclass\n  -> decorate it with @dataclass(frozen=True)"
        )

    def test_fields_that_are_not_given(self, load):
        text = (
            f"{FUNCTIONS}{OPTIONS}@dataclass\nclass Options:\n    a: int\n    b: int = field(init=False, default=5)\n"
        )
        options = load(text, a=1).options
        assert (options.a, options.b) == (1, 5)
