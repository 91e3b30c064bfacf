"""Which options are secrets, and that nothing which is written or said of a recipe holds one."""

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
    remember,
    says_secret,
    scrubbed,
    shown_value,
    without_secrets,
)

MARK = "s3cr3t-m4rk"
SECRETS = [
    "key",
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
SECRETS += ["secret", "client_secret", "passwd", "credentials", "private_keys", "token2", "a.key"]
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


@pytest.mark.parametrize("name", SECRETS)
def test_names_that_say_so(name):
    assert says_secret(name)


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_do_not(name):
    assert not says_secret(name)


def test_what_is_hidden_and_what_is_not():
    given = {
        "api_key": MARK,
        "token": "",
        "max_tokens": 5,
        "use_token": True,
        "key": None,
        "password": 1234,
        "pad_token": "<pad>",
        "credentials": {"user": MARK, "port": [MARK, 5]},
        "servers": [{"host": "h", "secret": MARK}],
    }
    found = hidden(given)
    assert found == {
        **given,
        "api_key": HIDDEN,
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
        ("train.steps", 5, 5),
    ],
)
def test_what_a_message_shows(key, value, shown):
    assert shown_value(key, value) == shown


def test_a_recipe_of_an_earlier_version_is_read_without_them():
    before = {"plugin": {"module": "p", "options": {"key": MARK}}, "model": {"config": {"a_key": "k"}}}
    assert without_secrets(before) == {**before, "plugin": {"module": "p", "options": {"key": HIDDEN}}}
    assert without_secrets({"plugin": None}) == {"plugin": None}


NAMES = st.sampled_from([*SECRETS, *PLAIN])
OPTIONS = st.recursive(
    st.text(string.printable) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def texts(value, says=False):
    """Every text below a name that says so."""
    if isinstance(value, dict):
        return [found for name, one in value.items() for found in texts(one, says or says_secret(name))]
    if isinstance(value, list):
        return [found for one in value for found in texts(one, says)]
    return [value] if says and isinstance(value, str) and value else []


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, OPTIONS, max_size=3))
def test_whatever_the_options_none_is_left_and_all_come_back(options):
    found = hidden(options)
    assert set(texts(found)) <= {HIDDEN}
    assert len(texts(found)) >= len(texts(options))
    assert given_again(filled(found, options), {}, str) == options or HIDDEN in texts(options)


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
        ],
    )
    def test_what_is_wrong_on_the_command_line_is_not_shown(self, refusal, override):
        said = refusal("", override)
        assert MARK not in said
        assert "api_key" in said or "credentials" in said

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
        "all": [{"key": HIDDEN}],
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
            "REDCO_PLUGIN__OPTIONS__ALL": f"[{{key: {MARK}}}]",
            "REDCO_PLUGIN__OPTIONS__TEXT": "not asked for",
        }
        found = given_again(self.WRITTEN, environ, str)
        expected = {"api_key": MARK, "a": {"token": MARK}, "all": [{"key": MARK}]}
        assert found == {**self.WRITTEN, **expected}

    def test_what_was_given_is_taken_as_it_is(self, write):
        file = write("r.resolved.yaml", f"plugin: {{module: p, options: {{api_key: {HIDDEN}}}}}\noutput_dir: x\n")
        loaded = load_recipe(file, [f"plugin.options.api_key={MARK}"], {})
        assert given_again(loaded.recipe.plugin.options, {}, str) == {"api_key": MARK}


def test_what_others_say_is_scrubbed_of_secrets_long_enough_to_be_told_from_words(monkeypatch):
    monkeypatch.setattr("redco_cli.recipe.redaction._remembered", set())
    options = {"text": "not a secret", "api_key": MARK, "keys": [f"{MARK}-2", "body"], "password": 123456789}
    remember(options, hidden(options))
    said = f"not a secret: {MARK}-2 of {MARK}, body, 123456789"
    assert scrubbed(said) == f"not a secret: {HIDDEN} of {HIDDEN}, body, {HIDDEN}"


def test_no_override_is_shown_whole(load):
    with pytest.raises(UsageError, match=r"command line: train\.steps:5: is no override"):
        load("", "train.steps:5")
