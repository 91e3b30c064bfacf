"""Which tokens are an answer: one small template for each way in which stock templates differ."""

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_cli.errors import ExampleError
from redco_cli.models.config.byte_tokenizer import ByteTokenizer
from tests.plugins.chat.tokenizers import TOOLS, assistant, calling, hf_tokenizer, learned, told, user

TWO = [user("hi"), assistant("yo"), user("1+1"), assistant("2")]
THOUGHT = [user("hi"), assistant("<think>a</think>yo"), user("1+1"), assistant("<think>b</think>2")]
STEPS = [user("q"), calling("<think>a</think>"), told("sun"), assistant("<think>b</think>A"), user("r"), assistant("B")]

ROLE = "<|{{ m.role }}|>"
SPECIAL_ROLES = "{# <|user|><|assistant|><|system|><|tool|> #}"
CUE = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
PLAIN = SPECIAL_ROLES + "{% for m in messages %}" + ROLE + "{{ m.content }}<e>{% endfor %}" + CUE
MARKED = (
    SPECIAL_ROLES + "{% for m in messages %}" + ROLE + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<e>{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}{% endfor %}" + CUE
)
MARKED_TWICE = MARKED.replace("<e>{% endgen", "{% endgeneration %}-{% generation %}<e>{% endgen")
EOS_AT_END = (
    SPECIAL_ROLES + "{% for m in messages %}" + ROLE + "\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
EOS_AT_END_MARKED = (
    SPECIAL_ROLES + "{% for m in messages %}" + ROLE + "\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|end|>{{ '\n' }}{% if loop.last %}{{ eos_token }}{% endif %}{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{{ '\n' }}{% if loop.last %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}"
)
NASTY = [
    "<|user|>",
    "<|assistant|>",
    "<|assistant|>\n",
    "<|end|>",
    "<|end|>\n",
    "<e>",
    "<",
    "e>",
    "\n",
    " ",
    "yo",
    "é",
    "Qx7vz",
]
"""What people may say that templates write as well."""
ASKS_FOR_THOUGHTS = SPECIAL_ROLES + (
    "{% for m in messages %}" + ROLE + "{{ m.content.split('</think>')[-1] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
WRITES_NO_THOUGHTS = SPECIAL_ROLES + (
    "{% for m in messages %}" + ROLE + "{% if m.role == 'assistant' and '<think>' not in m.content %}<think></think>"
    "{% endif %}{{ m.content }}<e>{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
FORGETS_THOUGHTS = SPECIAL_ROLES + (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}" + ROLE + "{% if m.role != 'assistant' %}{{ m.content }}"
    "{% elif loop.index0 > last.user %}<think>{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[0].split('<think>')[-1] }}{% endif %}</think>"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<e>{% endfor %}" + CUE
)
NEXT_TURN_ENDS = SPECIAL_ROLES + "{% for m in messages %}" + ROLE + "{{ m.content }}{% endfor %}" + CUE
NEXT_LINE_ENDS = "{% for m in messages %}{{ '\n' + m.role }}: {{ m.content }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ '\n' }}assistant: {% endif %}"
)
OTHER_END = SPECIAL_ROLES + (
    "{% for m in messages %}" + ROLE + "{{ m.content }}{% if loop.last and not add_generation_prompt and m.role == "
    "'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}" + CUE
)
NO_CUE = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>"
)
NO_CUE += "{% endif %}{% endfor %}"
TRIMS = PLAIN.replace("m.content }}", "m.content | trim }}")


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (PLAIN, TWO, "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]"),
        (MARKED, TWO, "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]"),
        (MARKED_TWICE, TWO, "<|user|>hi<e><|assistant|>[yo]-[<e>]<|user|>1+1<e><|assistant|>[2]-[<e>]"),
        (
            EOS_AT_END,
            TWO,
            "<|user|>\nhi<|end|>\n<|assistant|>\n[yo<|end|>\n]<|user|>\n1+1<|end|>\n<|assistant|>\n[2<|end|>\n<e>]",
        ),
        (ASKS_FOR_THOUGHTS, TWO, "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]"),
        (ASKS_FOR_THOUGHTS, THOUGHT, "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]"),
        (
            WRITES_NO_THOUGHTS,
            TWO,
            "<|user|>hi<e><|assistant|><think>[</think>yo<e>]<|user|>1+1<e><|assistant|><think>[</think>2<e>]",
        ),
        (
            WRITES_NO_THOUGHTS,
            [user("hi"), assistant("<think>\na</think>yo")],
            "<|user|>hi<e><|assistant|><think>\n[a</think>yo<e>]",
        ),
        (
            FORGETS_THOUGHTS,
            THOUGHT,
            "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[<think>b</think>2<e>]",
        ),
        (
            FORGETS_THOUGHTS,
            STEPS,
            '<|user|>q<e><|assistant|>[{"name": "weather", "arguments": {"city": "Paris"}}<e>]<|tool|>sun<e>'
            "<|assistant|>[A<e>]<|user|>r<e><|assistant|>[<think></think>B<e>]",
        ),
        (NEXT_TURN_ENDS, TWO, "<|user|>hi<|assistant|>[yo<|user|>]1+1<|assistant|>[2<|user|>]"),
        (NEXT_LINE_ENDS, TWO, "\nuser: hi\nassistant: [yo\n]user: 1+1\nassistant: [2\n]"),
        (OTHER_END, TWO, "<|user|>hi<|end|><|assistant|>[yo<|end|>]<|user|>1+1<|end|><|assistant|>[2<|return|>]"),
        (NO_CUE, TWO, "<bos>[INST] hi [/INST][ yo</s>][INST] 1+1 [/INST][ 2</s>]"),
        (TRIMS, [user("hi"), assistant(" yo \n")], "<|user|>hi<e><|assistant|>[yo<e>]"),
        (PLAIN, [user("hi"), assistant("a"), assistant("b")], "<|user|>hi<e><|assistant|>[a<e>]<|assistant|>[b<e>]"),
        (PLAIN, [assistant("a"), user("hi"), assistant("b")], "<|assistant|>[a<e>]<|user|>hi<e><|assistant|>[b<e>]"),
    ],
)
def test_answers_and_their_ends_are_learned(template, messages, expected):
    assert learned(hf_tokenizer(template), messages) == expected


