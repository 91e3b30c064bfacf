import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.errors import EXIT_FAILED, EXIT_USAGE, RecipeError, UsageError
from redco_cli.recipe.load import find_run, load_recipe, load_run, resolved_yaml
from redco_cli.recipe.schema import Recipe
from redco_cli.recipe.shipped import find_recipe, shipped_plugins, shipped_recipes

BASE = "plugin: {module: causal_lm}\noutput_dir: runs/x\n"
TOP = ", ".join(sorted(Recipe.model_fields))
LENGTH = "expected a number of optimizer steps (1000) or epochs (3 epochs)"
STEPS = "train.steps: Length of the run: optimizer steps or epochs."
SHIPPED = ", ".join(shipped_recipes())

ANY_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))  # what a recipe can hold


class TestFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"- a\n", "r.yaml: a recipe is a mapping, but this file holds list\n  -> start from `redco init`"),
            (b"", "r.yaml: a recipe is a mapping, but this file holds nothing\n  -> start from `redco init`"),
            (b"text\n", "r.yaml: a recipe is a mapping, but this file holds str\n  -> start from `redco init`"),
            (
                bytes(range(256)),
                "r.yaml: cannot be read: 'utf-8' codec can't decode byte 0x80 in position 128: invalid start byte\n"
                "  -> check the path, its permissions and that it is UTF-8",
            ),
            (
                BASE.encode("utf-16"),
                "r.yaml: cannot be read: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte\n"
                "  -> check the path, its permissions and that it is UTF-8",
            ),
        ],
    )
    def test_what_is_no_recipe(self, folder, content, message):
        (folder / "r.yaml").write_bytes(content)
        with pytest.raises((RecipeError, UsageError)) as caught:
            load_recipe("r.yaml", (), {})
        assert str(caught.value) == message

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("sub", "sub: is a directory, not a recipe\n  -> name the .yaml file in it"),
            (
                "quikstart",
                "quikstart: no such recipe, neither a file nor shipped with redco\n  -> did you mean quickstart?",
            ),
            (
                "recipes/quikstart.yaml",
                "recipes/quikstart.yaml: no such recipe, neither a file nor shipped with redco\n"
                "  -> did you mean quickstart?",
            ),
            ("zzz", f"zzz: no such recipe, neither a file nor shipped with redco\n  -> known: {SHIPPED}"),
        ],
    )
    def test_what_is_not_there(self, folder, name, message):
        (folder / "sub").mkdir()
        with pytest.raises(UsageError) as caught:
            load_recipe(name, (), {})
        assert str(caught.value) == message
        assert caught.value.exit_code == EXIT_USAGE

    @pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
    def test_names_that_no_file_can_have(self, folder, name):
        with pytest.raises(UsageError, match="no such recipe, neither a file nor shipped with redco"):
            find_recipe(name)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_without_permission(self, folder):
        (folder / "r.yaml").write_text(BASE)
        (folder / "r.yaml").chmod(0)
        with pytest.raises(UsageError, match=r"^r\.yaml: cannot be read: \[Errno 13\] Permission denied: 'r\.yaml'"):
            load_recipe("r.yaml", (), {})

    def test_a_byte_order_mark_is_no_key(self, folder):
        (folder / "r.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.encode())
        assert load_recipe("r.yaml", (), {}).recipe.output_dir == "runs/x"

    def test_a_file_comes_before_a_shipped_name(self, folder):
        (folder / "quickstart").write_text(BASE)
        assert load_recipe("quickstart", (), {}).recipe.output_dir == "runs/x"

    def test_everything_wrong_in_a_file_ends_with_code_1(self, load):
        with pytest.raises(RecipeError) as caught:
            load("zzz: 1\n")
        assert caught.value.exit_code == EXIT_FAILED


class TestRuns:
    def test_a_run_has_its_recipe(self, write):
        write("runs/a/recipe.resolved.yaml", BASE)
        assert find_run("runs/a") == (Path("runs/a/recipe.resolved.yaml"), Path("runs/a"))

    def test_a_recipe_is_no_run(self, write):
        write("r.yaml", BASE)
        path, directory = find_run("r.yaml")
        assert (str(path), directory) == ("r.yaml", None)
        assert find_run("quickstart") == (shipped_recipes()["quickstart"], None)

    def test_a_folder_without_a_recipe(self, folder):
        (folder / "runs").mkdir()
        with pytest.raises(UsageError) as caught:
            find_run("runs")
        assert str(caught.value) == (
            "runs: is no run: it has no recipe.resolved.yaml\n  -> name an output directory or a recipe"
        )


class TestExtends:
    def test_a_chain_merges_key_by_key(self, write):
        write(
            "a.yaml", f"{BASE}train: {{steps: 1, freeze: [x, y], b1: 0.5}}\nmodel: {{config: {{a: 1, b: {{c: 2}}}}}}\n"
        )
        write("b.yaml", "extends: a.yaml\ntrain: {steps: 2, freeze: [z]}\n")
        write("c.yaml", "extends: b.yaml\ntrain: {b2: 0.7}\nmodel: {config: {b: {d: 3}}}\n")
        loaded = load_recipe("c.yaml", (), {})
        train = loaded.recipe.train
        assert (train.steps.amount, train.freeze, train.b1, train.b2) == (2, ("z",), 0.5, 0.7)
        assert loaded.recipe.model.config == {"a": 1, "b": {"c": 2, "d": 3}}
        assert {key: loaded.origins[key] for key in ("train.steps", "train.b1", "train.b2", "model.config.b.d")} == {
            "train.steps": "b.yaml:2",
            "train.b1": "a.yaml:3",
            "train.b2": "c.yaml:2",
            "model.config.b.d": "c.yaml:3",
        }

    def test_a_value_replaces_a_mapping_and_the_other_way_round(self, write):
        write("a.yaml", f"{BASE}mesh: {{data: 2}}\ndata:\n  train: {{path: json}}\n")
        write("b.yaml", "extends: a.yaml\nmesh: auto\ndata:\n  train: null\n")
        write("c.yaml", "extends: b.yaml\nmesh: {data: 4}\n")
        middle, last = load_recipe("b.yaml", (), {}), load_recipe("c.yaml", (), {})
        assert (middle.recipe.mesh, middle.recipe.data.train) == ("auto", None)
        assert last.recipe.mesh.data == 4
        assert "data.train.path" not in middle.origins

    def test_paths_start_from_the_recipe_that_extends(self, write):
        write("deep/er/a.yaml", BASE)
        write("deep/b.yaml", "extends: er/a.yaml\nseed: 1\n")
        write("c.yaml", "extends: deep/b.yaml\nseed: 2\n")
        loaded = load_recipe("c.yaml", (), {})
        assert loaded.recipe.seed == 2
        assert loaded.origins["output_dir"] == "deep/er/a.yaml:2"

    def test_shipped_names(self, load):
        loaded = load("extends: quickstart\ntrain: {steps: 3}\n", base="")
        assert loaded.recipe.train.steps.amount == 3
        assert loaded.recipe.plugin.module == "python_source"

    def test_a_null_extends_nothing(self, load):
        assert load("extends: null\n").recipe.output_dir == "runs/x"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                "extends: r.yaml\n",
                "r.yaml: extends: the recipes extend each other in a circle\n  -> remove one `extends`",
            ),
            (
                "extends: b.yaml\n",
                "r.yaml: extends: the recipes extend each other in a circle\n  -> remove one `extends`",
            ),
            (
                "extends: [a]\n",
                "r.yaml:1: extends: ['a'] given, but one path or shipped name is expected\n  -> extend one recipe",
            ),
            (
                "seed: 1\nextends: no.yaml\n",
                "r.yaml:2: extends: no.yaml: no such recipe, neither a file nor shipped with redco\n"
                f"  -> known: {SHIPPED}",
            ),
            (
                "extends: quickstrt\n",
                "r.yaml:1: extends: quickstrt: no such recipe, neither a file nor shipped with redco\n"
                "  -> did you mean quickstart?",
            ),
            ("extends: .\n", "r.yaml:1: extends: .: is a directory, not a recipe\n  -> name the .yaml file in it"),
            ("extends: bad.yaml\n", "bad.yaml:3: tarin: unknown key\n  -> did you mean train?"),
        ],
    )
    def test_refusals(self, refusal, write, text, message):
        write("b.yaml", "extends: r.yaml\n")
        write("bad.yaml", f"{BASE}tarin: 1\n")
        assert refusal(text, base="") == message


