"""Which options are secrets, and that nothing which is written or said of a recipe holds one."""

import json
import string
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from redco_cli.errors import RecipeError, UsageError
from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.recipe.redaction import (
    HIDDEN,
    filled,
    given_again,
    hidden,
    holds_secrets,
    key_among,
    remember,
    scrubbed,
    shown_override,
    shown_value,
    without_secrets,
)
from redco_cli.recipe.schema import Recipe
from redco_cli.recipe.secrecy import is_secret, says_secret

MARK = "s3cr3t-m4rk"
SECRETS = [
    "openai_key",
    "api_key",
    "apiKey",
    "APIKEY",
    "HF_TOKEN",
    "hfToken",
    "auth-token",
    "tokens",
    "password",
    "dbPassword",
]
SECRETS += ["secret", "client_secret", "passwd", "credentials", "private_keys", "token2", "api.key"]
SECRETS += ["hftoken", "dbpassword", "accesstoken", "authtoken", "secretkey", "APIkey", "GitHubToken", "ssh_keys"]
SECRETS += ["pwd", "passcode", "token_hf", "api_key_value", "bearer", "passWord", "password_of_db", "bot_token"]
PLAIN = [
    "keys_seen",
    "tokenizer",
    "max_tokens_per_row",
    "monkey",
    "keyboard",
    "secretary",
    "text",
    "",
    "1",
    "pad_token",
]
PLAIN += ["eos_token", "bosToken", "mask_token", "sep_token", "cls_token", "unk_token", "image_token", "stop_tokens"]
PLAIN += ["text_key", "label_key", "answer_key", "sort_key", "yes_token", "response_token", "label_tokens", "key"]
PLAIN += ["api_key_env", "access_token_length", "primary_key", "user_token", "max_new_tokens", "hockey", "cwd"]


@pytest.mark.parametrize("name", SECRETS)
def test_names_that_say_so(name):
    assert says_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_do_not(name):
    assert not says_secret(name)


def test_what_is_hidden_and_what_is_not():
    given = {
        "hfToken": MARK,
        "token": "",
        "tokens": 5,
        "api_keys": 2,
        "auth_token": True,
        "api_key": 8472619384,
        "ssh_key": None,
        "openai": {"key": MARK},
        "password": 1234,
        "pad_token": "<pad>",
        "credentials": {"user": MARK, "port": [MARK, 5]},
        "servers": [{"host": "h", "secret": MARK}],
    }
    found = hidden(given)
    assert found == {
        **given,
        "hfToken": HIDDEN,
        "api_key": HIDDEN,
        "openai": {"key": HIDDEN},
        "password": HIDDEN,
        "credentials": {"user": HIDDEN, "port": [HIDDEN, HIDDEN]},
        "servers": [{"host": "h", "secret": HIDDEN}],
    }
    assert hidden(found) == found
    assert filled(found, given) == given


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("plugin.options.api_key", MARK, HIDDEN),
        ("plugin.options.credentials.user", MARK, HIDDEN),
        ("plugin.options.servers", [{"token": MARK}], [{"token": HIDDEN}]),
        ("plugin.options.text", "body", "body"),
        ("plugin.options.openai.key", MARK, HIDDEN),
        ("plugin.options.token", 123456, HIDDEN),
        ("plugin.options.max_tokens", "five", "five"),
        ("models.token.name", "gpt2", "gpt2"),
        ("predict.generation.max_new_tokens", "many", "many"),
        ("train.steps", 5, 5),
    ],
)
def test_what_a_message_shows(key, value, shown):
    assert shown_value(key, value) == shown


def test_a_recipe_of_an_earlier_version_is_read_without_them():
    before = {"plugin": {"module": "p", "options": {"api_key": MARK}}, "model": {"config": {"a_key": "k"}}}
    assert without_secrets(before) == {**before, "plugin": {"module": "p", "options": {"api_key": HIDDEN}}}
    assert without_secrets({"plugin": None}) == {"plugin": None}


NAMES = st.sampled_from([*SECRETS, *PLAIN])
OPTIONS = st.recursive(
    st.text(string.printable) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def texts(value, says=False, parent=""):
    """Every text below a name that says so."""
    if isinstance(value, dict):
        return [found for name, one in value.items() for found in texts(one, says or says_secret(name, parent), name)]
    if isinstance(value, list):
        return [found for one in value for found in texts(one, says, parent)]
    return [value] if says and isinstance(value, str) and value else []


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, OPTIONS, max_size=3))
def test_whatever_the_options_none_is_left_and_all_come_back(options):
    found = hidden(options)
    assert set(texts(found)) <= {HIDDEN}
    assert len(texts(found)) >= len(texts(options))
    assert given_again(filled(found, options), {}, str) == options or HIDDEN in texts(options)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, OPTIONS, max_size=3), st.sampled_from(SECRETS), st.sampled_from(["", "servers", "a.b"]))
