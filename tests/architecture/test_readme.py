"""What the READMEs say of files, commands and recipes is so."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from redco_cli.cli import app
from redco_cli.recipe.load import load_recipe
from redco_cli.recipe.schema import json_schema
from redco_cli.recipe.shipped import shipped_recipes
from tests.architecture import test_layers
from tests.architecture.source import ROOT, modules, shown

README_LINES = 200
MAP_ENTRY = re.compile(r"^(?:- )?`(?P<path>[^`]+\.(?:py|yaml))`(?:: | - )(?P<phrase>\S.*)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
FORMAT = "recipes/README.md"
FAMILIES = "redco_cli/models/families"
"""Every file directly in it may be a family, which is added by its file alone: the map names none of them."""
GROUP: Any = typer.main.get_command(app)


def readmes() -> list[Path]:
    """Every README of the tree: the one at its top, those of plugins and recipes, those of packages."""
    beside = [ROOT / name / "README.md" for name in ("plugins", "recipes")]
    return [ROOT / "README.md", *beside, *sorted((ROOT / "redco_cli").rglob("README.md"))]


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def section(path: str, title: str) -> str:
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text_of(path), re.MULTILINE | re.DOTALL)
    assert match, f"{path} has no section {title!r}"
    return match[1]


def file_map(path: str, title: str) -> dict[str, str]:
    """Path to phrase of each file that a section lists."""
    entries = [(match["path"], match["phrase"]) for match in MAP_ENTRY.finditer(section(path, title))]
    assert len(entries) == len(dict(entries)), "a file is listed twice"
    return dict(entries)


def table(path: str, title: str) -> Iterator[dict[str, str]]:
    """The rows of the tables in a section, above what has a heading of its own in it, as column to cell."""
    columns: list[str] = []
    for line in section(path, title).partition("\n### ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not columns:
            columns = cells
        elif not cells:
            columns = []
        elif not line.startswith("|--"):
            yield dict(zip(columns, cells, strict=True))


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each line in the shell blocks, without comments and variables set before it.

    In a `console` block, which shows output too, lines that begin with `$ ` are commands.
    """
    for kind, block in re.findall(r"^```(bash|sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "console" and not line.startswith("$ "):
                continue
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


def test_the_readme_is_read_to_its_end():
    assert len(text_of("README.md").splitlines()) <= README_LINES


class TestFileMap:
    entries = file_map("redco_cli/README.md", "File map")

    def test_is_the_tree(self):
        tree = {shown(path) for path in modules() if path.parts[-2] != "plugins" and path.name != "__init__.py"}
        exempt = {path for path in tree if str(Path(path).parent) == FAMILIES}
        assert set(self.entries) - exempt == (tree - exempt) | {f"{FAMILIES}/*.py"}

    def test_is_in_reading_order(self):
        rows = [test_layers.row(path.removesuffix(".py").replace("/", ".")) for path in self.entries]
        assert rows == sorted(rows), "a room stands above one that imports from it"

    def test_every_phrase_is_said_once(self):
        phrases = [phrase.lower() for phrase in self.entries.values()]
        assert sorted(set(phrases)) == sorted(phrases)


def test_the_plugin_guide_lists_the_built_in_plugins():
    assert set(file_map("plugins/README.md", "Built-in plugins")) == {
        shown(path) for path in (ROOT / "plugins").glob("*.py")
    }


def test_every_example_of_the_paper_is_compared():
    originals = {int(row["the paper's"]) for row in table("plugins/README.md", "Algorithms")}
    assert originals == {163, 331, 176, 277, 336, 315, 311, 198, 214, 262}


@pytest.mark.parametrize(
    "row", tuple(table("plugins/README.md", "Algorithms")), ids=lambda row: row["plugin"].strip("`")
)
def test_plugins_are_shorter_than_the_examples_of_the_paper(row):
    text = (ROOT / "plugins" / f"{row['plugin'].strip('`')}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) == int(row["lines"]) < int(row["the paper's"])


class TestRecipes:
    rows = tuple(table(FORMAT, "Recipes"))

    def test_every_recipe_is_listed(self):
        assert sorted(row["recipe"].strip("`") for row in self.rows) == sorted(shipped_recipes())

    @pytest.mark.parametrize("row", rows, ids=lambda row: row["recipe"].strip("`"))
    def test_numbers_are_those_of_its_header(self, row):
        text = shipped_recipes()[row["recipe"].strip("`")].read_text(encoding="utf-8")
        header = "\n".join(line for line in text.splitlines() if line.startswith("#"))
        assert set(NUMBER.findall(row["what"])) <= set(NUMBER.findall(header))
        quoted = [name for name in row if name not in ("recipe", "what")]
        assert quoted
        for name in quoted:
            field = re.search(rf"^# .*\b{re.escape(name)}  +(.*)$", header, re.MULTILINE)
            assert field, f"the header does not say {name!r}"
            assert NUMBER.findall(row[name]) == NUMBER.findall(field[1]), name


def keys_of(schema: Any, definitions: dict[str, Any]) -> set[str]:
    """Every key of a section in a JSON Schema, those of the sections in it too."""
    if isinstance(schema, list):
        return set().union(*(keys_of(one, definitions) for one in schema))
    if not isinstance(schema, dict):
        return set()
    if "$ref" in schema:
        return keys_of(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    own = schema.get("properties", {})
    inside = [*own.values(), schema.get("anyOf"), schema.get("items")]
    return set(own) | keys_of(inside, definitions)


def test_the_table_of_sections_is_the_schema():
    schema = json_schema()
    rows = {row["section"].strip("`"): set(re.findall(r"`(\w+)`", row["keys"])) for row in table(FORMAT, "The format")}
    assert rows.keys() == schema["properties"].keys()
    for name, keys in rows.items():
        assert keys == keys_of(schema["properties"][name], schema["$defs"]), name


@pytest.mark.parametrize("path", readmes(), ids=shown)
def test_whole_recipes_are_valid(path, tmp_path):
    for text in re.findall(r"^```yaml\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        if re.search(r"^output_dir:", text, re.MULTILINE):
            (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
            load_recipe(tmp_path / "recipe.yaml", (), {})


@pytest.mark.parametrize("path", readmes(), ids=shown)
def test_links_lead_to_files(path):
    prose = re.sub(r"^```.*?^```|`[^`\n]*`(?!\])", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = {match["target"].partition("#")[0] for match in LINK.finditer(prose)}
    local = {target for target in targets if target and "://" not in target}
    gone = {target for target in local if not (path.parent / target).exists()}
    assert gone == set()


@pytest.mark.parametrize("path", readmes(), ids=shown)
def test_every_command_can_be_run(path):
    for words in command_lines(path.read_text(encoding="utf-8")):
        if words[0] == "make":
            targets = re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE)
            assert {word for word in words[1:] if "=" not in word} <= set(targets)
        elif words[0] == "redco":
            name, parameters = parse(words[1:])
            recipe = parameters.get("recipe") or parameters.get("target", "")
            if name in ("train", "validate") and recipe in shipped_recipes():
                load_recipe(recipe, parameters["overrides"] or (), {})
        elif words[0].startswith("python") and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words
        else:
            assert words[0] in ("pip", "cd", "git", "python", "python3"), words


def test_the_table_of_commands_is_complete():
    rows = re.findall(r"^\| `redco ([\w-]+)([^`]*)`", section("README.md", "Commands"), re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(GROUP.commands)
    for name, rest in rows:
        known = {option for parameter in GROUP.commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, name


def test_every_command_has_an_example_that_parses():
    for name, command in GROUP.commands.items():
        example = str(command.epilog).removeprefix("Example: ").partition(" > ")[0]
        assert parse(shlex.split(example)[1:])[0] == name