class TestPrecedence:
    def test_later_wins(self, write, load):
        write("base.yaml", f"{BASE}train: {{b1: 0.1, b2: 0.1, eps: 0.1, weight_decay: 0.1}}\n")
        text = "extends: base.yaml\ntrain: {b2: 0.2, eps: 0.2, weight_decay: 0.2}\n"
        environ = {"REDCO_TRAIN__EPS": "0.3", "REDCO_TRAIN__WEIGHT_DECAY": "0.3", "HOME": "/", "REDCO_CACHE": "/c"}
        loaded = load(text, "train.weight_decay=0.4", base="", environ=environ)
        train = loaded.recipe.train
        assert (train.max_grad_norm, train.b1, train.b2, train.eps, train.weight_decay) == (1.0, 0.1, 0.2, 0.3, 0.4)
        assert {
            key: loaded.origins.get(f"train.{key}") for key in ("max_grad_norm", "b1", "b2", "eps", "weight_decay")
        } == {
            "max_grad_norm": None,
            "b1": "base.yaml:3",
            "b2": "r.yaml:2",
            "eps": "environment REDCO_TRAIN__EPS",
            "weight_decay": "command line",
        }

    def test_the_environment_is_read_unless_told_otherwise(self, load, folder, monkeypatch):
        load("")
        monkeypatch.setenv("REDCO_SEED", "7")
        assert load_recipe("r.yaml").recipe.seed == 7
        assert load_recipe("r.yaml", environ={}).recipe.seed == 0

    def test_the_last_of_two_overrides_wins(self, load):
        assert load("", "seed=1", "seed=2").recipe.seed == 2

    def test_places(self, load):
        loaded = load("train:\n  steps: 3\n", "seed=1")
        assert loaded.where("train.steps") == "r.yaml:4: train.steps"
        assert loaded.where("train.warmup") == "r.yaml:3: train.warmup"
        assert loaded.where("seed") == "command line: seed"
        assert loaded.where("mesh.data") == "r.yaml: mesh.data"


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "read", "value"),
        [
            ("model.name=123", lambda r: r.model.name, "123"),
            ("model.name=no", lambda r: r.model.name, "no"),
            ("model.name=a=b # c", lambda r: r.model.name, "a=b # c"),
            ("model.name=null", lambda r: r.model.name, None),
            ("train.freeze=[a,b]", lambda r: r.train.freeze, ("a", "b")),
            ("train.steps=2 epochs", lambda r: str(r.train.steps), "2 epochs"),
            ("train.learning_rate=1e-5", lambda r: r.train.learning_rate, 1e-5),
            ("checkpoint.every=null", lambda r: r.checkpoint.every, None),
            ("mesh.data=2", lambda r: r.mesh.data, 2),
            ("train={b1: 0.5}", lambda r: r.train.b1, 0.5),
            ("plugin.options.x.y=3", lambda r: r.plugin.options, {"a": 1, "x": {"y": 3}}),
            ("plugin.options.a=[1, {b: no}]", lambda r: r.plugin.options, {"a": [1, {"b": "no"}]}),
        ],
    )
    def test_values_are_typed_by_the_schema(self, load, override, read, value):
        text = "plugin: {module: causal_lm, options: {a: 1}}\noutput_dir: x\ncheckpoint: {every: 5}\n"
        loaded = load(text, override, base="")
        assert read(loaded.recipe) == value
        assert loaded.origins[override.partition("=")[0]] == "command line"

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("train.steps", "command line: train.steps: is no override\n  -> write key=value, such as train.steps=100"),
            ("=3", "command line: =3: is no override\n  -> write key=value, such as train.steps=100"),
            (
                "train..steps=3",
                "command line: train..steps=3: is no override\n  -> write key=value, such as train.steps=100",
            ),
            (
                "train.steps=[1",
                "command line: train.steps: not valid YAML: while parsing a flow sequence expected ',' or ']', "
                "but got '<stream end>'\n  -> quote the value",
            ),
            (
                "train.steps=\0",
                "command line: train.steps: not valid YAML: unacceptable character #x0000: "
                "special characters are not allowed\n  -> quote the value",
            ),
            ("train.steps=", f"command line: train.steps: None given, but {LENGTH}\n  -> {STEPS}"),
            ("train.steps.foo=1", f"command line: train.steps: {{'foo': 1}} given, but {LENGTH}\n  -> {STEPS}"),
            (
                "output_dir=null",
                "command line: output_dir: None given, but text is expected\n"
                "  -> output_dir: Where the run lives, relative to the working directory.",
            ),
            ("foo=1", f"command line: foo: unknown key\n  -> known: {TOP}"),
            ("train.stpes=1", "command line: train.stpes: unknown key\n  -> did you mean steps?"),
            ("extends=quickstart", f"command line: extends: unknown key\n  -> known: {TOP}"),
            (
                "plugin=causal_lm",
                "command line: plugin: 'causal_lm' given, but a mapping (key: value) is expected\n"
                "  -> plugin: The three functions.",
            ),
        ],
    )
    def test_refusals(self, refusal, override, message):
        assert refusal("train: {steps: 5}\n", override) == message

    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            ({"REDCO_FOO": "7"}, f"environment REDCO_FOO: foo is no key of a recipe\n  -> known: {TOP}"),
            (
                {"REDCO_TRIAN__STEPS": "7"},
                "environment REDCO_TRIAN__STEPS: trian is no key of a recipe\n  -> did you mean train?",
            ),
            (
                {"REDCO_TRAIN__STPES": "7"},
                "environment REDCO_TRAIN__STPES: train.stpes: unknown key\n  -> did you mean steps?",
            ),
            (
                {"REDCO_TRAIN__STEPS": "soon"},
                f"environment REDCO_TRAIN__STEPS: train.steps: 'soon' given, but {LENGTH}\n  -> {STEPS}",
            ),
            (
                {"REDCO_TRAIN__STEPS": "{"},
                "environment REDCO_TRAIN__STEPS: not valid YAML: while parsing a flow node expected the node "
                "content, but found '<stream end>'\n  -> quote the value",
            ),
        ],
    )
    def test_environment_refusals(self, refusal, environ, message):
        assert refusal("", environ=environ) == message


