"""Every key of a recipe, its type, its unit and its default. Parser, `redco schema` and errors derive from here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from redco_cli.recipe.data import DataSection
from redco_cli.recipe.devices import MeshSection, ShardingSection
from redco_cli.recipe.durations import Duration, RunLength, WallTime
from redco_cli.recipe.keeping import CheckpointSection, LoggingSection
from redco_cli.recipe.redaction import Options
from redco_cli.recipe.section import (
    ChatTemplate,
    Fraction,
    NewTokens,
    Optimizer,
    Positive,
    Remat,
    Section,
    Strings,
    Task,
    contradiction,
)
from redco_cli.recipe.sections.adapter import AdapterSection
from redco_cli.recipe.sections.compiler import Xla
from redco_cli.recipe.sections.privacy import PrivacySection, refuse_beside_privacy, without_clipping
from redco_cli.recipe.sections.profile import ProfileSection


class ModelSection(Section):
    """Which model: one of `name` and `config`, or neither when the plugin has `build_model`."""

    name: str | None = None
    """Hub id, or a local directory with `config.json`; weights are loaded from there."""
    subfolder: str | None = None
    """The model's folder below `name`, where that is a pipeline of several: `unet` of a Stable Diffusion."""
    config: dict[str, Any] | None = None
    """Inline Hugging Face config (`model_type` and its settings): a model from scratch, randomly initialised."""
    params: str | None = None
    """Parameters of another run to begin with, instead of weights of `name` or random ones: its output directory, of
    which the newest whole checkpoint counts, or one `checkpoint-<step>` in it. Searched from the recipe's folder, then
    the working directory."""
    task: Task = "auto"
    """Which head; `auto` reads it from the config's `architectures`."""
    num_labels: Positive | None = None
    """Outputs of a classification head; default: as many as the config says."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute type. Parameters and optimizer state stay float32; `float16` trains with dynamic loss scaling."""
    implementation: Literal["auto", "hf_flax", "decoder"] = "auto"
    """Which code runs the model: `decoder` is our own for causal models, `hf_flax` the Flax class of transformers;
    `auto` takes ours where it covers the model."""
    tokenizer: str | None = None
    """`byte` (built in: the 256 bytes and four special tokens), a hub id or a directory; default: the model's own."""
    chat_template: ChatTemplate | None = None
    """Jinja text, or a file that holds it, for conversations; default: the tokenizer's own. A file is searched from the
    recipe's folder, then the working directory, and read once: a run keeps the text."""
    added_tokens: NewTokens | None = None
    """Special tokens that the tokenizer gets besides its own. The vocabulary of the model grows where it has no room,
    and weights of `name` begin with the mean of the others for each of them."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSection:
        if self.name is not None and self.config is not None:
            remedy = "keep name to load weights, or config to start from scratch"
            raise contradiction("model.config", "model.name is given too, and the two exclude each other", remedy)
        return self


class OtherModelSection(Section):
    """A model beside `model`: a teacher, a reference. What is not given here is as in `model`."""

    name: str | None = None
    """As in `model`; with this or a config of its own it has another architecture, and only `dtype` is as there."""
    subfolder: str | None = None
    """As in `model`; alone it is another model of the pipeline that `model.name` is."""
    config: dict[str, Any] | None = None
    """As in `model`."""
    params: str | None = None
    """As in `model`."""
    task: Task | None = None
    """As in `model`."""
    num_labels: Positive | None = None
    """As in `model`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute type, and the type of the parameters of a frozen model."""
    implementation: Literal["auto", "hf_flax", "decoder"] | None = None
    """As in `model`."""
    revision: str | None = None
    """As in `model`."""
    frozen: bool = True
    """Never updated: no gradient, no optimizer state, parameters in `dtype`, and not in checkpoints."""

    @model_validator(mode="after")
    def _one_source(self) -> OtherModelSection:
        if self.name is not None and self.config is not None:
            raise contradiction("models", "a model has a name and a config, and the two exclude each other", "keep one")
        return self


class PluginSection(Section):
    """Which plugin, and the options it reads as `ctx.options`."""

    module: str
    """A built-in name (`causal_lm`), a file (`plugins/mine.py`) or a dotted module (`package.module`)."""
    options: Options = Field(default_factory=dict, repr=False)
    """Handed to the plugin unchanged; a plugin with a dataclass `Options` has them checked against it."""


class TrainSection(Section):
    """How to train. A step is an optimizer step: one update of the parameters from one global batch."""

    global_batch_size: Positive = 32
    """Examples per optimizer step, over all devices and micro-batches."""
    micro_batch_size: Positive | Literal["auto"] = "auto"
    """Examples per forward and backward pass, over all devices; `auto` takes as many as fit."""
    steps: RunLength = Duration(1, "epochs")
    """Length of the run: optimizer steps or epochs."""
    max_time: WallTime | None = None
    """Time on a clock (`8h`, `1h 30m`), from the start of training in this process, loading and compiling included;
    then the run saves and ends with exit code 75, as on SIGTERM: the same command continues. Default: none."""
    learning_rate: Annotated[float, Field(ge=0)] = 5e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "linear"
    """Course of the learning rate after warm-up; `wsd` holds it, then decays it over `decay`."""
    warmup: Duration = Duration(0, "steps")
    """Linear rise from 0 to the peak: steps, epochs or a share of the run."""
    decay: Duration = Duration(20, "%")
    """Length of the final decay of `wsd`."""
    final_learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where linear, cosine and wsd end, as a fraction of the peak."""
    optimizer: Optimizer = "adamw"
    """The optax optimizer; a plugin's `optimizer_fn` replaces it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, on parameters with two dims or more (not on biases, norms and scales)."""
    b1: Fraction = 0.9
    """First-moment decay of adamw and lion; momentum of sgd and muon."""
    b2: Fraction = 0.999
    """Second-moment decay of adamw and lion."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the denominator of adamw."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are scaled down to this global norm; null for no clipping, and beside `privacy`."""
    freeze: Strings = ()
    """Regular expressions over parameter paths (`.*embed.*`): matches get no gradient and no optimizer state."""
    remat: Remat = "auto"
    """What the backward pass recomputes, where the model can: `none` nothing, `dots` all but products with weights and
    attention, `attention` all but attention, `offload` all but what waits in the host's memory (what layers take, and
    queries, keys and values), `full` all; `auto` takes the fastest that fits, by the memory of the devices."""
    xla: Xla = "auto"
    """Options of XLA's compiler for the train step by name (`xla_gpu_...: true`, `jax_optimization_level: O2`), and no
    others; `auto` takes those for the devices at hand that overlap communication with compute: see `redco doctor`."""
    profile: ProfileSection | None = None
    """Trace some steps, and say what they spend their time on. Default: none."""
    max_nonfinite_steps: Positive = 10
    """A step whose loss or gradient is not finite is skipped; so many in a row end the run."""
    max_compilations: Positive = 16
    """The step is compiled for each shape that batches come in, per example; one shape more ends the run. Evaluation
    has as many again."""


