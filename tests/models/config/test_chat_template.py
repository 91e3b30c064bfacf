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
from redco_cli.models.config import budget
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
    "tabs of a name": "{% set t = '\t' * 9999 %}{{ t.expandtabs(9999) }}",
    "replaced by name": "{% set s = 'a' * 999999 %}{{ s|replace(old='a', new=s) }}",
    "many values": "{% set b = 'a' * 99999 %}{{ ('%s' * 999) % ((b,) * 999) }}",
    "a named value": "{% set b = 'a' * 99999 %}{{ ('%(b)s' * 999) % {'b': b} }}",
    "a hidden width": "{{ '%(a(b))99999999999d' % {'a(b)': 1} }}",
    "fractions": "{{ ('%f' * 99999) % ((1.0,) * 99999) }}",
    "a value in braces": "{% set b = 'a' * 99999 %}{{ ('{0}' * 999).format(b) }}",
    "precision": "{{ '{:.99999999f}'.format(1.5) }}",
    "bytes": "{{ 'a'.encode().center(10 ** 10) }}",
    "bytes of a number": "{{ (1).to_bytes(10 ** 10, 'big') }}",
    "a type's method": "{{ (1).from_bytes('a', 'big') }}",
    "found in copies": "{% set s = 'a' * 9999999 %}{{ (s + 'b') in [s + 'c'] * 99999 }}",
    "tuples": "{% set ns = namespace(t=('a',)) %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "lists in lists": "{% set n = namespace(l=[]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}",
    "tuples in tuples": "{% set n = namespace(t=0) %}{% for i in range(99) %}{% set n.t = {(n.t, n.t): 1} | first %}"
    "{% endfor %}",
    "arguments of macros": "{% set n = namespace(t=0) %}{% macro f() %}{% set n.t = varargs %}{% endmacro %}"
    "{% for i in range(99) %}{{ f(n.t, n.t) }}{% endfor %}",
    "slices": "{% set s = 'a' * 9999999 %}{% set n = namespace(l=0) %}"
    "{% for i in range(99) %}{% set n.l = [n.l, s[1:]] %}{% endfor %}",
    "long literals": "{% set n = namespace(l=0) %}{% for i in range(99999) %}{% set n.l = [n.l, ["
    + "1, " * 9999
    + "]] %}{% endfor %}",
    "indented JSON": "{{ [[1] * 99] | tojson(indent=10 ** 6) }}",
    "deep JSON": "{% set n = namespace(l=[1] * 99999) %}{% for i in range(99) %}{% set n.l = [n.l] %}{% endfor %}"
    "{{ n.l | tojson(indent=99) }}",
    "indented lines": "{{ ('a\n' * 9999) | indent(9999) }}",
    "indented by a text": "{{ ('a\n' * 9999) | indent('b' * 9999) }}",
    "joined attributes": "{% set m = {'s': 'a' * 99999} %}"
    "{{ ([{'x': 1}] * 9999) | map(attribute='s', default=m.s) | join }}",
    "spaces of the time": "{{ strftime_now('%Y' * 9999) }}",
    "a number of digits": "{{ ('f' * 9999) | int(0, 16) // 3 }}",
    "never rendered": "{% if false %}{{ 'a'|center(10000000000) }}{% endif %}{{ 'a' * 10**10 }}",
}
SLOW = {
    "wrapped": "{{ (messages[0].content * 260000) | wordwrap(1) | length }}",
    "linked": "{{ 'a' | urlize(target='b' * 9999999) }}",
    "rounded": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "stripped of tags": "{{ ('<!--' * 999999) | striptags }}",
    "as markup": "{{ (('<!--' * 999999) | safe).striptags() }}",
    "summed lists": "{% set n = 1 %}{{ ([[n] * 1000] * 1500) | sum(start=[]) }}",
    "encoded": "{{ ('\u00fc' * 9999999).encode('punycode') }}",
    "sought from behind": "{% set s = 'a' * 9999999 %}{{ s.rfind('b' + s[1000000:]) }}",
    "stripped of many": "{% set s = 'a' * 9999999 %}{{ s.strip('b' * 9999999 + 'a') }}",
    "trimmed of many": "{% set s = 'a' * 9999999 %}{{ s | trim('b' * 9999999 + 'a') }}",
    "namespaces": "{% set n = namespace(t=(1,) * 99999) %}{{ [n] * 99999 | sort(attribute='t') | length }}",
}
"""What looks at no clock while it runs, and would run for hours."""
STEADY = {
    "constants": "{{ ('a' * 9999999) | upper | lower | length }}" * 999,
    "comparisons": "{% set s = 'a' * 9999999 %}{% set t = s ~ '' %}" + "{% set x = s == t %}" * 200,
    "attributes": "{{ ([{}] * 99999) | map(attribute=('a.' * 9999), default={}) | list | length }}",
    "tests": "{% set s = 'a' * 9999999 %}{{ (['b'] * 999999) | select('in', s) | list | length }}",
}
"""What would be long together, if nobody looked in between."""


