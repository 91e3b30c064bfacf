"""What the README says of files and commands is so."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from redco_cli.cli import app
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.shipped import shipped_recipes
from tests.architecture.source import ROOT, modules, shown

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAP_ENTRY = re.compile(r"^(?:- )?`(?P<path>[^`]+\.(?:py|yaml))`(?:: | - )(?P<phrase>\S.*)$", re.MULTILINE)
GROUP: Any = typer.main.get_command(app)


def section(title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    assert match, f"the README has no section {title!r}"
    return match[1]


def command_lines() -> Iterator[list[str]]:
    """The words of each line in the README's shell blocks, without comments and variables set before it."""
    for block in re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                yield words


def parse(arguments: list[str]) -> tuple[str, dict[str, Any]]:
    """The command's name and its parameters, parsed and not run."""
    context = GROUP.make_context("redco", list(arguments))
    name, command, rest = GROUP.resolve_command(context, [*context._protected_args, *context.args])
    return name, command.make_context(name, rest, parent=context).params


def test_the_file_map_is_the_tree():
    entries = [match["path"] for match in MAP_ENTRY.finditer(section("File map"))]
    assert len(entries) == len(set(entries)), "a file is listed twice"
    tree = {shown(path) for path in modules() if path.name != "__init__.py"}
    tree |= {shown(path) for path in (ROOT / "recipes").glob("*.yaml")}
    assert set(entries) == tree


@pytest.mark.parametrize("words", list(command_lines()), ids=" ".join)
def test_every_command_of_the_readme_can_be_run(words):
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif words[0] == "redco":
        name, parameters = parse(words[1:])
        recipe = parameters.get("recipe", "")
        if name in ("train", "validate") and recipe in shipped_recipes():
            load_recipe(recipe, parameters["overrides"] or (), {})
    else:
        assert words[0] in ("pip", "cd", "git", "python", "python3")


def test_the_table_of_commands_is_complete():
    rows = re.findall(r"^\| `redco ([\w-]+)([^`]*)`", section("Commands"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(GROUP.commands)
    for name, rest in rows:
        known = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name


def test_every_command_has_an_example_that_parses():
    for name, command in GROUP.commands.items():
        example = str(command.epilog).removeprefix("Example: ").partition(" > ")[0]
        assert parse(shlex.split(example)[1:])[0] == name
