"""Which keys of a config transformers reads: recorded on tiny PyTorch models, and found in its sources.

`python -m tests.models.config.reads` writes `redco_cli/models/known_keys.json` anew: after a change of the pinned
version of transformers, or of the model types that are covered.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.backbone_utils import BackboneConfigMixin

from redco_cli.models import known_keys
from redco_cli.models.config.tasks import GENERATING, flax_class_names, supported_model_types
from redco_cli.models.families.registry import families
from tests.models.flax.tiny import CONFIGS, TORCH_CLASSES, config_for, inputs_for

SOURCES = Path(transformers.__file__).parent
SHARED = (
    "modeling_utils.py",
    "configuration_utils.py",
    "masking_utils.py",
    "cache_utils.py",
    "modeling_flash_attention_utils.py",
    "generation/utils.py",
    "generation/candidate_generator.py",
    "generation/configuration_utils.py",
    "integrations/sdpa_attention.py",
    "integrations/flash_attention.py",
    "integrations/flex_attention.py",
    "loss/loss_utils.py",
)
"""What every model is built, run and made to generate by."""
ROPE = "modeling_rope_utils.py"
_DESCRIBING = {"auto_map", "torch_dtype", "model_type", "num_labels"}
"""Of the checkpoint, for whoever finds and loads it."""
_CONFIGS = frozenset({"config", "decoder_config", "encoder_config", "text_config", "vision_config", "model_config"})
"""How the sources call a config."""


def table() -> dict[str, Any]:
    """What `known_keys.json` should hold."""
    recorded = recorded_reads(model_types())
    shared = [_reads(_tree(SOURCES / name), _CONFIGS) for name in SHARED]
    everywhere = set().union(recorded[""], *shared, PretrainedConfig().to_dict())
    generation = set(vars(GenerationConfig())) - {"_from_model_config", "transformers_version"}
    found: dict[str, Any] = {
        "transformers": transformers.__version__,
        "everywhere": sorted((_settings(everywhere) | _DESCRIBING) - generation),
        "generation": sorted(_settings(generation)),
        "rope_scaling": {kind: sorted(rope_reads(kind)) for kind in sorted(ROPE_INIT_FUNCTIONS)},
        "model_types": {},
    }
    for name in model_types():
        config_class = CONFIG_MAPPING[name]
        by_torch = recorded.get(name, set()) | static_reads(config_class)
        if issubclass(config_class, BackboneConfigMixin):
            by_torch |= {"out_features", "out_indices"}  # which the code of all backbones reads by other names
        own = _stored(_settings(by_torch, config_class) | set(found["everywhere"]), config_class)
        found["model_types"][name] = sorted(own - set(found["everywhere"]) - generation)
    return found


def model_types() -> list[str]:
    """Those that the decoder or a Flax class covers, and the parts of such; of a model with images the text part."""
    from transformers.models.auto.modeling_flax_auto import FLAX_MODEL_MAPPING_NAMES

    wholes = {whole for family in families().values() for whole in family.part_of}
    known = {*families(), *supported_model_types(), *FLAX_MODEL_MAPPING_NAMES} & set(CONFIG_MAPPING.keys()) - wholes
    parts = {part for name in known for part in CONFIG_MAPPING[name].sub_configs.values()}
    return sorted(known | {part.model_type for part in parts if part is not AutoConfig})


def _settings(names: Iterable[str], config_class: Any = PretrainedConfig) -> set[str]:
    """Those of the attributes that a `config.json` may hold: no methods, and nothing that a class says of itself."""
    properties = {"output_attentions", "num_labels", "out_features", "out_indices"}
    others = {name for name in names if name[:2] == "__" or hasattr(config_class, name) or hasattr(dict, name)}
    return set(names) - (others - properties)


def _stored(names: Iterable[str], config_class: Any) -> set[str]:
    """Attributes by the names that `config.json` has for them."""
    return {config_class.attribute_map.get(name, name) for name in names}


def static_reads(config_class: Any) -> set[str]:
    """Attributes of this config that the sources of its PyTorch models load, by name or by `getattr`."""
    path = Path(inspect.getfile(config_class))
    others = {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef)} - {config_class.__name__}
    found = config_class_reads(path, config_class.__name__)
    for source in sorted(path.parent.glob("modeling_*.py")):
        if not source.name.startswith(("modeling_flax_", "modeling_tf_")):
            tree = _tree(source)
            tree.body = [node for node in tree.body if not _built_from(node) & others]
            found |= _reads(tree, _CONFIGS)
            if "ROPE_INIT_FUNCTIONS" in source.read_text(encoding="utf-8"):
                found |= _reads(_tree(SOURCES / ROPE), _CONFIGS)
    return found


def _built_from(node: ast.stmt) -> set[str]:
    """The classes of configs that a class is built from, as it says itself."""
    if not isinstance(node, ast.ClassDef):
        return set()
    makers = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    return {_name(one.annotation) for maker in makers for one in maker.args.args if one.annotation is not None}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def config_class_reads(path: Path, wanted: str) -> set[str]:
    """What a config class makes something of, more than to keep it under its own name."""
    (tree,) = (node for node in _tree(path).body if isinstance(node, ast.ClassDef) and node.name == wanted)
    found = _reads(tree, frozenset({"self", *_CONFIGS}))
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and _name(call.func.value) == "kwargs" and call.args:
            found |= _constant(call.args[0])  # kwargs.pop("x")
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
        parameters = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
        kept = {id(node.value) for node in ast.walk(function) if _keeps(node)}
        kept |= {id(word.value) for node in ast.walk(function) if isinstance(node, ast.Call) for word in node.keywords}
        loads = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
        found |= {node.id for node in loads if node.id in parameters and id(node) not in kept}
    return found


def _keeps(node: ast.AST) -> bool:
    """`self.x = x`"""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.targets[0].attr == node.value.id
    )


def _reads(tree: ast.AST, receivers: frozenset[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) in receivers:
            found.add(node.attr)
        if isinstance(node, ast.Call) and _name(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            found |= _constant(node.args[1]) if _name(node.args[0]) in receivers else set()
    return found


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _constant(node: ast.AST) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def rope_reads(kind: str) -> set[str]:
    """The keys of `rope_scaling` that a kind of scaling reads, besides the one that names the kind."""
    recorded = recorded_rope_reads(kind) if kind != "default" else set()
    tree = ast.parse(inspect.getsource(ROPE_INIT_FUNCTIONS[kind]))
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and _name(node.value) == "rope_scaling":
            recorded |= _constant(node.slice)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            recorded |= _constant(node.args[0]) if _name(node.func.value) == "rope_scaling" else set()
    return recorded - {"type", "rope_type"}


class RecordingDict(dict[str, Any]):
    """A mapping that notes in `asked` which keys a model asks it for."""

    asked: ClassVar[set[str]] = set()

    def __getitem__(self, key: str) -> Any:
        self._note(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of any mapping."""
        self._note(key)
        return super().get(key, default)

    def _note(self, key: str) -> None:
        if sys._getframe(2).f_code.co_filename.endswith(ROPE):  # others copy and save it
            self.asked.add(key)