def test_whatever_the_options_an_override_that_holds_a_secret_is_not_shown(options, name, below):
    key = f"plugin.options.{below}".rstrip(".")
    for value in ({**options, name: MARK}, [options, {name: [MARK]}]):
        assert shown_override(f"{key}={json.dumps(value)}") == f"{key}={HIDDEN}"
    if not holds_secrets(options):
        assert shown_override(f"{key}={json.dumps(options)}") == f"{key}={json.dumps(options)}"


class TestRecipe:
    TEXT = f"plugin: {{module: causal_lm, options: {{text: body, api_key: {MARK}}}}}\noutput_dir: x\n"

    def test_nothing_that_is_written_of_it_has_them(self, load):
        loaded = load("", base=self.TEXT)
        assert loaded.recipe.plugin.options["api_key"] == MARK
        for written in (resolved_yaml(loaded), str(loaded.recipe.model_dump(mode="json")), repr(loaded.recipe)):
            assert MARK not in written
        assert f"    api_key: {HIDDEN}  # r.yaml:1\n" in resolved_yaml(loaded)
        assert "    text: body  # r.yaml:1\n" in resolved_yaml(loaded)

    @pytest.mark.parametrize(
        "override",
        [
            f"plugin.options.api_key:{MARK}",
            f"plugin.options.api_key {MARK}",
            f"plugin..api_key={MARK}",
            f"plugin.options.api_key=!{MARK}",
            f"plugin.options.api_key=*{MARK}",
            f"plugin.options.api_key=[{MARK}",
            f"plugin.api_key={MARK}",
            f"plugin.options.credentials.user=!{MARK}",
            f"plugin.options={{api_key: !{MARK}}}",
            f"plugin.options={{api_key: *{MARK}}}",
            f"plugin.options:{{api_key: {MARK}}}",
            f"plugin.options.servers: [{{host: h, api_key: {MARK}}}]",
            f"plugin.options.credentials [{{api: *{MARK}",
        ],
    )
    def test_what_is_wrong_on_the_command_line_is_not_shown(self, refusal, override):
        said = refusal("", override)
        assert MARK not in said
        assert override[:14] in said

    def test_nor_in_the_environment(self, refusal):
        said = refusal("", environ={"REDCO_PLUGIN__OPTIONS__API_KEY": f"!{MARK}"})
        assert said == (
            "environment REDCO_PLUGIN__OPTIONS__API_KEY: the value, which is not shown, is not valid YAML\n"
            "  -> quote the value"
        )

    def test_nor_in_the_recipe(self, refusal):
        assert MARK not in refusal("train:\n  steps: {a: {token: " + MARK + "}}\n")


class TestGivenAgain:
    WRITTEN: ClassVar = {
        "text": "body",
        "api_key": HIDDEN,
        "placeholder": HIDDEN,
        "a": {"token": HIDDEN},
        "all": [{"access_key": HIDDEN}],
    }

    def test_refused_with_what_to_give(self):
        with pytest.raises(RecipeError) as caught:
            given_again(self.WRITTEN, {}, lambda key: f"r.yaml:1: {key}")
        keys = ["plugin.options.api_key", "plugin.options.a.token", "plugin.options.all"]
        assert [one.where for one in caught.value.problems] == [f"r.yaml:1: {key}" for key in keys]
        assert str(caught.value.problems[0]) == (
            "r.yaml:1: plugin.options.api_key: this value is a secret, which is not kept with a run\n"
            "  -> give it again: plugin.options.api_key=... on the command line, or REDCO_PLUGIN__OPTIONS__API_KEY in "
            "the environment; an option that is no secret needs a name that does not say so"
        )

    def test_taken_from_the_environment(self):
        environ = {
            "REDCO_PLUGIN__OPTIONS__API_KEY": MARK,
            "REDCO_PLUGIN__OPTIONS__A__TOKEN": MARK,
            "REDCO_PLUGIN__OPTIONS__ALL": f"[{{access_key: {MARK}}}]",
            "REDCO_PLUGIN__OPTIONS__TEXT": "not asked for",
        }
        found = given_again(self.WRITTEN, environ, str)
        expected = {"api_key": MARK, "a": {"token": MARK}, "all": [{"access_key": MARK}]}
        assert found == {**self.WRITTEN, **expected}

    def test_what_was_given_is_taken_as_it_is(self, write):
        file = write("r.resolved.yaml", f"plugin: {{module: p, options: {{api_key: {HIDDEN}}}}}\noutput_dir: x\n")
        loaded = load_recipe(file, [f"plugin.options.api_key={MARK}"], {})
        assert given_again(loaded.recipe.plugin.options, {}, str) == {"api_key": MARK}