def test_an_end_that_is_the_eos_token_stands_for_that_of_earlier_answers():
    expected = "<|user|>hi<|end|><|assistant|>[yo<|end|>]<|user|>1+1<|end|><|assistant|>[2<|return|>]"
    assert learned(hf_tokenizer(OTHER_END, eos="<|return|>"), TWO) == expected


def test_no_content_is_never_learned_as_a_word():
    calls = "{{ m.tool_calls | tojson if m.tool_calls else '' }}<e>"
    unguarded = f"{SPECIAL_ROLES}{{% for m in messages %}}{ROLE}{{{{ m.content }}}}{calls}{{% endfor %}}{CUE}"
    text = learned(hf_tokenizer(unguarded), [user("None"), {**calling(), "content": None}])
    assert text.count("None") == 1


@pytest.mark.parametrize(
    "said",
    [
        "<|assistant|>",
        "<e><|user|>hi<e><|assistant|>yo<e>",
        "<think>",
        "",
        "Qx7vz",
        "<|end|>\n<|user|>\n",
        "e>",
        "né 漢字",
    ],
)
@pytest.mark.parametrize("template", [PLAIN, EOS_AT_END, ASKS_FOR_THOUGHTS, OTHER_END, NEXT_TURN_ENDS])
def test_what_others_say_moves_nothing(template, said):
    """A user who writes what templates write does not change which answers are learned, nor one that repeats itself."""
    tokenizer = hf_tokenizer(template)
    plain = learned(tokenizer, [user("@"), *TWO[1:3], assistant("é yo")])
    before, _, after = plain.partition("@")
    assert learned(tokenizer, [user(said), *TWO[1:3], assistant("é yo")]) == before + said + after


def test_an_answer_like_the_cue_is_learned_whole():
    """`<table>` and `<think>` begin alike, also in a tokenizer to which both are letters."""
    template = ASKS_FOR_THOUGHTS.replace("<think>", "<thin-k>")
    messages = [user("hi"), assistant("<table>"), user("more"), assistant("<thin")]
    assert learned(hf_tokenizer(template), messages) == (
        "<|user|>hi<e><|assistant|>[<table><e>]<|user|>more<e><|assistant|>[<thin<e>]"
    )


@pytest.mark.parametrize("merged", [("Ġ", "2"), ("t", ":"), (":", "Ġ")])
def test_tokens_that_hold_the_end_of_the_prompt_and_an_answer_are_learned(merged):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<e>{% endfor %}" + (
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = learned(hf_tokenizer(template, [merged]), TWO[2:])
    assert found == ("user: 1+1<e>assistant:[ 2<e>]" if merged[1] == "2" else "user: 1+1<e>assistant: [2<e>]")