@contextlib.contextmanager
def recording() -> Iterator[set[tuple[str, str, str]]]:
    """Notes of every config which attributes are asked for: model type, attribute, and the file that asks."""
    asked: set[tuple[str, str, str]] = set()
    original = PretrainedConfig.__getattribute__

    def noting(self: Any, key: str) -> Any:
        if not key.startswith("__"):
            asked.add((type(self).model_type, key, sys._getframe(1).f_code.co_filename))
        return original(self, key)

    PretrainedConfig.__getattribute__ = noting
    try:
        yield asked
    finally:
        PretrainedConfig.__getattribute__ = original


def recorded_reads(names: Iterable[str]) -> dict[str, set[str]]:
    """What building, running and generating with tiny PyTorch models asks configs for, by model type.

    What the code that all models share asks for stands under no name.
    """
    with recording() as asked:
        for name in families().keys() & names:
            for changed in ({}, *families()[name].variants):
                exercise(name, "causal_lm", families()[name].example | changed)
        for name in CONFIGS.keys() & names:
            for task in flax_class_names(name):
                exercise(name, task, config_for(name, task))
    found: dict[str, set[str]] = {"": set()}
    for model_type, key, file in asked:
        path = Path(file)
        if (SOURCES / "models" in path.parents and "auto" not in path.parts) or path == SOURCES / ROPE:
            found.setdefault(model_type, set()).add(key)
        elif SOURCES in path.parents:
            found[""].add(key)
    return found


def exercise(model_type: str, task: str, values: Mapping[str, Any]) -> None:
    """Builds a model, runs it, and lets it generate."""
    values = copy.deepcopy({key: value for key, value in values.items() if key != "model_type"})
    config = CONFIG_MAPPING[model_type](**values)
    torch_class = getattr(transformers, TORCH_CLASSES[task])
    build = torch_class.from_config if hasattr(torch_class, "from_config") else torch_class
    model = build(config).eval()
    inputs = {name: torch.from_numpy(value) for name, value in inputs_for(model_type, task, length=16).items()}
    inputs = {name: value.long() if value.dtype == torch.int32 else value for name, value in inputs.items()}
    with torch.no_grad():
        model(**inputs)
        if task in GENERATING and model.can_generate():
            given = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
            model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=1, bos_token_id=1)


def recorded_rope_reads(kind: str) -> set[str]:
    """What a tiny Llama with this kind of scaling asks `rope_scaling` for."""
    RecordingDict.asked.clear()
    short = {"short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0]} if kind == "longrope" else {}
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 8, **short, **bounds}
    config = transformers.LlamaConfig(**families()["llama"].example)
    config.rope_scaling = RecordingDict(scaling)
    model = transformers.LlamaForCausalLM(config)
    model(input_ids=torch.ones((1, 12), dtype=torch.long))
    return set(RecordingDict.asked)


def written(found: Mapping[str, Any]) -> str:
    """The table as it is committed: a list of keys in a line."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(keys)}" for key, keys in value.items())
            lines.append(f"{json.dumps(name)}: {{\n{inner}\n }}")
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    known_keys.FILE.write_text(written(table()), encoding="utf-8")