@pytest.mark.parametrize("template", SLOW.values(), ids=SLOW)
def test_what_looks_at_no_clock_is_refused_before_it_runs(template):
    began = time.thread_time()
    with pytest.raises(DataError, match=r"of org/name (uses the filter|calls|searches|keeps)"):
        render(template)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("template", STEADY.values(), ids=STEADY)
def test_the_clock_is_looked_at_between_all_that_takes_time(monkeypatch, template):
    monkeypatch.setattr(budget, "SECONDS", 0.05)
    began = time.thread_time()
    with pytest.raises(DataError, match=r"of org/name takes more than 0\.05 s"):
        render(template)
    assert time.thread_time() - began < 5


def test_a_filter_that_is_refused_is_named():
    with pytest.raises(DataError) as caught:
        render("{{ 'a b' | wordwrap(1) }}")
    assert str(caught.value) == (
        "r.yaml:3: model.tokenizer: the chat template of org/name uses the filter 'wordwrap', "
        "which is not bounded in time and size\n"
        "  -> correct it (chat_template.jinja or tokenizer_config.json), or name another model.tokenizer"
    )
    assert render("{% if false %}{{ 'a b' | wordwrap(1) }}{% endif %}fine") == "fine"


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_what_would_never_end_is_refused(monkeypatch, template):
    monkeypatch.setattr(budget, "SECONDS", 0.2)
    with pytest.raises(DataError) as caught:
        render(template)
    assert str(caught.value) == (
        "r.yaml:3: model.tokenizer: the chat template of org/name takes more than 0.2 s for one conversation\n"
        "  -> correct it (chat_template.jinja or tokenizer_config.json), or name another model.tokenizer"
    )


@pytest.mark.parametrize("template", HUGE.values(), ids=HUGE)
def test_what_would_fill_the_memory_is_refused(monkeypatch, template):
    monkeypatch.setattr(budget, "PRODUCED", 2**24)
    began = time.thread_time()
    with pytest.raises(DataError, match=r"of org/name (makes|formats|uses the filter|calls|searches)"):
        render(template)
    assert time.thread_time() - began < 5


