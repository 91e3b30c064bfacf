"""Conversations as token ids, with the tokens that are learned.

In: an example of any known shape (messages, ShareGPT, Alpaca, prompt and completion, text). Out: token ids, labels and
weights. One way through it, each page a step:

    shapes      which columns an example has, and the conversation in them
    messages    what a conversation may hold, checked and in one form
    template    that conversation as text and tokens, by the chat template of a tokenizer
    answers     where in that text each answer of the assistant stands
    masks       which of the tokens are learned, with which weight

What cannot be told for certain is refused: a wrong mask would train a wrong model and say nothing.
"""
