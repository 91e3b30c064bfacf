"""Stock chat templates of 40 models: what we learn, beside what TRL's training twins of them mark.

The templates are read from TRL's package, of which nothing is run: `make test-all` puts it into `.venv/oracles`;
elsewhere `TRL_FOLDER=DIR` says where the folder `trl` is (of `pip download --no-deps trl==1.16.0`, unpacked).
"""

import re

import pytest

from redco_cli.errors import RedcoError
from redco_cli.plugin.chat.masks import masked
from redco_cli.plugin.chat.template import Template
from tests.oracles import TRL
from tests.plugins.chat.tokenizers import TOOLS, assistant, calling, conversation, hf_tokenizer, told, user

FOLDER = None if TRL is None else TRL / "chat_templates"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="TRL's chat templates are not here: make test-all, or set TRL_FOLDER"),
]

THOUGHT = "<think>\nhm, yes\n</think>\n\n"
TWO = [user("hi"), assistant("yo"), user("1+1"), assistant("2")]
CONVERSATIONS = {
    "one": TWO[:2],
    "two": TWO,
    "system": [{"role": "system", "content": "S"}, *TWO],
    "thoughts": [user("hi"), assistant(THOUGHT + "yo"), user("1+1"), assistant(THOUGHT + "2")],
    "reasoning": [
        user("hi"),
        assistant("yo", reasoning_content="hm"),
        user("1+1"),
        assistant("2", reasoning_content="ho"),
    ],
    "tools": [user("hi"), calling(None), told("sun"), assistant("It is sunny.")],
    "steps": [
        user("hi"),
        calling(THOUGHT),
        told("sun"),
        assistant("It is sunny."),
        user("thanks"),
        assistant("np"),
    ],
    "unanswered": [*TWO[:2], user("bye")],
    "parts": [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in TWO],
}
"""What is said, in the order of the columns of the table."""

TABLE = {
    "cohere": "=====--==",  # roles must alternate, so no tools
    "cohere2": "=====--==",  # no tools before their answer
    # prompts end in `<think>`, which nothing follows in the conversation; thoughts dropped, which the twin keeps
    "deepseek_r1_distill": "<<<~<<x<<",
    "deepseekv3": "<<<<<<<<<",  # the same; `<|Assistant|>` is the prompt's
    # `<|tool_response>` ends a call, and stops generation; content and a call stand apart, around the tool's words
    "diffusion_gemma": "=====>x==",
    "gemma": "==-==--==",  # no system turn, roles must alternate
    "gemma3": "=====--==",  # roles must alternate
    "gemma4": "......x..",  # as diffusion_gemma
    "gemma4_v2": ".........",
    "gemma4_v3": "......x..",
    "gemma4_v4": "......x..",
    "gemma4_v5": "......x..",
    "glm4moe": "=========",
    "gptoss": "<<<<<<<<<",  # `<|start|>assistant` is the prompt's; `<|end|>` stands for `<|return|>` where more follows
    "idefics3": "xxxxx-xx=",  # content in parts only: of text it writes nothing
    "lfm2": "=====xx==",  # it does not write calls of tools: the twin learns `null`
    "lfm2_2_5": ".........",
    "lfm2_2_5_v2": ".........",
    "lfm2_2_5_vl": ".........",
    "lfm2_v2": "=========",
    "llama3": "=====xx==",  # the same: the twin learns `None`
    "llama3_1": ".........",
    "llama3_2": ".........",
    # content in parts only; the space after `[/INST]` is not the prompt's, and the twin leaves it out
    "llava_next": "-------->",
    "muse_glimmer": "<<<<<<<<<",  # `<|start|>assistant` is the prompt's
    "nemotron_3_5_lightning": "<<<<<<<<<",
    "nemotron_3_nano": "<<<<<<<<<",  # `<think>` is the prompt's, with and without thoughts
    "nemotron_3_super": "<<<<<<<<<",
    "nemotron_3_ultra": "<<<<<<<<<",
    "phi3": "=====xx==",  # it does not write calls of tools; `<|endoftext|>` at the very end only
    "phi3_5": "=====xx==",
    "qwen2_5": "<<<<<<<<<",  # the twin marks the line break after `assistant`, which is the prompt's
    "qwen2_5_vl": "=====xx==",  # it does not write calls of tools
    # thoughts of earlier turns are dropped, which the twin keeps: each turn is learned as it is rendered
    "qwen3": "=~~~~~~=~",
    "qwen3_5_nothink": "<~~~~<~<~",  # as qwen3; `<think>` is the prompt's
    "qwen3_5_think": "<~~~~<~<~",
    "qwen3_6": "<~~~~<~<~",
    "qwen3_8": "<<<<<<<<<",  # `<think>` is the prompt's
    "qwen3_instruct_2507": "=========",
    "qwen3_vl": "=========",
    "smolvlm": "xxxxx-xx=",  # as idefics3
}
"""Template to what happens with each conversation, in their order:

    =  the tokens that the twin marks
    <  those without the words that the stock template's prompt has written already when the model is asked
    >  another difference, explained beside it
    ~  the twin renders another text; ours is the stock's, with each answer in its rendered form
    .  there is no twin; ours is the stock's text with each answer in its rendered form
    x  we refuse, because the template leaves out what an answer says or calls, or writes it in two places
    -  the template itself refuses
"""