@pytest.mark.parametrize("mask", [False, True])
def test_also_where_the_answers_are_marked(monkeypatch, mask):
    monkeypatch.setattr(budget, "SECONDS", 0.2)
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
    "formats": "{{ 'Date 20240726 %s' % messages[0].content }}{{ 'Role: {}; 20240726'.format('x') }}"
    "{{ '100%% %d' % 5 }}"
    "{{ '%(role)s: %(content)-20s|' % messages[0] }}{{ '{0[role]:>12}{{}}{0[content]!r}'.format(messages[1]) }}",
    "JSON": "{{ messages | tojson }}{{ messages | tojson(indent='  ', sort_keys=true) }}{{ '\u00fc' | tojson }}"
    "{{ [1, 2.5, none] | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "markup": "{% autoescape true %}{{ '<' }}{{ '<' | safe + '>' }}{{ '{}'.format('<') }}{% endautoescape %}",
    "ChatML": "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
    "{% endif %}{% for m in rest %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 3": "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system_message }}"
    "{%- for message in messages %}{%- if 'tool_calls' in message %}{%- if not message.tool_calls|length == 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set tool_call = message.tool_calls[0] %}{{- '{\"name\": \"' + tool_call.name + '\", ' }}"
    "{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}{%- for k, v in tool_call.arguments | items %}"
    "{{- k + '=\"' ~ v ~ '\"' }}{%- if not loop.last %}, {% endif %}{%- endfor %}{%- else %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim }}{%- endif %}"
    "{%- endfor %}",
    "Mistral": "{%- set loop_messages = messages[1:] %}{%- set ns = namespace() %}{%- set ns.index = 0 %}"
    "{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for message in loop_messages %}{%- if not (message.role == 'tool' or (message.tool_calls is defined and "
    "message.tool_calls is not none)) %}{%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}"
    "{{- raise_exception('After the optional system message, roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{{- bos_token }}{%- for message in loop_messages %}"
    "{%- if message['role'] == 'user' %}{%- if message == user_messages[-1] %}{{- '[AVAILABLE_TOOLS] [' }}"
    "{%- for key, val in message.items() if key != 'content' %}{%- if val is string %}"
    "{{- '\"' + key + '\": \"' + val + '\"' }}{%- else %}{{- '\"' + key + '\": ' + val|tojson }}{%- endif %}"
    "{%- endfor %}{{- '][/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + message['content'] + '[/INST]' }}"
    "{%- else %}{{- ' ' + message['content']|trim + eos_token}}{%- endif %}{%- endfor %}",
    "Gemma": "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set prefix = messages[0]['content'] + '\n' "
    "-%}{%- set loop_messages = messages[1:] -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}"
    "{%- endif -%}{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}"
    "{%- if message['content'] is iterable and message['content'] is not string -%}{%- for item in message['content'] "
    "-%}{{ item['text'] | trim }}{%- endfor -%}{%- else -%}{{ message['content'] | trim }}{%- endif -%}"
    "{{ '<end_of_turn>\n' }}{%- endfor -%}",
    "Qwen 3": "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and not (message.content.startswith('<tool_response>') and "
    "message.content.endswith('</tool_response>')) %}{%- set ns.multi_step_tool = false %}"
    "{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}{%- for message in messages %}"
    "{%- set content = message.content if message.content is string else '' %}{%- if message.role == 'assistant' %}"
    "{%- set content = '<think>\nsum\n</think>\n\n' + content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- if loop.index0 > ns.last_query_index %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- endif %}"
    "{%- for tool_call in message.tool_calls %}{%- if tool_call.function %}{%- set tool_call = tool_call.function %}"
    '{%- endif %}{{- \'<tool_call>\n{"name": "\' }}{{- tool_call.name }}{%- if tool_call.arguments is string %}'
    "{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{%- endfor %}{%- else %}"
    "{{- message.role + content }}{%- endif %}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}",
    "DeepSeek": "{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}"
    "{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- endif %}"
    "{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}{%- macro one(call, first) -%}"
    "{%- macro fenced(text) -%}```json\n{{ text }}\n```{%- endmacro -%}"
    "{{ ('' if first else '\n') + '<tool>' + call['name'] + '\n' + fenced(call['arguments'] | tojson(indent=4)) }}"
    "{%- endmacro -%}{%- for message in messages %}{%- if message['role'] == 'assistant' %}"
    "{%- for tool in message['tool_calls'] %}{{ one(tool, loop.first) }}{%- endfor %}{% set content = "
    "message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content + eos_token }}{%- endif %}{%- endfor -%}",
    "gpt-oss": "{%- macro kind(spec, depth) -%}{%- if spec.type == 'array' -%}"
    "{{ kind(spec['items'], depth + 1) + '[]' }}"
    "{%- elif spec.type is iterable and spec.type is not string -%}{{ spec.type | join(' | ') }}"
    "{%- elif spec.type == 'object' -%}{{ '{\n' }}{%- for name, inner in spec.properties.items() -%}"
    "{{ ' ' * depth + name + ('?' if name not in (spec.required or []) else '') + ': ' + kind(inner, depth + 1) }}"
    "{{ ', ' if not loop.last }}{%- endfor -%}{{ '}' }}{%- elif spec.enum -%}"
    "{{ '\"' + spec.enum | join('\" | \"') + '\"' }}{%- else -%}{{ spec.type | default('any') }}{%- endif -%}"
    "{%- endmacro -%}{{ kind({'type': 'object', 'required': ['a'], 'properties': {'a': {'type': 'array', 'items': "
    "{'type': ['string', 'null']}}, 'b': {'enum': ['x', 'y']}, 'c': {}}}, 1) }}"
    "{{ messages | rejectattr('role', 'in', ['system', 'tool']) | map(attribute='content') | unique | sort | join }}"
    "{{ {'b': 1, 'a': 2} | dictsort | first | last }}{{ 'a b' | title | capitalize }}{{ messages | last | length }}"
    "{{ 'a\nb' | indent(2, true) }}{{ '7' | int + 1 }}{{ [1, 2] | sum }}{{ [3, 1] | max }}{{ 'abc' | reverse }}",
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
    monkeypatch.setattr(budget, "SECONDS", 0.1)
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
    monkeypatch.setattr(budget, "SECONDS", 0.2)
    tokenizer_with(ENDLESS["macros"]).save_pretrained(tmp_path)
    section = ModelSection(tokenizer=str(tmp_path))
    loaded = copy.deepcopy(load_tokenizer(section, where=lambda key: f"r.yaml:5: {key}"))
    with pytest.raises(DataError) as caught:
        loaded.apply_chat_template(TALK)
    assert str(caught.value).startswith(f"r.yaml:5: model.tokenizer: the chat template of {tmp_path} takes more than")