class TestResolved:
    TEXT = (
        "model:\n  config:\n    model_type: llama  # which\n    text: |\n      two\n      lines\n    scale: '1e-5'\n"
        "    nested: {list: [1, {a: no}], empty: [], none: {}}\n"
        "train:\n  freeze:\n    - a.*\n    - b.*\n  steps: 2 epochs\n"
    )

    def test_loads_to_the_same_recipe_from_anywhere(self, load, write):
        loaded = load(self.TEXT, "train.learning_rate=1e-3", environ={"REDCO_SEED": "4"})
        write("other/recipe.resolved.yaml", resolved_yaml(loaded))
        assert load_recipe("other/recipe.resolved.yaml", (), {}).recipe == loaded.recipe

    def test_says_where_each_value_is_from(self, load):
        text = resolved_yaml(load(self.TEXT, "train.learning_rate=1e-3", environ={"REDCO_SEED": "4"}))
        lines = text.splitlines()
        assert lines[0] == "# resolved from r.yaml; values without a remark are defaults"
        for line in (
            "    model_type: llama  # r.yaml:5",
            '    text: "two\\nlines\\n"  # r.yaml:6',
            "    scale: '1e-5'  # r.yaml:9",
            "      empty: []  # r.yaml:10",
            "  steps: 2 epochs  # r.yaml:15",
            "  learning_rate: 0.001  # command line",
            "  - b.*  # r.yaml:14",
            "output_dir: runs/x  # r.yaml:2",
            "seed: 4  # environment REDCO_SEED",
            "  weight_decay: 0.0",
        ):
            assert line in lines

    @settings(deadline=None, max_examples=50)
    @given(
        options=st.dictionaries(
            ANY_TEXT, st.recursive(st.none() | st.booleans() | st.integers() | ANY_TEXT, st.lists, max_leaves=5)
        )
    )
    def test_whatever_the_options(self, options, tmp_path_factory):
        path = tmp_path_factory.mktemp("recipe") / "r.yaml"
        path.write_text(BASE)
        loaded = load_recipe(path, (), {})
        plugin = loaded.recipe.plugin.model_copy(update={"options": options})
        recipe = loaded.recipe.model_copy(update={"plugin": plugin})
        origins = {**loaded.origins, **{f"plugin.options.{key}": "r.yaml:1" for key in options}}
        path.write_text(resolved_yaml(type(loaded)(recipe, loaded.path, origins)), encoding="utf-8")
        assert load_recipe(path, (), {}).recipe == recipe


