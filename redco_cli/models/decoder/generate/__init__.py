"""From prompts to texts, with a key-value cache, as one compiled program.

In come prompts padded on either side, and settings of generation. Out go token ids, padded behind their ends. Start
with `engine`: it reads the prompts (`prompts`) and then chooses a token at a time (`sampling`), or searches
(`search`). What each setting means is what it means in PyTorch's transformers; one that is not followed is refused by
name.
"""