def outcome(name: str, messages: list, tools: list | None) -> str:
    """What happens, as a letter of the table."""
    assert FOLDER is not None
    stock = (FOLDER / f"{name}.jinja").read_text()
    twin = FOLDER / f"{name}_training.jinja"
    marked = twin.read_text() if twin.exists() else ""
    tokenizer, other = (hf_tokenizer(stock + marked, eos="<|endoftext|>") for _ in range(2))
    tokenizer.chat_template, other.chat_template = stock, marked
    found = conversation(messages, tools)
    try:
        ours = masked(tokenizer, found)
    except RedcoError as error:
        problem = error.problems[0].problem
        if "does not take this conversation" in problem:
            return "-"
        assert re.search("leaves out the (content|tool call) of message|ends in another way", problem), problem
        return "x"
    learns = (ours.weights > 0).tolist()
    answers = checked(tokenizer, found, ours.ids.tolist(), learns)
    if not marked:
        return "."
    text, marks = Template(other, found.tools).marked(found.messages[: answers[-1] + 1])
    ids, place = Template(other).tokens(text)
    if ids != ours.ids.tolist():
        return "~"
    theirs = [False] * len(ids)
    for start, stop in marks:
        theirs[place(start) : place(stop)] = [True] * (place(stop) - place(start))
    if learns == theirs:
        return "="
    extra = runs([one and not other for one, other in zip(theirs, learns, strict=True)])
    begins = dict(zip((start for start, _ in runs(learns)), answers, strict=True))
    for start, stop in extra:  # each just before an answer, and among the last words of the prompt for it
        prompt = Template(tokenizer, found.tools).text(found.messages[: begins.get(stop, 0)], prompt=True)
        if stop not in begins or tokenizer.decode(ids[start:stop]) not in prompt[-40:]:
            return ">"
    return "<" if all(other for one, other in zip(learns, theirs, strict=True) if one) else ">"


def checked(tokenizer, found, ids: list[int], learns: list[bool]) -> list[int]:
    """The numbers of the answers, once it is clear that the tokens are the stock's, and each answer a part of them."""
    answers = [number for number, one in enumerate(found.messages) if one["role"] == "assistant"]
    text = Template(tokenizer, found.tools).text(found.messages[: answers[-1] + 1])
    said = tokenizer.decode(ids, skip_special_tokens=False)
    assert said.startswith(text)
    assert len(Template(tokenizer).ids(said.removeprefix(text))) <= 1  # an end that the template does not write
    parts = [tokenizer.decode(ids[start:stop], skip_special_tokens=False) for start, stop in runs(learns)]
    assert len(parts) == len(answers)
    for part, number in zip(parts, answers, strict=True):
        message = found.messages[number]
        content = message["content"] or ""
        words = content if isinstance(content, str) else content[0]["text"]
        assert words.rpartition("</think>")[2].strip() in part
        assert ("weather" in part) == ("tool_calls" in message)
        assert not re.search(r"\bhi\b|1\+1|sun\b|thanks", part)
    return answers


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    """First and last + 1 of each row of true flags."""
    edges = [0, *map(int, flags), 0]
    starts = [place for place in range(len(flags) + 1) if edges[place + 1] > edges[place]]
    stops = [place for place in range(len(flags) + 1) if edges[place + 1] < edges[place]]
    return list(zip(starts, stops, strict=True))


def test_the_table_is_complete():
    assert FOLDER is not None
    stock = {path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")}
    assert stock == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_stock_template(name):
    found = [outcome(name, said, TOOLS if one in ("tools", "steps") else None) for one, said in CONVERSATIONS.items()]
    assert "".join(found) == TABLE[name]
