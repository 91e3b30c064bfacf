"""A trained model as a directory that transformers and vLLM load; a plugin's own model as one that `load_model` reads.

In: a model, its parameters on the devices, and the checkpoint that its config and tokenizer are from. Out:
`config.json`, safetensors under PyTorch's names, generation config and tokenizer files, moved into place only when
loading them again gave the same logits.

Start with `export.export_model`, the whole path. `tensors` names the tensors and fetches each from its devices, `files`
writes them and what stands beside them, `tokenizer` writes the built-in byte tokenizer, `check` loads and compares.
`own_module` does all of it for the model of a plugin's `build_model`, whose recipe and plugin go along. `adapter` does
it for an adapter alone, in the form of `peft` or of `diffusers`, both of which write modules as in `adapted_modules`.
"""