def test_shipped_plugins_leave_out_private_files():
    assert "causal_lm" in shipped_plugins()
    assert not [name for name in shipped_plugins() if name.startswith("_")]


class TestBlocksForAnchors:
    TEXT = "x-small: &small\n  global_batch_size: 4\n  steps: 10\nx-note: any text\ntrain:\n  <<: *small\n  steps: 20\n"

    def test_are_no_part_of_the_recipe(self, load, write):
        loaded = load(self.TEXT)
        assert (loaded.recipe.train.global_batch_size, str(loaded.recipe.train.steps)) == (4, "20")
        assert loaded.where("train.global_batch_size") == "r.yaml:4: train.global_batch_size"
        assert loaded.where("train.steps") == "r.yaml:9: train.steps"
        text = resolved_yaml(loaded)
        assert "x-" not in text
        assert "global_batch_size: 4  # r.yaml:4\n" in text
        assert load_recipe(write("resolved.yaml", text), (), {}).recipe == loaded.recipe

    def test_nor_of_one_that_extends(self, load, write):
        write("base.yaml", self.TEXT)
        assert load("extends: base.yaml\n").recipe.train.global_batch_size == 4

    def test_a_mistake_in_what_is_merged_is_told_where_it_was_written(self, refusal):
        text = "x-small: &small\n  steps: soon\ntrain:\n  <<: *small\n"
        assert refusal(text).startswith("r.yaml:4: train.steps: 'soon' given, but ")

    def test_stand_at_the_top_only(self, refusal):
        assert refusal("train: {x-note: 1}\n").startswith("r.yaml:3: train.x-note: unknown key\n")
        assert refusal("", "x-note=1").startswith("command line: x-note: unknown key\n")


