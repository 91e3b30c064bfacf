"""Tokenizers made here, with any chat template, and conversations as tests write and read them."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from redco_cli.plugin.chat.masks import TrainOn, masked
from redco_cli.plugin.chat.messages import checked_messages, checked_tools
from redco_cli.plugin.chat.shapes import Conversation

SPECIAL = re.compile(
    r"<[|\uff5c][^<>{}]*?[|\uff5c]>|<\|?(?:start_of_turn|end_of_turn|bos|eos|s|e|think|tool_call|tool_response|turn)\|?>"
    r"|</(?:s|think|tool_call|tool_response)>|<(?:turn|channel|tool_call|tool_response|tool)\|>"
    r"|<\|(?:turn|channel|tool_call|tool_response|tool)>|\[gMASK\]|<sop>|<end_of_utterance>|\[/?INST\]"
)
"""What templates write that is one token."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
        },
    }
]


def hf_tokenizer(template: str | None, merges: Sequence[tuple[str, str]] = (), eos: str = "<e>") -> Any:
    """A byte-level BPE tokenizer of Hugging Face; what looks like a special token in the template is one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token=eos, chat_template=template)
    special = sorted({*SPECIAL.findall(template or "")} - {"<bos>", eos})
    made.add_special_tokens({"additional_special_tokens": special})
    return made


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def calling(content: Any = "", **more: Any) -> dict[str, Any]:
    """The assistant asks for the weather."""
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    return assistant(content, tool_calls=[call], **more)


def told(content: Any) -> dict[str, Any]:
    """What a tool answers."""
    return {"role": "tool", "name": "weather", "content": content}


def conversation(messages: Sequence[Any], tools: Any = None, completion: int | None = None) -> Conversation:
    """Messages as the columns of an example hold them."""
    found = checked_messages(list(messages), "messages")
    return Conversation("messages", found, checked_tools(tools, "tools"), completion)


def marked(tokenizer: Any, ids: Sequence[int], weights: Sequence[float]) -> str:
    """The text of tokens, with brackets around those that are learned."""
    text = ""
    for learns, run in groupby(zip(ids, weights, strict=True), key=lambda pair: pair[1] > 0):
        part = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        text += f"[{part}]" if learns else part
    return text


def learned(tokenizer: Any, messages: Sequence[Any], train_on: TrainOn = "all", tools: Any = None) -> str:
    """The text of a conversation, with brackets around what is learned of it."""
    found = masked(tokenizer, conversation(messages, tools), train_on)
    assert (found.labels == found.ids)[found.weights > 0].all()
    assert (found.labels == -100)[found.weights == 0].all()
    return marked(tokenizer, found.ids, found.weights)
