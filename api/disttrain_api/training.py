"""`spec.training`: what the trainer image trains, on what, and how."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.compute import ActivationCheckpointing, Attention, Float8Recipe, Precision

# Patterns are read by pydantic and by the API server, whose \w differ.
Entrypoint = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$", max_length=253)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
# Bounds keep the products of the batch arithmetic within 64 bits, also in CEL.
MicroBatchSize = Annotated[int, Field(ge=1, le=1_000_000)]
AccumulationSteps = Annotated[int, Field(ge=1, le=100_000)]


class ModelName(StrEnum):
    """Built-in models."""

    MLP = "mlp"
    RESNET = "resnet"
    GPT = "gpt"
    TRANSFORMERS = "transformers"


class DataName(StrEnum):
    """Built-in data sets."""

    DIGITS = "digits"
    TEXT = "text"
    SYNTHETIC = "synthetic"
    CORPUS = "corpus"
    CHAT = "chat"
    LINES = "lines"


class OptimizerName(StrEnum):
    """Optimizers of torch.optim."""

    SGD = "SGD"
    ADAM = "Adam"
    ADAMW = "AdamW"
    ADAFACTOR = "Adafactor"
    MUON = "Muon"


class AdjustLrFn(StrEnum):
    """How Muon's rate goes by the shape of a matrix."""

    ORIGINAL = "Original"
    MATCH_RMS_ADAMW = "MatchRmsAdamW"


class LrScheduleName(StrEnum):
    """Shape of the learning rate after the warm-up."""

    CONSTANT = "Constant"
    LINEAR = "Linear"
    COSINE = "Cosine"


class LossName(StrEnum):
    """Losses of torch.nn.functional, and the model's own."""

    CROSS_ENTROPY = "CrossEntropy"
    MEAN_SQUARED_ERROR = "MeanSquaredError"
    MODEL = "Model"


class BestMode(StrEnum):
    """Which value of a figure is best."""

    MAX = "Max"
    MIN = "Min"


class Offload(ApiModel):
    """What is kept in host memory instead of device memory."""

    parameters: bool = False
    """Parameters, gradients and optimizer state; the optimizer then runs on the CPU."""
    activations: bool = False
    """What the forward pass keeps for the backward pass."""


class Model(ApiModel):
    """The model: a built-in `name` or an `entrypoint`, exactly one of the two."""

    name: ModelName | None = None
    """A built-in model."""
    entrypoint: Entrypoint | None = None
    """`package.module:function`; called with the config as keyword arguments, returns a torch.nn.Module."""
    config: dict[str, Any] = {}
    """Arguments of the model, at most 6 levels deep, 4096 values and 128 KiB; docs/reference.md has those of built-in
    ones."""
    meta_device: bool = False
    """Build it on the meta device and initialise each rank's part, layer by layer. Needs a method `initialise_layer`,
    as in gpt and transformers."""


class Data(ApiModel):
    """The data: a built-in `name` or an `entrypoint`, exactly one of the two."""

    name: DataName | None = None
    """A built-in data set."""
    entrypoint: Entrypoint | None = None
    """`package.module:function`; called with the config as keyword arguments, returns two datasets: training,
    held-out."""
    config: dict[str, Any] = {}
    """Arguments of the data set, with the same bounds; docs/reference.md has built-in ones."""


class WeightDecayOn(StrEnum):
    """All parameters, or matrices alone: neither biases nor the vectors of norms."""

    ALL = "All"
    MATRICES = "Matrices"


class ParameterGroup(ApiModel):
    """Parameters with a learning rate of their own."""

    pattern: Annotated[str, Field(min_length=1, max_length=253)]
    """Shell pattern of parameter names, for example `head.*`."""
    learning_rate_factor: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
    """Their learning rate / that of the others."""


class OwnTask(ApiModel):
    """A task of your own: model, data, loss and figures."""

    entrypoint: Entrypoint
    """`package.module:Class`; called with the config as keyword arguments."""
    config: dict[str, Any] = {}
    """Arguments of the task, at most 2 levels deep."""


class Callback(ApiModel):
    """Code that is called between steps."""

    entrypoint: Entrypoint
    """As that of a task."""
    config: dict[str, Any] = {}
    """As that of a task."""


