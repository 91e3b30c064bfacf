"""Runs that continue where the same command would once have met another place: moved, or begun from a path."""

import json
import shutil
from pathlib import Path

import pytest

from redco_cli.errors import RedcoError
from redco_cli.recipe.paths import moved
from redco_cli.run import train
from tests.training.tiny import assert_same_run, interrupted, recorded, write_project

QUICK = "eval.predict=false"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny recipe in a directory `old`, which is the working directory."""
    (tmp_path / "old").mkdir()
    write_project(tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def refused(*overrides: str) -> str:
    with pytest.raises(RedcoError) as error:
        train("recipe.yaml", overrides)
    return str(error.value)


@pytest.mark.slow
def test_a_moved_project_continues_with_the_same_command(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its data files; and once more elsewhere, from a checkpoint that is two moves old."""
    rows = [{"x": [float(i % 7), *[0.5] * 7], "y": i % 3, "id": i} for i in range(20)]
    (project / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plugin = (project / "plugin.py").read_text()
    plugin = plugin.replace("np.asarray(e[name])", 'np.asarray(e[name], np.float32 if name == "x" else np.int32)')
    (project / "plugin.py").write_text(plugin)
    source = ["data.train={path: json, data_files: [train.jsonl]}", QUICK]
    train("recipe.yaml", ["output_dir=whole", *source])
    interrupted(4, *source)
    shutil.copytree(project, project / "sub", ignore=shutil.ignore_patterns("run", "whole"))
    assert f"'{project}/sub/plugin.py', but checkpoint-4" in refused("plugin.module=sub/plugin.py", *source)
    new = project.with_name("new")
    project.rename(new)
    monkeypatch.chdir(new)
    shutil.copy("plugin.py", "other.py")
    shutil.copy("train.jsonl", "other.jsonl")
    assert refused("plugin.module=other.py", *source) == (
        f"command line: plugin.module: '{new}/other.py', but checkpoint-4 was trained with '{project}/plugin.py'\n"
        "  -> restore the value, or choose another output_dir for a new run"
    )
    problem = refused("data.train={path: json, data_files: [other.jsonl]}", QUICK)
    assert problem.startswith(f"command line: data.train.data_files: ['{new}/other.jsonl'], but checkpoint-4 was")
    interrupted(8, *source)
    third = project.with_name("third")
    shutil.copytree(new, third)
    shutil.rmtree(third / "run/checkpoint-8")  # the rest was saved at the first place
    monkeypatch.chdir(third)
    train("recipe.yaml", source)
    assert_same_run("run", "whole")


@pytest.mark.slow
def test_another_file_of_a_project_that_has_not_moved_is_refused(project: Path) -> None:
    """Even one that has the same name, beside another recipe or further up."""
    for place in ("a", "b"):
        (project / place).mkdir()
        write_project(project / place)
    overrides = ["train.steps=1", "train.warmup=0", QUICK, "eval.at_start=false"]
    train("a/recipe.yaml", overrides)
    for recipe, other in (("b/recipe.yaml", project / "b/plugin.py"), ("recipe.yaml", project / "plugin.py")):
        with pytest.raises(RedcoError, match=r"plugin\.module") as error:
            train(recipe, overrides)
        assert f"'{other}', but checkpoint-1 was trained with '{project}/a/plugin.py'" in str(error.value)


@pytest.mark.parametrize(
    ("was", "is_now", "expected"),
    [
        ("/old/plugin.py", "/new/plugin.py", True),
        ("/old/../plugin.py", "/new/../plugin.py", True),
        ("/old/a.py", "/new/b.py", False),
        ("/old/plugin.py", "/new/x/plugin.py", False),
        ("/older/plugin.py", "/newer/plugin.py", False),
        ("/elsewhere/plugin.py", "/new/plugin.py", False),
        ("/elsewhere/plugin.py", "/elsewhere/plugin.py", True),
        ("causal_lm", "causal_lm", True),
        ("causal_lm", "/new/causal_lm", False),
    ],
)
def test_a_path_may_differ_as_the_output_directory_does(was: str, is_now: str, expected: bool) -> None:
    before = {
        "plugin": {"module": was, "options": {"file": "/old/x"}},
        "data": {"eval": None},
        "output_dir": "/old/run",
    }
    now = {"plugin": {"module": is_now, "options": {"file": "/new/x"}}, "data": {"eval": None}, "output_dir": "run"}
    found = moved(before, Path("/new/run"), now)
    assert (found["plugin"]["module"] == is_now) == expected
    assert found["plugin"]["options"] == {"file": "/old/x"}  # what an option means is the plugin's
    for unmoved in ("/new/run", "run"):
        before["output_dir"] = unmoved
        assert moved(before, Path("/new/run"), now) == before


@pytest.mark.slow
def test_a_run_that_began_from_a_path_continues_with_the_same_command(project: Path) -> None:
    """Also when that checkpoint is gone; but one that began otherwise is not overwritten."""
    rare = [QUICK, "eval.at_start=false", "eval.every=99"]
    train("recipe.yaml", ["output_dir=whole", "checkpoint.keep=9", *rare])
    begin = ["checkpoint.resume=whole/checkpoint-6", *rare]
    shutil.copytree("whole", "run")
    assert "whole/checkpoint-6 is older than run/checkpoint-12" in refused(*begin)
    shutil.rmtree("run")
    shutil.copytree("whole/checkpoint-6", "kept/checkpoint-6")
    begin[0] = "checkpoint.resume=kept/checkpoint-6"
    interrupted(8, *begin)
    shutil.rmtree("kept")
    assert train("recipe.yaml", begin).step == 12
    after = [row for row in recorded("whole") if row["step"] > 6]
    assert recorded("run")[-len(after) :] == after
    assert "set checkpoint.resume: auto to continue it" in refused("checkpoint.resume=never", *rare)
