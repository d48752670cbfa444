"""The settings of every script but prepare.py: name, type, range, default and meaning.

Knows no files and no command line (config/command_line.py) and runs nothing.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from config.fields import Number, Seed, Settings, Whole, whole_number
from config.preparation import PreparationFields
from model import LONGEST_CONTEXT, Activation, AttentionImpl, GPTConfig, NormPlacement, PositionKind

Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$")]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TimedDtype = Literal["float64", "float32", "bfloat16", "float16"]
Length = Annotated[int, BeforeValidator(whole_number), Field(ge=1, le=LONGEST_CONTEXT)]


class InteropSettings(Settings):
    """interop: a model of other tools -> a run directory, or the other way round."""

    positional = "source"

    source: str = Field(min_length=1, description="what is read: a folder, a name, or a run directory")
    out_dir: str = Field(min_length=1, description="where it is written to")


class OneFileSettings(Settings):
    """engine.one_file: checkpoints in shards -> one file each."""

    positional = "run"

    run: str = Field(min_length=1, description="a run directory")


# What a model says that a run begins with.
ARCHITECTURE = (
    "n_layer", "n_head", "n_embd", "bias", "norm_placement", "position", "activation", "tied_head",
    "vocab_padding_multiple",
)  # fmt: skip


class TrainSettings(PreparationFields):
    """train.py: tokens -> a trained run directory."""

    instead_of: ClassVar[dict[str, tuple[str, ...]]] = {
        "data_dir": ("text", "tokenizer", "vocab_size", "val_fraction", "encoding", "text_field", "parse_special"),
        "text": ("data_dir",),
    }

    # data
    text: str = Field("", description="text to train on, as prepare.py's source (empty: stdlib, or data_dir)")
    data_dir: str = Field("", description="a folder that prepare.py wrote")

    # run
    init_from: str = Field(
        "", description="a run or checkpoint to begin with its weights; its architecture and tokenizer are taken"
    )
    out_dir: str = Field("", description="the run directory (empty: runs/ and the name of the preset or text)")
    resume: bool = Field(False, description="go on from the last checkpoint in out_dir")
    seed: Seed = Field(1337, description="decides the initial weights, the batches and dropout")
    device: Device = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: Dtype = Field("auto", description="precision of the matrix products; weights are kept in float32")
    compile: bool = Field(False, description="compile the model with torch.compile")
    activation_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass: less memory, a third more operations"
    )
    dry_run: bool = Field(False, description="say how much memory and time an update takes, and train nothing")
    peak_flops: Number = Field(
        0.0, ge=0, description="the device's peak operations per second, to show its utilisation (0: where it is known)"
    )

    parallel: Literal["ddp", "fsdp"] = Field(
        "ddp",
        description="under torchrun: each process has the whole model (ddp) or a share of every parameter (fsdp)",
    )
    collective_timeout: Number = Field(
        600.0, gt=0, description="under torchrun: seconds without a word from another process that mean it was lost"
    )

    # model
    block_size: Whole = Field(GPTConfig.block_size, ge=1, le=LONGEST_CONTEXT, description="context length in tokens")
    n_layer: Whole = Field(GPTConfig.n_layer, ge=1, le=10_000, description="decoder blocks")
    n_head: Whole = Field(GPTConfig.n_head, ge=1, description="attention heads in each block")
    n_embd: Whole = Field(GPTConfig.n_embd, ge=1, description="model width")
    dropout: Number = Field(GPTConfig.dropout, ge=0, lt=1, description="share of activations dropped in training")
    bias: bool = Field(GPTConfig.bias, description="biases in projections and LayerNorms")
    attention_impl: AttentionImpl = Field(
        GPTConfig.attention_impl, description="the four named functions, or PyTorch's fused attention"
    )
    norm_placement: NormPlacement = Field(
        GPTConfig.norm_placement, description="LayerNorm after each residual sum, or before each sublayer"
    )
    position: PositionKind = Field(GPTConfig.position, description="a learned table, or rotation of queries and keys")
    activation: Activation = Field(
        GPTConfig.activation, description="GELU itself, or GPT-2's approximation of it, which is slower on a CPU"
    )
    tied_head: bool = Field(GPTConfig.tied_head, description="the head reuses the token embedding")
    vocab_padding_multiple: Whole = Field(
        GPTConfig.vocab_padding_multiple, ge=1, description="round embedding rows up to this (64 suits GPUs)"
    )

    # optimization
    batch_size: Whole = Field(16, ge=1, description="sequences in one micro-batch")
    gradient_accumulation_steps: Whole = Field(1, ge=1, description="micro-batches in one update")
    max_iters: Whole = Field(2000, ge=0, description="updates in all")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="AdamW, or Muon for the blocks' matrices and AdamW for the rest"
    )
    learning_rate: Number = Field(1e-3, ge=0, description="the rate after warm-up")
    min_lr: Number = Field(0.0, ge=0, description="the rate at the end of the decay")
    warmup_iters: Whole = Field(100, ge=0, description="updates of linear warm-up")
    lr_decay: Literal["cosine", "linear", "constant"] = Field("cosine", description="shape of the decay")
    lr_decay_iters: Whole = Field(0, ge=0, description="the update at which min_lr is reached (0: max_iters)")
    weight_decay: Number = Field(0.1, ge=0, description="decoupled decay, on matrices only")
    beta1: Number = Field(0.9, ge=0, lt=1, description="AdamW's first moment")
    beta2: Number = Field(0.99, ge=0, lt=1, description="AdamW's second moment")
    skip_nonfinite: Whole = Field(
        0, ge=0, description="updates without a finite loss and gradient to leave out before stopping (0: none)"
    )
    grad_clip: Number = Field(1.0, ge=0, description="largest norm of the gradient (0: never clipped)")

    # looking
    eval_interval: Whole = Field(250, ge=1, description="updates between validations, each followed by a checkpoint")
    patience: Whole = Field(0, ge=0, description="stop after so many validations without a better one (0: never)")
    log_interval: Whole = Field(10, ge=1, description="updates between lines of metrics.jsonl")
    sample_tokens: Whole = Field(200, ge=0, description="tokens sampled at each validation, to samples.jsonl (0: none)")
    report: bool = Field(True, description="draw loss.png and write report.html at each validation")
    wandb: Literal["disabled", "offline", "online"] = Field("disabled", description="Weights & Biases")
    wandb_project: str = Field("glassgpt", min_length=1, description="its project")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr = {self.min_lr} is above learning_rate = {self.learning_rate}")
        if self.batch_size * self.gradient_accumulation_steps * self.block_size > 2**40:
            raise ValueError(
                "batch_size x gradient_accumulation_steps x block_size is above 2**40 tokens in one update"
            )
        self.gpt_config(vocab_size=1)
        return self

    def gpt_config(self, vocab_size: int) -> GPTConfig:
        """The architecture, for a tokenizer with so many ids."""
        shared = GPTConfig.__dataclass_fields__.keys() & type(self).model_fields.keys() - {"vocab_size"}
        return GPTConfig(vocab_size=vocab_size, **{name: getattr(self, name) for name in shared})


class EvaluateSettings(Settings):
    """engine.evaluation: a run and some data -> loss, perplexity and bits per byte."""

    positional = "run"

    run: str = Field(min_length=1, description="a run directory or a checkpoint")
    data: str = Field("", description="a folder that prepare.py wrote, or a text (empty: the run's own data)")
    part: Literal["", "validation", "training"] = Field(
        "", description="of the prepared data (empty: validation where there is some)"
    )
    encoding: str = Field("utf-8", description="character encoding of the text files")
    text_field: str = Field("text", min_length=1, description="the field of .jsonl files that holds the text")
    device: Device = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: Dtype = Field("auto", description="precision of the matrix products")


class SampleSettings(Settings):
    """sample.py: a run directory -> completions."""

    instead_of: ClassVar[dict[str, tuple[str, ...]]] = {
        "checkpoint": ("out_dir",),
        "prompt_file": ("prompt",),
        "prompts_file": ("prompt", "prompt_file"),
        "interactive": ("prompt", "prompt_file", "prompts_file"),
    }

    out_dir: str = Field("", description="a run directory: its best.pt, else its last.pt (empty: the newest in runs/)")
    checkpoint: str = Field("", description="a checkpoint file, instead of out_dir")
    prompt: str = Field("", description="text to continue (empty: start as a document starts)")
    prompt_file: str = Field("", description="a UTF-8 file with the text to continue")
    prompts_file: str = Field(
        "", description="a UTF-8 file with a text to continue in each line, or .jsonl with objects that have a prompt"
    )
    interactive: bool = Field(False, description="ask for one text after another, and keep the model loaded")
    parse_special: bool = Field(False, description="read <|endoftext|> in the prompt as the end-of-text id")
    num_samples: Whole = Field(1, ge=1, description="completions of each prompt; each has its own seed")
    batch_size: Whole = Field(
        1, ge=1, description="completions made at once, which is quicker; more than 1 are printed when they are done"
    )
    max_new_tokens: Whole = Field(300, ge=0, description="tokens to add at most")
    temperature: Number = Field(0.8, ge=0, description="0 takes the likeliest token; higher is more varied")
    top_k: Whole = Field(0, ge=0, description="sample among the k likeliest tokens (0: all)")
    top_p: Number = Field(1.0, gt=0, le=1, description="sample among the likeliest tokens of this total probability")
    min_p: Number = Field(
        0.0, ge=0, le=1, description="sample among tokens with this share of the likeliest one's probability (0: all)"
    )
    repetition_penalty: Number = Field(
        1.0, ge=0.01, description="above 1, tokens that were there already become less likely"
    )
    seed: Seed = Field(1337, description="decides what is drawn; sample i depends on the seed and on i alone")
    stop: list[str] = Field([], description="end before one of these texts")
    attention_page: str = Field(
        "", description="write a page to see the attention of the text in: an HTML file (at most its last 512 tokens)"
    )
    echo: bool = Field(True, description="print the prompt before its completion")
    logprobs: Whole = Field(
        0, ge=0, description="print a line of JSON a token instead of text, with so many of the likeliest (0: text)"
    )
    show_special: bool = Field(False, description="print the end-of-text marker where it was sampled")
    device: Device = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    dtype: Dtype = Field("auto", description="precision of the weights and the arithmetic")
    attention_impl: Literal["", "manual", "sdpa"] = Field("", description="attention path (empty: as trained)")
    kv_cache: bool = Field(True, description="keep keys and values instead of recomputing them")
    context_shift: Whole = Field(
        0, ge=0, description="tokens forgotten at once when the context is full; 1 is slow (0: a quarter of it)"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if "" in self.stop:
            raise ValueError("stop is empty: expected the text to stop before")
        for name in ("num_samples", "prompts_file", "interactive"):
            if self.attention_page and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"attention_page shows one text, but {name} = {getattr(self, name)}: leave one out")
        return self


class CompareSettings(Settings):
    """compare.py: do manual and fused attention agree, which is quicker here, and do they learn alike?"""

    instead_of: ClassVar[dict[str, tuple[str, ...]]] = {"runs": ("text", "data_dir"), "data_dir": ("text",)}

    device: Device = Field("auto", description="auto, cpu, cuda, cuda:N or mps")
    lengths: list[Length] = Field([64, 128, 256, 512, 1024, 2048], min_length=1, description="context lengths to time")
    dtypes: list[TimedDtype] = Field(["float32", "bfloat16"], min_length=1, description="precisions to time")
    n_embd: Whole = Field(256, ge=16, description="width of the attention module")
    n_head: Whole = Field(4, ge=1, description="its heads")
    tokens: Whole = Field(4096, ge=1, description="tokens in a batch, in as many sequences as the length allows")
    rounds: Whole = Field(5, ge=0, description="timings of each, of which the median counts (0: no timing)")
    seed: Seed = Field(1337, description="decides weights, inputs and, in the learning curves, the batches")
    out_dir: str = Field("runs/compare", min_length=1, description="where compare.json and compare.png go")

    text: str = Field("", description="a text to draw both learning curves on, as train.py's")
    data_dir: str = Field("", description="a folder that prepare.py wrote, for the same")
    preset: str = Field("quick", min_length=1, description="train.py's preset for it; dropout is turned off")
    max_iters: Whole = Field(200, ge=1, description="updates of each of the two")

    runs: list[str] = Field([], description="run directories to compare, instead of all else")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        GPTConfig(n_embd=self.n_embd, n_head=self.n_head)
        return self