class Optimizer(ApiModel):
    """The optimizer."""

    name: OptimizerName = OptimizerName.ADAMW
    """SGD, Adam, AdamW, Adafactor, or Muon: of the matrices of hidden layers, beside AdamW of all else."""
    entrypoint: Entrypoint | None = None
    """Another: `package.module:Class`, for example `torch.optim:RAdam`; called with parameter groups, `lr` and
    `weight_decay`. Not with ParameterServer."""
    learning_rate: PositiveNumber = 0.001
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Added to the gradient for SGD and Adam, else decoupled."""
    weight_decay_on: WeightDecayOn = WeightDecayOn.ALL
    """All, or Matrices: neither biases nor norms."""
    groups: Annotated[list[ParameterGroup], Field(max_length=16)] = []
    """The first match counts."""
    momentum: Fraction | None = None
    """SGD and Muon. Absent: 0, for Muon 0.95."""
    nesterov: bool | None = None
    """SGD, with momentum, and Muon. Absent: false, for Muon true."""
    beta1: Fraction | None = None
    """Adam and AdamW, also Muon's. Absent: 0.9."""
    beta2: Fraction | None = None
    """Adam and AdamW, also Muon's. Absent: 0.999."""
    epsilon: PositiveNumber | None = None
    """Adam and AdamW, also Muon's. Absent: 1e-8."""
    beta2_decay: Annotated[float, Field(ge=-10, le=0)] | None = None
    """Adafactor. Absent: -0.8."""
    d: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Adafactor: larger updates are clipped. Absent: 1."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] | None = None
    """Muon: Newton-Schulz iterations. Absent: 5."""
    adjust_lr_fn: AdjustLrFn | None = None
    """Muon. MatchRmsAdamW: matrices take AdamW's rates; Original: as Muon's authors. Absent: MatchRmsAdamW."""


class LrSchedule(ApiModel):
    """Learning rate over the steps: a linear warm-up, then the named shape."""

    name: LrScheduleName = LrScheduleName.CONSTANT
    """Constant, Linear or Cosine; these two decay to `minimumRatio` of the peak at the last step."""
    entrypoint: Entrypoint | None = None
    """Another shape: `package.module:function`, called with the step, from 0, and the number of steps; returns rate /
    peak rate. Not with ParameterServer."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Steps in which the rate rises linearly to the peak."""
    minimum_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Linear and Cosine only: last rate / peak rate. Absent: 0."""


class Loss(ApiModel):
    """The training loss, averaged over samples (over tokens for text)."""

    name: LossName = LossName.CROSS_ENTROPY
    """CrossEntropy, MeanSquaredError, or Model: the method `loss(outputs, targets)` of a model of your own."""
    label_smoothing: Fraction | None = None
    """CrossEntropy only. Absent: 0."""
    chunks: Annotated[int, Field(ge=2, le=4096)] | None = None
    """CrossEntropy only: logits and loss come in so many parts of a microbatch, never whole. Absent: 1."""


KNOWN_MODES = {"Loss": BestMode.MIN, "Accuracy": BestMode.MAX}
"""Which value is best of the figures that the trainer has by itself; its own names of them are in lower case."""


class Checkpoint(ApiModel):
    """When checkpoints are written, and which are kept. Needs `storage`."""

    interval: Count = 100
    """Steps between two checkpoints. One is also written at the end and on SIGTERM."""
    keep_latest: Annotated[int, Field(ge=1, le=1000)] = 3
    """Checkpoints kept; older ones are deleted after a newer one is complete."""
    keep_best: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Also keep so many that are best by `bestMetric`. Absent: none."""
    best_metric: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$", max_length=63)] | None = None
    """Figure on held-out data: Loss (the least is best), Accuracy (the highest) or one of your task's. Absent: Loss."""
    best_mode: BestMode | None = None
    """Max or Min: which value of `bestMetric` is best."""
    initial_from: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Weights to begin with while the job has no checkpoint: a .safetensors file or a checkpoint's folder, relative to
    the storage. Absent: the model's own."""
    asynchronous: bool = True
    """Train while a copy in host memory is written. False: no copy, training waits."""
    folder: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=253)] | None = None
    """Folder below the storage. Absent: one of this job's own, new for each job. Name the folder of another job to
    continue from its latest checkpoint."""


class OnFailure(StrEnum):
    """Warn: the job continues; status and log say what failed. Fail: the job fails."""

    WARN = "Warn"
    FAIL = "Fail"


class OnMostInRow(StrEnum):
    """Fail: the job ends once the same step fails again. RollBack: the next attempt takes other samples."""

    FAIL = "Fail"
    ROLL_BACK = "RollBack"


class SkipSteps(ApiModel):
    """Steps (with parameter servers workers' parts of steps) whose loss or gradient is not finite, or too large, make
    no update."""

    above_median: Annotated[float, Field(gt=1, le=1e6)] | None = None
    """A gradient norm above so many times the median of the last `window` is too large. Absent: none is."""
    loss_deviations: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """A loss so many standard deviations above the mean of the last `window` is too large. Absent: none is."""
    window: Annotated[int, Field(ge=8, le=4096)] = 128
    """Steps; until there were so many, nothing is too large."""
    most_in_row: Annotated[int, Field(ge=0, le=10_000)] = 8
    """One more ends the attempt; 0: the first does."""
    on_most_in_row: OnMostInRow = OnMostInRow.FAIL
    """What then follows. Fail: an attempt with the same samples, and if it fails at the same step, the job's end.
    RollBack: one that resumes from the last checkpoint, if that fails so from one before it, and passes over the
    samples up to that step."""


