import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.errors import RecipeError
from redco_cli.recipe.yaml12 import dump_yaml, parse_scalar, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("017", 17),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_yaml(f"k: {text}\n", "f").data["k"]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "Yes",
        "OFF",
        "y",
        "n",
        "1_000",
        "1:30",
        "0b1",
        "-0x1F",
        "1e",
        "e5",
        "2020-01-01",
        "tRue",
    ],
)
def test_what_only_yaml_1_1_reads_as_something_else_is_text(text):
    assert parse_yaml(f"k: {text}\n", "f").data["k"] == text


@pytest.mark.parametrize("text", ['"1e-5"', "'true'", '"null"', '"3"', "!!str 3"])
def test_quotes_make_text(text):
    value = parse_scalar(text)
    assert isinstance(value, str)
    assert value == text.strip("\"'").removeprefix("!!str ")


def test_keys_are_text_as_written():
    assert parse_yaml("id2label: {0: no, 1: yes, 1e-5: x, ~: y}\n", "f").data == {
        "id2label": {"0": "no", "1": "yes", "1e-5": "x", "~": "y"}
    }


def test_lines_of_keys_and_items():
    text = "# a remark\na:\n  b:\n    - x\n    - {c: 1,\n       d: 2}\n  e: |\n    text\n    more\nf: [1,\n  2]\n"
    document = parse_yaml(text, "f")
    assert document.data == {"a": {"b": ["x", {"c": 1, "d": 2}], "e": "text\nmore\n"}, "f": [1, 2]}
    assert document.lines == {
        "a": 2,
        "a.b": 3,
        "a.b.0": 4,
        "a.b.1": 5,
        "a.b.1.c": 5,
        "a.b.1.d": 6,
        "a.e": 7,
        "f": 10,
        "f.0": 10,
        "f.1": 11,
    }


def test_an_empty_document_is_none():
    assert parse_yaml("# nothing\n", "f").data is None


def test_an_alias_is_a_copy():
    data = parse_yaml("a: &x [1]\nb: *x\n", "f").data
    assert data == {"a": [1], "b": [1]}
    assert data["a"] is not data["b"]


TAG = "remove the tag; quotes make a value text"
LARGE = "a recipe is small: put data into a file of its own, and name that file"
SYNTAX = "check the indentation and quotes near that line"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f:3: a: already given on line 1\n  -> keep one of the two"),
        ("t:\n  s: 1\n  s: 2\n", "f:3: t.s: already given on line 2\n  -> keep one of the two"),
        ("0: a\n'0': b\n", "f:2: 0: already given on line 1\n  -> keep one of the two"),
        ("? [a, b]\n: 1\n", "f:1: a key must be text\n  -> remove the brackets around the key"),
        ("a: !!python/object:os.system x\n", f"f:1: the tag !!python/object:os.system is not allowed\n  -> {TAG}"),
        (
            "a: 1\nb: !!python/object/apply:os.system [ls]\n",
            f"f:2: the tag !!python/object/apply:os.system is not allowed\n  -> {TAG}",
        ),
        ("a: !!python/name:os.system\n", f"f:1: the tag !!python/name:os.system is not allowed\n  -> {TAG}"),
        ("a: !mine {b: 1}\n", f"f:1: the tag !mine is not allowed\n  -> {TAG}"),
        ("a: !!set {b, c}\n", f"f:1: the tag !!set is not allowed\n  -> {TAG}"),
        ("a: !!binary aGk=\n", f"f:1: the tag !!binary is not allowed\n  -> {TAG}"),
        ("a: !!int abc\n", f"f:1: the tag !!int is not allowed\n  -> {TAG}"),
        ("a: !!bool abc\n", f"f:1: the tag !!bool is not allowed\n  -> {TAG}"),
        ("a: &x [1, *x]\n", "f:1: a.1 contains itself\n  -> remove the alias"),
        ("a: &x\n  b: *x\n", "f:1: a.b contains itself\n  -> remove the alias"),
        (
            "a: *nowhere\n",
            f"f:1: not valid YAML: found undefined alias\n  -> {SYNTAX}",
        ),
        (
            "a:\n\tb: 1\n",
            f"f:2: not valid YAML: while scanning for the next token found character '\\t' that cannot start any token"
            f"\n  -> {SYNTAX}",
        ),
        (
            "a: [1, 2\n",
            f"f:2: not valid YAML: while parsing a flow sequence expected ',' or ']', but got '<stream end>'\n"
            f"  -> {SYNTAX}",
        ),
        (
            "a: 1\n---\nb: 2\n",
            f"f:2: not valid YAML: expected a single document in the stream but found another document\n  -> {SYNTAX}",
        ),
        (
            "a: \0\n",
            "f: not valid YAML: unacceptable character #x0000: special characters are not allowed\n"
            "  -> save the recipe as plain UTF-8 text",
        ),
        ("a:\n  b: .nan\n", "f:2: a.b: .nan is not a finite number\n  -> give a finite one"),
        ("a: [1, -.inf]\n", "f:1: a.1: -.inf is not a finite number\n  -> give a finite one"),
        ("a: 1e999\n", "f:1: a: 1e999 is not a finite number\n  -> give a finite one"),
        (f"a: {'9' * 5000}\n", "f:1: a: a number of 5000 digits is not a finite number\n  -> give a finite one"),
        (f"a: {'[' * 70}{']' * 70}\n", f"f:1: values are nested more than 64 levels deep\n  -> {LARGE}"),
        (f"a: {'[' * 5000}{']' * 5000}\n", f"f: its values are nested too deeply\n  -> {LARGE}"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "f")
    assert str(caught.value) == message