class TestARunThatIsContinued:
    @pytest.fixture
    def run(self, load, folder):
        """`runs/x`, as training leaves it."""
        loaded = load("train: {steps: 7}\ncheckpoint: {resume: never}\n", "seed=3", environ={"REDCO_MESH": "auto"})
        (folder / "runs/x").mkdir(parents=True)
        (folder / "runs/x/recipe.resolved.yaml").write_text(resolved_yaml(loaded))
        return loaded

    def test_has_its_recipe_and_is_not_refused_to_go_on(self, run):
        loaded = load_run("runs/x", ["logging.every=2"], {})
        assert (loaded.recipe.train, loaded.recipe.seed, loaded.recipe.logging.every) == (run.recipe.train, 3, 2)
        assert loaded.recipe.checkpoint.resume == "auto"
        assert loaded.recipe.output_dir == "runs/x"

    def test_stays_where_it_is_whatever_the_working_directory(self, run, folder, monkeypatch):
        monkeypatch.chdir(folder / "runs")
        assert load_run("x", (), {}).recipe.output_dir == "x"
        monkeypatch.chdir("/")
        assert load_run(folder / "runs/x", (), {}).recipe.output_dir == str(folder / "runs/x").lstrip("/")

    def test_still_says_where_its_values_came_from(self, run, folder):
        before = (folder / "runs/x/recipe.resolved.yaml").read_text()
        assert "  steps: 7  # r.yaml:3\n" in before
        assert resolved_yaml(load_run("runs/x", ["checkpoint.resume=never"], {})) == before.replace(
            "resume: never  # r.yaml:4", "resume: auto  # command line"
        )

    def test_cannot_go_elsewhere(self, run):
        with pytest.raises(UsageError) as caught:
            load_run("runs/x", ["output_dir=runs/y"], {})
        assert str(caught.value) == (
            "command line: output_dir: the run in runs/x continues there\n"
            "  -> leave output_dir out, or begin another run: "
            "redco train runs/x/recipe.resolved.yaml output_dir=runs/y"
        )

    def test_a_recipe_is_loaded_as_ever(self, load):
        loaded = load("")
        assert load_run("r.yaml", (), {}) == loaded