class Evaluation(ApiModel):
    """Evaluation on the held-out part of the data; always done once after the last step."""

    interval: Count | None = None
    """Steps between two evaluations. Absent: only after the last step."""
    batch_size: Count | None = None
    """Samples per rank and forward pass. Absent: microBatchSize."""
    on_failure: OnFailure = OnFailure.WARN
    """Reaction to an evaluation that raises; the checkpoint of its step is written first. Warn: the job continues;
    status and log say so. Fail: it fails."""
    choices: dict[str, Any] | None = None
    """Likelihood tasks; docs/reference.md has the fields."""
    samples: dict[str, Any] | None = None
    """Prompts to continue; see docs/reference.md."""


class SinkName(StrEnum):
    """Services that store figures."""

    MLFLOW = "MLflow"
    WANDB = "WandB"


class Logging(ApiModel):
    """What the ranks print and write."""

    interval: Count = 10
    """Steps between two lines."""
    tensor_board: bool | None = None
    """Event files beside metrics.jsonl, on a cluster with a volume in `storage`. Absent: if the package `tensorboard`
    is installed."""
    sinks: Annotated[list[SinkName], Field(max_length=2)] = []
    """Also send figures to MLflow (MLFLOW_TRACKING_URI) or WandB (WANDB_API_KEY); both are packages."""


class Profiling(ApiModel):
    """Traces of torch.profiler, for Perfetto or chrome://tracing, and memory snapshots, beside metrics.jsonl, so on a
    cluster only with a volume in `storage`."""

    first_step: Annotated[int, Field(ge=2, le=1_000_000_000)] = 10
    """First traced step; the one before is traced too and discarded."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Traced steps."""
    all_ranks: bool = False
    """Trace every rank. Absent: rank 0."""
    memory_snapshot: bool = False
    """On GPUs: when memory runs out, write a snapshot (for docs.pytorch.org/memory_viz)."""


class Training(ApiModel):
    """What the trainer image runs. Absent: a program of your own runs.

    globalBatchSize = microBatchSize x gradientAccumulationSteps x data-parallel degree; one of them may be absent.
    """

    task: OwnTask | None = None
    """Replaces `model`, `data` and `loss`."""
    callbacks: Annotated[list[Callback], Field(max_length=8)] = []
    """Called between steps, in this order."""
    model: Model = Model()
    """The model."""
    data: Data = Data()
    """The data."""
    data_workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Worker processes per rank that read samples ahead; 0: the rank reads them. Not with ParameterServer."""
    optimizer: Optimizer = Optimizer()
    """The optimizer."""
    lr_schedule: LrSchedule = LrSchedule()
    """Learning rate over the steps."""
    loss: Loss = Loss()
    """The training loss."""
    steps: Count
    """Optimizer steps: global batches consumed by all workers together."""
    micro_batch_size: MicroBatchSize | None = None
    """Samples per rank in one forward and backward pass."""
    global_batch_size: Count | None = None
    """Samples of all ranks in one optimizer step."""
    gradient_accumulation_steps: AccumulationSteps | None = None
    """Forward and backward passes per optimizer step. Absent: from the two batch sizes, else 1."""
    max_gradient_norm: PositiveNumber | None = None
    """Clip gradients to this norm. Absent: no clipping."""
    skip_steps: SkipSteps | None = None
    """Absent: a loss or gradient that is not finite ends the job."""
    precision: Precision = Precision.FP32
    """FP32; TF32 rounds the factors of matrix products on GPUs; BF16 and FP16 run the forward pass under autocast
    (shards gather parameters so), FP16 with a loss scaler. Losses are FP32."""
    float8: Float8Recipe | None = None
    """Linear layers but the last multiply in FP8, scaled by tensor or by row (torchao). A CPU emulates it. Absent: no.
    """
    attention: Attention | None = None
    """Kernel of scaled_dot_product_attention; no other computes it. Absent: torch chooses."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    """None keeps all activations; Selective the results of matrix products and attention; Full each layer's inputs.
    The last layer keeps all: its backward pass follows at once."""
    offload: Offload = Offload()
    """What is kept in host memory."""
    compile: bool = False
    """Compile each layer with torch.compile, except experts; on one device model and loss as one. Needs a C++ compiler,
    on GPUs a C compiler."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of initialisation, data order, dropout, and the data's random draws."""
    checkpoint: Checkpoint | None = None
    """Absent: with `storage` the defaults, without it no checkpoints."""
    evaluation: Evaluation = Evaluation()
    """Evaluation on the held-out part."""
    logging: Logging = Logging()
    """What the ranks print and write."""
    profiling: Profiling | None = None
    """On a cluster it needs a volume in `storage`. Absent: nothing is profiled."""
    preflight: bool = False
    """Check the ranks' network first: wrong data ends the attempt, slow nodes are logged. Not with ParameterServer."""