def test_aliases_that_multiply_are_refused_before_memory_is_full():
    bombs = [f"{name}: &{name} [{', '.join(9 * [f'*{inner}'])}]\n" for inner, name in itertools.pairwise("abcdefghi")]
    with pytest.raises(RecipeError) as caught:
        parse_yaml("a: &a [1, 2]\n" + "".join(bombs), "f")
    assert str(caught.value) == f"f:1: there are more than 100000 values, aliases written out\n  -> {LARGE}"


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=10)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(TEXT, TREES))
def test_what_is_dumped_is_read_back(tree):
    assert parse_yaml(dump_yaml(tree), "f").data == tree


@pytest.mark.parametrize("text", ["1e-5", "0o17", "08", "no", "null", "", "a\nb: c\n", "2020-01-01", "# x", "\u2028"])
def test_text_stays_text_on_one_line(text):
    dumped = dump_yaml({"k": text, "l": 1})
    assert parse_yaml(dumped, "f").data == {"k": text, "l": 1}
    assert len(dumped.splitlines()) == 2


def test_a_nul_character_is_refused():
    with pytest.raises(RecipeError) as refused:
        parse_yaml('a:\n  b: "x\\0y"\n', "f")
    assert str(refused.value) == "f:2: a.b: the text holds a NUL character\n  -> write a backslash as two"


