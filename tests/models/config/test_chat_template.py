"""Chat templates that would never end or fill the memory are refused; all others say what they always said."""

import copy
import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from redco_cli.errors import DataError
from redco_cli.models.config import chat_template
from redco_cli.models.config.chat_template import limit_templates
from redco_cli.models.config.tokenizer import load_tokenizer
from redco_cli.recipe.schema import ModelSection

TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "2+2?", "ids": [1, 2, 3]},
    {"role": "assistant", "content": "4", "tool_calls": [{"name": "add", "arguments": {"a": 2}}]},
]


def tokenizer_with(template):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])), chat_template=template, eos_token="</s>"
    )
    limit_templates(made, "org/name", "r.yaml:3: model.tokenizer")
    return made


def render(template, **settings):
    return tokenizer_with(template).apply_chat_template(TALK, tokenize=False, **settings)


ENDLESS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nothing passes": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "filters in a test": "{% for a in range(99999) if range(99999)|sum == a %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "calls": "{% macro g() %}{{ caller() }}{{ caller() }}{% endmacro %}"
    "{% macro f(n) %}{% if n %}{% call g() %}{{ f(n - 1) }}{% endcall %}{% endif %}{% endmacro %}{{ f(30) }}",
    "recursive loops": "{% for a in range(99) recursive %}{{ loop(range(99)) if loop.depth < 20 }}{% endfor %}",
    "broken out of": "{% for a in range(99999) %}{% for b in range(99999) %}{% if b > 99990 %}{% break %}{% endif %}"
    "{% endfor %}{% endfor %}",
}
HUGE = {
    "times": "{{ 'a' * 10**10 }}",
    "times in turns": "{% set s = namespace(s='a' * 99) %}{% for i in range(9) %}{% set s.s = s.s * 999 %}{% endfor %}",
    "lists": "{{ ([0] * 10**10)|length }}",
    "numbers": "{{ 10 ** (10 ** 10) }}",
    "squares": "{% set n = namespace(n=9) %}{% for i in range(99) %}{% set n.n = n.n * n.n %}{% endfor %}",
    "doubled": "{% set s = namespace(s='a') %}{% for i in range(99) %}{% set s.s = s.s ~ s.s %}{% endfor %}",
    "added": "{% set s = namespace(s='a') %}{% for i in range(99) %}{% set s.s = s.s + s.s %}{% endfor %}",
    "output": "{% set s = 'a' * 999999 %}{% for i in range(9999) %}{{ s }}{% endfor %}",
    "blocks": "{% set s = 'a' * 999999 %}{% set t %}{% for i in range(9999) %}{{ s }}{% endfor %}{% endset %}",
    "centred": "{{ 'a'|center(10000000000) }}",
    "indented": "{{ 'a\nb'|indent(10000000000) }}",
    "method": "{{ 'a'.ljust(10000000000) }}",
    "tabs": "{{ '\t'.expandtabs(tabsize=10000000000) }}",
    "replaced": "{% set s = 'a' * 999999 %}{{ s.replace('a', s) }}",
    "replaced by a filter": "{% set s = 'a' * 999999 %}{{ s|replace('a', s) }}",
    "joined": "{% set s = 'a' * 999999 %}{{ ([s] * 99999)|join }}",
    "joined by a method": "{% set s = 'a' * 999999 %}{{ s.join(['b'] * 99999) }}",
    "format": "{{ '%09999999999d' % 1 }}",
    "starred format": "{{ '%*d' % (9999999999, 1) }}",
    "format filter": "{{ '%09999999999d'|format(1) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 9999999999) }}",
    "sliced": "{{ 'a'|slice(10000000000)|list }}",
    "as JSON": "{{ [1]|tojson(indent=10000000000) }}",
    "mapped": "{{ (['a'] * 99999)|map('center', 99999)|list|length }}",
    "never rendered": "{% if false %}{{ 'a'|center(10000000000) }}{% endif %}{{ 'a' * 10**10 }}",
}


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_what_would_never_end_is_refused(monkeypatch, template):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    with pytest.raises(DataError) as caught:
        render(template)
    assert str(caught.value) == (
        "r.yaml:3: model.tokenizer: the chat template of org/name takes more than 0.2 s for one conversation\n"
        "  -> correct it (chat_template.jinja or tokenizer_config.json), or name another model.tokenizer"
    )


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_what_would_fill_the_memory_is_refused(monkeypatch, template):
    monkeypatch.setattr(chat_template, "_PRODUCED", 2**27)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"of org/name (makes|formats)"):
        render(template)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("mask", [False, True])
