"""What a model is called and what its config says, before there is a model.

In comes the `model` section of a recipe. Out goes a transformers config whose keys are proved (`read`), the task that
is meant (`tasks`), and a tokenizer (`tokenizer`), for which `byte_tokenizer` needs no files and whose `chat_template`
has limits. `hub` keeps the Hugging Face hub's retries to one line. Start with `read`. Nothing here reads weights.
"""
