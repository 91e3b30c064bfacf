"""`model.chat_template` and `model.added_tokens` of a recipe."""

import pytest

from redco_cli.errors import RecipeError
from redco_cli.recipe.load import load_recipe, resolved_yaml
from redco_cli.recipe.paths import pin_paths

JINJA = "{% for message in messages %}\n{{ message['content'] }}<|end|>{% endfor %}\n"


def refusal(load, text, *overrides):
    with pytest.raises(RecipeError) as caught:
        load(text, *overrides)
    return str(caught.value)


def test_a_file_beside_the_recipe_or_in_the_working_directory_is_read_once(write, folder):
    write("project/chat.jinja", JINJA)
    write("other.jinja", "{{ messages }}")
    write("project/r.yaml", "model: {chat_template: chat.jinja}\nplugin: {module: instruct}\noutput_dir: run\n")
    loaded = load_recipe("project/r.yaml", (), {})
    assert loaded.recipe.model.chat_template == JINJA
    again = load_recipe("project/r.yaml", ["model.chat_template=other.jinja"], {})
    assert again.recipe.model.chat_template == "{{ messages }}"
    write("run/recipe.resolved.yaml", resolved_yaml(pin_paths(loaded)))
    (folder / "project/chat.jinja").unlink()
    assert load_recipe("run/recipe.resolved.yaml", (), {}).recipe.model.chat_template == JINJA


def test_a_byte_order_mark_is_no_text(load, folder):
    (folder / "c.jinja").write_bytes(b"\xef\xbb\xbf{{ x }}\r\n")
    assert load("", "model.chat_template=c.jinja").recipe.model.chat_template == "{{ x }}\n"


def test_text_in_the_recipe(load):
    text = "model:\n  chat_template: |\n    {% for message in messages %}\n    {{ message }}{% endfor %}\n"
    assert load(text).recipe.model.chat_template == "{% for message in messages %}\n{{ message }}{% endfor %}\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            None,
            "'c.jinja' given, but it is neither Jinja text nor a file beside the recipe or in the working directory",
        ),
        (b"hello", "'c.jinja' given, but the file holds no Jinja text: neither {{ nor {%"),
        (b"{{ x }}\0", "'c.jinja' given, but the file holds no Jinja text"),
        (b"{{ \xff }}", "'c.jinja' given, but the file is not UTF-8"),
        (b"{{" * 2**20, "'c.jinja' given, but the file is larger than any chat template"),
    ],
)
def test_a_file_that_is_no_template_is_told_with_its_place(load, folder, content, said):
    if content is not None:
        (folder / "c.jinja").write_bytes(content)
    assert refusal(load, "model: {chat_template: c.jinja}").startswith(f"r.yaml:3: model.chat_template: {said}\n  -> ")


def test_added_tokens(load):
    assert load("model: {added_tokens: [<a>, <b>]}").recipe.model.added_tokens == ("<a>", "<b>")
    assert load("", "model.added_tokens=[<a>]").recipe.model.added_tokens == ("<a>",)
    said = "r.yaml:3: model.added_tokens: ['<a>', '<b>', '<a>'] given, but '<a>' is in it twice"
    assert refusal(load, "model: {added_tokens: [<a>, <b>, <a>]}").startswith(said)
    for wrong in ("[]", "['']", "<a>", "[3]"):
        assert "model.added_tokens" in refusal(load, f"model: {{added_tokens: {wrong}}}")
