import re

import pytest

from redco_cli.errors import StorageError, UsageError
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_plugins, shipped_recipes
from redco_cli.recipe.starter import copy_starter


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_copy_is_the_shipped_recipe_with_its_own_plugin(folder, name):
    files = copy_starter(folder / "mine", name)
    assert files[0] == folder / "mine" / f"{name}.yaml"
    assert all(file.is_file() for file in files)
    copied, shipped = (load_recipe(path, (), {}).recipe for path in (files[0], shipped_recipes()[name]))
    module = copied.plugin.module
    assert module == f"plugins/{shipped.plugin.module}.py"
    assert (folder / "mine" / module).read_bytes() == shipped_plugins()[shipped.plugin.module].read_bytes()
    assert copied.model_copy(update={"plugin": shipped.plugin}) == shipped
    schema = re.search(r"\$schema=(\S+)", files[0].read_text())
    assert schema is not None
    assert (folder / "mine" / schema[1]).is_file()


def test_data_files_come_along(folder):
    files = copy_starter(folder, "quickstart")
    assert folder / "quickstart_prompts.jsonl" in files
    assert (folder / "quickstart_prompts.jsonl").read_text().count("\n") == 4


def test_nothing_is_overwritten(folder, write):
    write("plugins/python_source.py", "# mine\n")
    with pytest.raises(StorageError) as caught:
        copy_starter(folder, "quickstart")
    assert str(caught.value) == (
        f"{folder}/plugins/python_source.py: is there already\n  -> choose an empty directory: redco init DIR"
    )
    assert (folder / "plugins" / "python_source.py").read_text() == "# mine\n"
    assert not (folder / "quickstart.yaml").exists()


def test_an_unknown_name(folder):
    with pytest.raises(UsageError) as caught:
        copy_starter(folder, "quikstart")
    assert str(caught.value) == "quikstart: no such shipped recipe\n  -> did you mean quickstart?"


def test_a_directory_that_cannot_be_made(folder, write):
    write("file", "")
    with pytest.raises(StorageError) as caught:
        copy_starter(folder / "file" / "sub", "quickstart")
    assert str(caught.value) == (
        f"{folder}/file/sub: cannot be written: Not a directory\n  -> choose another directory"
    )