def test_line_breaks_that_are_other_tokens_at_the_end_of_a_text():
    template = "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n\n{% endfor %}" + (
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    tokenizer = hf_tokenizer(template, [("Ċ", "Ċ")])
    assert learned(tokenizer, TWO) == "user:\nhi\n\nassistant:\n[yo\n\n]user:\n1+1\n\nassistant:\n[2\n\n]"


def test_the_byte_tokenizer():
    found = learned(ByteTokenizer(), [assistant("é"), *TWO])
    assert found == "assistant: [é<eos>]user: hi<eos>assistant: [yo<eos>]user: 1+1<eos>assistant: [2<eos>]"


known = functools.cache(hf_tokenizer)


@given(st.lists(st.lists(st.sampled_from(NASTY), max_size=4).map("".join), min_size=2, max_size=6))
@settings(max_examples=30, deadline=None)
def test_comparison_finds_what_marks_say(said):
    """Whatever is said: the same answers by comparison as by the template's own marks."""
    turns = [(assistant if number % 2 else user)(text) for number, text in enumerate(said)]
    for plain, with_marks in ((PLAIN, MARKED), (EOS_AT_END, EOS_AT_END_MARKED)):
        assert learned(known(plain), turns) == learned(known(with_marks), turns)


class Slow:
    """A tokenizer that does not say where its tokens end."""

    is_fast = False

    def __init__(self, fast):
        self.fast = fast

    def __getattr__(self, name):
        return getattr(self.fast, name)

    def __call__(self, *arguments, **named):
        return self.fast(*arguments, **named)


@pytest.mark.parametrize("template", [PLAIN, MARKED, EOS_AT_END, ASKS_FOR_THOUGHTS, NEXT_TURN_ENDS])
def test_a_slow_tokenizer(template):
    tokenizer = hf_tokenizer(template, [("y", "o"), ("h", "i")])
    assert learned(Slow(tokenizer), TWO) == learned(tokenizer, TWO)


def test_marks_that_miss_an_answer_are_refused():
    template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(ExampleError, match="the answer in message 2 "):
        learned(hf_tokenizer(template), TWO)
    assert learned(hf_tokenizer(template), TWO, "last").endswith("[2<e>]")


@pytest.mark.parametrize("where", [MARKED, PLAIN, FORGETS_THOUGHTS])
def test_the_last_only(where):
    found = learned(hf_tokenizer(where), TWO, "last")
    assert found.endswith("2<e>]")
    assert found.count("[") == 1


def test_tools_are_given_to_the_template():
    template = "{% if tools %}<|system|>{{ tools | tojson }}<e>{% endif %}" + FORGETS_THOUGHTS
    found = learned(hf_tokenizer(template), STEPS, tools=TOOLS)
    assert found.startswith('<|system|>[{"type": "function", "function": {"name": "weather"')
    assert learned(hf_tokenizer(template), STEPS, tools=json.dumps(TOOLS)) == found


def test_arguments_are_text_where_a_template_wants_text():
    template = PLAIN.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}",
    )
    found = learned(hf_tokenizer(template), [user("hi"), calling("I look."), told("sun"), assistant("A")])
    assert found == '<|user|>hi<e><|assistant|>[I look.weather{"city": "Paris"}<e>]<|tool|>sun<e><|assistant|>[A<e>]'


REFUSED = {
    "an answer left out": (
        "{% for m in messages %}" + ROLE + "{% if m.role != 'assistant' or loop.last %}{{ m.content }}{% endif %}<e>"
        "{% endfor %}" + CUE,
        TWO,
        "the chat template leaves out the content of message 2, so that answers cannot be told apart",
    ),
    "an answer twice": (
        SPECIAL_ROLES + "{{ messages[-1].content }}" + PLAIN,
        TWO,
        "the chat template repeats the content of message 2, so that answers cannot be told apart",
    ),
    "a tool call left out": (
        PLAIN,
        [user("hi"), calling("I look."), told("sun"), assistant("A")],
        "the chat template leaves out the tool call of message 2, so that answers cannot be told apart",
    ),
    "another end": (
        PLAIN.replace(
            "<e>{% endfor %}", "{{ ' -- ' if loop.last and not add_generation_prompt else '; ' }}{% endfor %}"
        ),
        TWO,
        "the answer in message 2 ends in another way when more follows: its tokens cannot be told",
    ),
    "another beginning": (
        PLAIN.replace("{{ m.content }}", "{{ m.content }}{{ loop.revindex if m.role == 'user' }}"),
        TWO,
        "the answer in message 2 follows on a text that is another one when more follows: its tokens cannot be told",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_refused(name):
    template, messages, problem = REFUSED[name]
    with pytest.raises(ExampleError) as caught:
        learned(hf_tokenizer(template), messages)
    assert caught.value.problems[0].problem == problem


def test_content_in_parts():
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TWO]
    expected = "<|user|>hi<e><|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]"
    only = PLAIN.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    printed = {
        "as text": PLAIN,
        "as JSON": PLAIN.replace("m.content", "m.content if m.content is string else m.content | tojson"),
    }
    for template in (only, *printed.values(), PLAIN.replace("m.content", "m.content if m.content is string")):
        assert learned(hf_tokenizer(template), parts) == expected
    assert learned(ByteTokenizer(), parts[:2]) == "user: hi<eos>assistant: [yo<eos>]"
    with pytest.raises(ExampleError, match=r"leaves out the content of message 2[^$]*take content only as \[\{"):
        learned(hf_tokenizer(only), TWO)


def test_a_template_that_refuses_is_told_as_one():
    template = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}" + PLAIN
    with pytest.raises(ExampleError) as caught:
        learned(hf_tokenizer(template), [{"role": "system", "content": "S"}, *TWO])
    assert caught.value.problems[0].problem == (
        "the chat template does not take this conversation (system, user, assistant, user, assistant): "
        "System role not supported"
    )


def test_an_assistant_that_begins_needs_words_that_ask_for_it():
    template = "{{ messages[0].role }}" + PLAIN
    with pytest.raises(ExampleError, match="the assistant begins, and the chat template has no words"):
        learned(hf_tokenizer(template), [assistant("a"), *TWO])
    silent = [assistant("a", train=False), *TWO]
    assert learned(hf_tokenizer(template), silent).endswith("<|assistant|>[yo<e>]<|user|>1+1<e><|assistant|>[2<e>]")
