"""From prompts to texts, token by token with a key-value cache, whatever the model.

In come prompts padded on the left, a `Reader` that turns tokens into logits, and settings of generation. Out go token
ids, padded behind their ends. Start with `engine`: it lets the reader read the prompts (`prompts`) and then chooses a
token at a time by their scores (`scores`), or searches (`search`). What each setting means (`settings`) is what it
means in PyTorch's transformers; one that is not followed is refused by name.
"""