class EvalSection(Section):
    """When and how to evaluate; needs eval data."""

    every: Duration | None = None
    """Interval; default: only at the end."""
    at_start: bool = False
    """Also evaluate before the first step."""
    predict: bool = False
    """Also run `predict_fn` and `metric_fn` on the eval examples."""
    batch_size: Positive | Literal["auto"] = "auto"
    """Examples per evaluation batch over all devices; `auto` takes the size of a micro-batch."""
    best_metric: str = "loss"
    """The metric that decides which checkpoint is best."""
    best_mode: Literal["min", "max"] = "min"
    """Whether the best metric is the smallest or the largest."""
    patience: Positive | None = None
    """So many evaluations in a row without a better `best_metric` end the run early; needs `every`. Default: none."""


class GenerationSection(Section):
    """How text is generated, by models that generate; null leaves the choice to the model's generation config."""

    max_new_tokens: Positive = 64
    """Longest output, in tokens."""
    do_sample: bool = False
    """Sample instead of taking the likeliest token."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Divides the logits before sampling."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample among the k likeliest tokens, 0: among all; of transformers' generation configs the default is 50."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample among the likeliest tokens that make up this probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample among the tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    """Divides the logits of tokens that are in the text already (negative ones are multiplied); 1 is none."""
    num_beams: Positive = 1
    """Beam search over so many beams; 1 is none."""
    num_samples: Positive = 1
    """Outputs for each prompt: drawn with `do_sample`, or the best of `num_beams`; more than one become a list."""
    stop_strings: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] | None = None
    """Texts that end an output, which keeps them."""
    log_probs: bool = False
    """Predictions hold the log-probability of each token too, in nats, as the model says it before any setting."""


class PredictSection(Section):
    """Prediction, by `redco predict` and by evaluation with `eval.predict`."""

    input: str | None = None
    """JSON-lines file to predict when `--input` is not given; default: the eval examples."""
    batch_size: Positive | Literal["auto"] = "auto"
    """Examples per prediction batch over all devices; `auto` takes the evaluation batch size."""
    use: str | None = None
    """A name in the plugin's state (`ema`) whose parameters predict, and are exported; default: those of training."""
    generation: GenerationSection = GenerationSection()
    """How to generate."""