def test_what_others_say_is_scrubbed_of_secrets_long_enough_to_be_told_from_words(monkeypatch):
    monkeypatch.setattr("redco_cli.recipe.redaction._remembered", set())
    options = {"text": "not a secret", "api_key": MARK, "api_keys": [f"{MARK}-2", "body"], "password": 123456789}
    remember(options, hidden(options))
    said = f"not a secret: {MARK}-2 of {MARK}, body, 123456789"
    assert scrubbed(said) == f"not a secret: {HIDDEN} of {HIDDEN}, body, {HIDDEN}"


def test_no_override_is_shown_whole(load):
    with pytest.raises(UsageError, match=r"command line: train\.steps:5: is no override"):
        load("", "train.steps:5")


@pytest.mark.parametrize(
    ("override", "shown"),
    [
        ("plugin.options.api_key=sk-1", "plugin.options.api_key=<hidden>"),
        ("plugin.options={api_key: sk-1}", "plugin.options=<hidden>"),
        ("plugin={options: {api_key: 12345}}", "plugin=<hidden>"),
        ("plugin.options.servers=[{host: h, token: sk-1}]", "plugin.options.servers=<hidden>"),
        ("plugin.options.servers=[{token: sk-1}", "plugin.options.servers=<hidden>"),
        ("plugin.options.api_key: sk-1", "plugin.options.api_key=<hidden>"),
        ("api_key sk-1", "api_key=<hidden>"),
        *(
            (same, same)
            for same in ("plugin.options.max_tokens=5", "plugin.options.tokens=5", "models.token.name=gpt2")
        ),
        *((same, same) for same in ("predict.generation.max_new_tokens=512", "plugin.options={text: [a]}", "--eval")),
        *((same, same) for same in ("Key: what is the capital?", "train.steps=[", "plugin.options.token=")),
    ],
)
def test_overrides_are_shown_without_secrets_at_any_depth(override, shown):
    assert shown_override(override) == shown


def test_no_key_of_the_recipe_itself_is_taken_for_a_secret():
    def keys(section):
        for name, inner in section.get("properties", {}).items():
            yield name
            yield from keys(inner)
        for inner in section.get("$defs", {}).values():
            yield from keys(inner)

    found = set(keys(Recipe.model_json_schema()))
    assert {"tokenizer", "max_new_tokens", "optimizer"} <= found
    assert [key for key in found if is_secret(f"predict.{key}")] == []


def test_options_that_differ_only_in_secrets_are_known_to_be_alike():
    assert holds_secrets({"servers": [{"api_key": MARK}]})
    assert not holds_secrets({"label_key": "label", "tokens": 5, "all": [[1], {}]})


class TestCases:
    """The environment knows neither cases nor dashes, the recipe does."""

    BASE = "plugin: {module: causal_lm, options: {hfToken: <hidden>, a: {db-password: <hidden>}}}\noutput_dir: x\n"

    def test_a_variable_finds_its_option(self, load):
        environ = {"REDCO_PLUGIN__OPTIONS__HFTOKEN": MARK, "REDCO_PLUGIN__OPTIONS__A__DB_PASSWORD": MARK}
        loaded = load("", base=self.BASE, environ=environ)
        assert loaded.recipe.plugin.options == {"hfToken": MARK, "a": {"db-password": MARK}}
        assert MARK not in resolved_yaml(loaded)
        assert given_again(load("", base=self.BASE).recipe.plugin.options, environ, str) == loaded.recipe.plugin.options

    def test_one_that_is_new_is_hidden_in_small_letters_too(self, load):
        loaded = load("", environ={"REDCO_PLUGIN__OPTIONS__HFTOKEN": MARK})
        assert loaded.recipe.plugin.options == {"hftoken": MARK}
        assert MARK not in resolved_yaml(loaded)

    def test_of_several_the_one_that_is_written_like_it(self):
        assert key_among("a.b", {"a": {"B": 1, "b": 2}}, "here") == "a.b"
        with pytest.raises(RecipeError, match=r"here: may mean aB or Ab"):
            key_among("a.ab", {"a": {"aB": 1, "Ab": 2}}, "here")
        assert key_among("x.y.z", {"x": 1}, "here") == "x.y.z"