def test_also_where_the_answers_are_marked(monkeypatch, mask):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    marked = "{% generation %}" + ENDLESS["nested loops"] + "{% endgeneration %}"
    made = tokenizer_with(marked)
    with pytest.raises(DataError, match=r"takes more than 0\.2 s"):
        made.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=mask)
    made.chat_template = (
        "{% set s = 'a' * 999999 %}{% for i in range(9999) %}{{ s }}{% endfor %}{% generation %}{% endgeneration %}"
    )
    with pytest.raises(DataError, match="makes a value of more than"):
        made.apply_chat_template(TALK, return_dict=True, return_assistant_tokens_mask=mask)


GOOD = {
    "usual": "{{ bos_token }}{% for m in messages %}{% if loop.first %}{{ '<<' ~ m.role ~ '>>' }}{% endif %}"
    "{{- m['content'] | trim + eos_token -}}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}",
    "namespaces": "{% set ns = namespace(n=0, s='') %}{% for m in messages if m.role != 'system' %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.s = ns.s ~ loop.index ~ '/' ~ loop.length %}"
    "{% else %}none{% endfor %}{{ ns.s }}",
    "macros": "{% macro shown(x, depth=0) %}{{ x }}{% if depth < 3 %}{{ shown(x, depth + 1) }}{% endif %}{% endmacro %}"
    "{{ shown(messages[0].content) }}{% macro two() %}{{ caller() * 2 }}{% endmacro %}{% call two() %}a{% endcall %}",
    "tools": "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.arguments | tojson(indent=2) }}"
    "{{ c | items | list }}{% endfor %}{% endfor %}",
    "filters": "{{ messages | map(attribute='role') | join(', ') }}"
    "{{ messages | selectattr('role', 'eq', 'user') | list | length }}"
    "{{ 'a b' | replace(' ', '-') | upper }}{{ '%s:%5.2f' | format('x', 1.5) }}{{ [3, 1] | sort | first }}",
    "methods": "{{ messages[0].content.strip().split(' ') | join('_') }}{{ '{}|{:>5}'.format(1700000000, 'x') }}"
    "{{ '-'.join(['a', 'b']) }}{{ 'x'.replace('x', 'yy') }}{{ 'abc'.startswith('a') }}{{ 'a'.ljust(5) }}|",
    "numbers": "{{ 2 ** 10 * 3 % 7 + 1 }}{{ '%d%%' % 50 }}{{ -7 // 2 }}{{ [1] + [2] }}{{ 'ab' * 3 }}{{ 1.5 * 2 }}",
    "controls": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "recursion": "{% for m in [[1, [2]]] recursive %}"
    "{{ loop(m) if m is iterable and m is not string else m }}{% endfor %}",
    "marks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "undefined": "{{ messages[0].nothing }}{{ nothing ~ 'x' }}{% for x in nothing %}{% endfor %}",
    "blocks": "{% set t %}{% for m in messages %}{{ m.role }}{% endfor %}{% endset %}{{ t | length }}"
    "{% filter upper %}a{% endfilter %}",
}


@pytest.mark.parametrize("template", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize("asked", [False, True])
def test_all_others_say_what_they_say_without_limits(monkeypatch, template, asked):
    limited = render(template, add_generation_prompt=asked)
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment)
    compile_template = chat_template_utils._compile_jinja_template.__wrapped__
    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", compile_template)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])), chat_template=template, eos_token="</s>"
    )
    assert limited == made.apply_chat_template(TALK, tokenize=False, add_generation_prompt=asked)


def test_the_limits_are_of_one_conversation_in_one_thread(monkeypatch):
    """A template that is refused in one thread is none of the others' affair, nor of what follows in its own."""
    monkeypatch.setattr(chat_template, "SECONDS", 0.1)
    good, bad = tokenizer_with(GOOD["usual"]), tokenizer_with(ENDLESS["nested loops"])
    expected, found, refused = good.apply_chat_template(TALK, tokenize=False), [], []

    def loop():
        with pytest.raises(DataError):
            bad.apply_chat_template(TALK, tokenize=False)
        refused.append(True)
        found.append(good.apply_chat_template(TALK, tokenize=False))

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        found.append(good.apply_chat_template(TALK, tokenize=False))
    assert refused == [True, True]
    assert set(found) == {expected}


def test_a_tokenizer_of_a_recipe_has_them_and_so_have_its_copies(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.2)
    tokenizer_with(ENDLESS["macros"]).save_pretrained(tmp_path)
    section = ModelSection(tokenizer=str(tmp_path))
    loaded = copy.deepcopy(load_tokenizer(section, where=lambda key: f"r.yaml:5: {key}"))
    with pytest.raises(DataError) as caught:
        loaded.apply_chat_template(TALK)
    assert str(caught.value).startswith(f"r.yaml:5: model.tokenizer: the chat template of {tmp_path} takes more than")