class Recipe(Section):
    """A run: model, data, plugin, and how to train, evaluate and predict."""

    model: ModelSection = ModelSection()
    """Which model."""
    models: dict[Annotated[str, Field(pattern=r"^[a-z]\w*$")], OtherModelSection] = Field(default_factory=dict)
    """Further models by name; with any, parameters are a mapping: `params["model"]`, `params["reference"]`."""
    adapter: AdapterSection | None = None
    """Train an adapter of `model` instead of its parameters (LoRA, DoRA)."""
    privacy: PrivacySection | None = None
    """Train with differential privacy."""
    data: DataSection = DataSection()
    """Where examples come from."""
    plugin: PluginSection
    """The three functions."""
    train: TrainSection = TrainSection()
    """How to train."""
    eval: EvalSection = EvalSection()
    """How to evaluate."""
    predict: PredictSection = PredictSection()
    """How to predict."""
    mesh: MeshSection | Literal["auto"] = "auto"
    """How devices are laid out; `auto` takes all, and splits parameters no more than their memory needs."""
    planning: Literal["estimate", "compile"] = "estimate"
    """How `mesh: auto` chooses: by plans, or by compiling the few ways that are fastest by these."""
    sharding: ShardingSection = ShardingSection()
    """How parameters are split over them."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept."""
    logging: LoggingSection = LoggingSection()
    """What is shown."""
    output_dir: Annotated[str, Field(min_length=1)]
    """Where the run lives, relative to the working directory."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of initialisation, data order, dropout and sampling."""

    @model_validator(mode="before")
    @classmethod
    def _clipped_once(cls, given: Any) -> Any:
        return without_clipping(given)

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        refuse_beside_privacy(self)
        micro, batch, steps = self.train.micro_batch_size, self.train.global_batch_size, self.train.steps
        if micro != "auto" and batch % micro:
            divisor = max(size for size in range(1, micro + 1) if batch % size == 0)
            problem = f"{micro} does not divide train.global_batch_size {batch}"
            raise contradiction("train.micro_batch_size", problem, f"take a divisor, such as {divisor}")
        for name in {"model", "adapter"} & self.models.keys():
            raise contradiction(f"models.{name}", f"this is the name of the {name} itself", "take another name")
        if self.planning == "compile" and self.mesh != "auto":
            raise contradiction(
                "planning", "compile chooses a mesh, and mesh gives one already", "leave one of them out"
            )
        remedy = "give steps (1000) or epochs (3 epochs)"
        if steps.unit == "%":
            raise contradiction("train.steps", f"{steps} is a share of itself", remedy)
        if steps.amount == 0:
            raise contradiction("train.steps", "a run needs at least one step", remedy)
        if self.eval.patience is not None and self.eval.every is None:
            problem = "without eval.every nothing is evaluated before the end"
            raise contradiction("eval.patience", problem, "add eval.every, or leave it out")
        return self


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a recipe file, which may `extends` another."""
    schema = Recipe.model_json_schema()
    for section in schema["$defs"].values():
        section.pop("required", None)  # what it lacks, the recipe that is extended may give
    extends = {"type": "string", "description": "A recipe, by path or shipped name, whose values this one changes."}
    schema["properties"] = {"extends": extends, **schema["properties"]}
    schema["patternProperties"] = {"^x-": {"description": "No part of the recipe: a place for YAML anchors."}}
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["anyOf"] = [{"required": ["extends"]}, {"required": schema.pop("required")}]
    return schema