class TestMergeKeys:
    @pytest.mark.parametrize(
        ("text", "data"),
        [
            ("a: &x {k: 1, l: 2}\nb: {<<: *x, l: 3}\n", {"k": 1, "l": 3}),
            ("a: &x {k: 1, l: 2}\nb: {l: 3, <<: *x}\n", {"k": 1, "l": 3}),
            ("a: &x {k: {m: 1, n: 2}}\nb: {<<: *x, k: {m: 3}}\n", {"k": {"m": 3}}),
            ("a: [&x {k: 1}, &y {k: 2, l: 2}]\nb: {<<: [*x, *y]}\n", {"k": 1, "l": 2}),
            ("a: [&x {k: 1}, &y {<<: *x, l: 2}]\nb: {<<: *y}\n", {"k": 1, "l": 2}),
            ("a: &x [{k: 1}, {l: 2}]\nb: {<<: *x}\n", {"k": 1, "l": 2}),
            ("b: {<<: {k: 1}, l: 2}\n", {"k": 1, "l": 2}),
            ("b: {<<: [], l: 2}\n", {"l": 2}),
            ("b: {'<<': 1, l: <<}\n", {"<<": 1, "l": "<<"}),
        ],
    )
    def test_explicit_keys_win_then_the_first_that_is_merged(self, text, data):
        assert parse_yaml(text, "f").data["b"] == data

    def test_the_line_is_where_a_value_was_written(self):
        text = "a: &x\n  k: 1\n  l:\n    m: 2\nb:\n  <<: *x\n  k: 3\n"
        document = parse_yaml(text, "f")
        assert document.data["b"] == {"l": {"m": 2}, "k": 3}
        assert document.lines == {"a": 1, "a.k": 2, "a.l": 3, "a.l.m": 4, "b": 5, "b.l": 3, "b.l.m": 4, "b.k": 7}

    def test_what_is_merged_is_a_copy(self):
        data = parse_yaml("a: &x {k: [1]}\nb: {<<: *x}\n", "f").data
        assert data["a"]["k"] is not data["b"]["k"]

    def test_at_the_top(self):
        assert parse_yaml("x-a: &x {k: 1}\n<<: *x\n", "f").data == {"x-a": {"k": 1}, "k": 1}

    @pytest.mark.parametrize("key", ["<<", "<", "<<<"])
    def test_a_key_that_is_text_is_dumped_as_text(self, key):
        assert parse_yaml(dump_yaml({"a": {key: {"b": 1}}}), "f").data == {"a": {key: {"b": 1}}}

    MERGE = "a mapping or a list of mappings is expected\n  -> merge an anchor of a mapping: <<: *name"

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("a:\n  <<: 3\n", f"f:2: a.<<: 3 given, but {MERGE}"),
            ("a: &x text\nb:\n  <<: *x\n", f"f:3: b.<<: text given, but {MERGE}"),
            ("a:\n  <<:\n", f"f:2: a.<<: nothing given, but {MERGE}"),
            ("a:\n  <<: [{k: 1}, [{l: 1}]]\n", f"f:2: a.<<: a list in a list given, but {MERGE}"),
            ("<<: 3\n", f"f:1: <<: 3 given, but {MERGE}"),
            ("a:\n  <<: {k: 1}\n  <<: {l: 1}\n", "f:3: a.<<: already given on line 2\n  -> merge a list: <<: [*a, *b]"),
            ("a: {<<: {k: 1, k: 2}}\n", "f:1: a.k: already given on line 1\n  -> keep one of the two"),
            ("a: &x\n  <<: *x\n", "f:1: a.<< contains itself\n  -> remove the alias"),
            ("a: &x\n  b: {<<: *x}\n", "f:1: a.b.<< contains itself\n  -> remove the alias"),
            ("a: {<<: &x {b: {<<: *x}}}\n", "f:1: a.b.b contains itself\n  -> remove the alias"),
            ("a:\n  <<: !mine {k: 1}\n", f"f:2: the tag !mine is not allowed\n  -> {TAG}"),
            (f"a: {'{<<: ' * 70}{'}' * 70}\n", f"f:1: values are nested more than 64 levels deep\n  -> {LARGE}"),
        ],
    )
    def test_refusals(self, text, message):
        with pytest.raises(RecipeError) as caught:
            parse_yaml(text, "f")
        assert str(caught.value) == message

    def test_merges_that_multiply_are_refused_before_time_is_up(self):
        """They repeat the same key, so that no value is ever added."""
        bombs = [
            f"{name}: &{name} {{<<: [{', '.join(9 * [f'*{inner}'])}]}}\n"
            for inner, name in itertools.pairwise("abcdefghi")
        ]
        with pytest.raises(RecipeError) as caught:
            parse_yaml("a: &a {}\n" + "".join(bombs), "f")
        problem = "there are more than 100000 values, aliases written out"
        assert str(caught.value).endswith(f"{problem}\n  -> {LARGE}")


@pytest.mark.parametrize(
    "text",
    [
        "password: *s3cr3t",
        "password: !s3cr3t",
        "password: !s3cr3t!x y",
        "api_key: 777777e890",
        "servers:\n- {token: !s3cr3t x}",
        "credentials: {<<: s3cr3t}",
        "openai: {key: 777777e890}",
    ],
)
def test_nothing_of_a_secret_is_shown(text):
    with pytest.raises(RecipeError) as caught:
        parse_yaml(text, "f")
    assert "s3cr3t" not in str(caught.value)
    assert "777" not in str(caught.value)
