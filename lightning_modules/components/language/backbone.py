"""One way to get a language model: by hub id, from a folder or a config; adapters; big models."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}


@dataclass(frozen=True)
class BackboneConfig:
    """Which language model, and how it is loaded.

    Args:
        source: Hub id, local folder, or a dictionary with `model_type` and the fields of that
            `transformers` config (then the weights are random, drawn from `init_seed`).
        kind: `causal`, or `seq2seq` for encoder-decoder models (T5).
        dtype: `float32`, `bfloat16`, `float16`, `float64`, or `auto` (as stored).
        attn_implementation: `eager`, `sdpa`, `flash_attention_2`, or None for the library's choice.
        quantization: `none`, `int8` or `nf4` (double quantised); needs `bitsandbytes` and `lora`.
        lora: Fields of `peft.LoraConfig` (e.g. `{"r": 16}`), or None to train all weights.
        gradient_checkpointing: Recompute activations in the backward pass.
        trust_remote_code: Allow code that comes with the model. Off: it runs as you.
        init_seed: Seed of random weights and adapters; the global generator is left alone.
        revision: Branch, tag or commit of a hub model.
    """

    source: str | Mapping[str, Any]
    kind: Literal["causal", "seq2seq"] = "causal"
    dtype: str = "float32"
    attn_implementation: str | None = None
    quantization: Literal["none", "int8", "nf4"] = "none"
    lora: Mapping[str, Any] | None = None
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    init_seed: int = 0
    revision: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.source, str | Path | Mapping):
            raise TypeError(
                "backbone.source must be a hub id, a folder or a config dictionary, "
                f"got {type(self.source).__name__}"
            )
        if isinstance(self.source, Mapping) and "model_type" not in self.source:
            raise ValueError(
                "backbone.source is a config dictionary without model_type: "
                "add e.g. model_type: gpt2"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"backbone.dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        if self.kind not in ("causal", "seq2seq"):
            raise ValueError(f"backbone.kind must be causal or seq2seq, got {self.kind}")
        if self.quantization not in ("none", "int8", "nf4"):
            raise ValueError(
                f"backbone.quantization must be none, int8 or nf4, got {self.quantization}"
            )

    @classmethod
    def of(cls, value: "BackboneConfig | str | Mapping[str, Any]") -> "BackboneConfig":
        """From a config file's value: a hub id or folder, or a dictionary of the fields above."""
        if isinstance(value, BackboneConfig):
            return value
        if isinstance(value, str | Path):
            return cls(source=str(value))
        if not isinstance(value, Mapping):
            raise TypeError(
                f"backbone must be a hub id, a folder or a dictionary, got {type(value).__name__}"
            )
        values = dict(value)
        if "source" not in values:
            if "model_type" not in values:
                raise ValueError(
                    f"backbone needs source (hub id, folder or config), got {sorted(values)}"
                )
            return cls(source=values)
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"backbone has no option {unknown[0]}; options: {sorted(known)}")
        return cls(**values)

    def check_trainable(self) -> None:
        """Raise when training this model would change nothing."""
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"backbone.quantization={self.quantization} without backbone.lora leaves nothing "
                "to train: set backbone.lora, e.g. {r: 16}"
            )


def build_backbone(
    config: BackboneConfig | str | Mapping[str, Any], device_map: str | None = None
) -> nn.Module:
    """Load or build the model, with adapters when the config asks for them.

    Args:
        config: What to load.
        device_map: Given (e.g. `auto`), the weights are spread over the visible devices by
            `accelerate`; for stages without gradients (sampling, scoring) in one process.

    Raises:
        ImportError: `peft` or `bitsandbytes` is needed and missing.
        ValueError: The source is neither a folder nor a model that the hub could give.
    """
    import transformers

    config = BackboneConfig.of(config)
    auto: Any = (
        transformers.AutoModelForCausalLM
        if config.kind == "causal"
        else transformers.AutoModelForSeq2SeqLM
    )
    options: dict[str, Any] = dict(config.extra)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.init_seed)
        if isinstance(config.source, Mapping):
            values = dict(config.source)
            described = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
            model = auto.from_config(described, **options)
            if config.dtype != "auto":
                model = model.to(DTYPES[config.dtype])
        else:
            if device_map is not None:
                options["device_map"] = device_map
            if config.quantization != "none":
                options["quantization_config"] = _quantisation(config.quantization)
            try:
                model = auto.from_pretrained(
                    str(config.source),
                    dtype=DTYPES[config.dtype],
                    trust_remote_code=config.trust_remote_code,
                    revision=config.revision or "main",
                    **options,
                )
            except OSError as error:
                raise ValueError(
                    f"backbone.source={config.source!r} is no folder with a model and the hub did "
                    f"not give it ({str(error).splitlines()[0]})"
                ) from error
        if config.lora is not None:
            model = add_lora(model, config.lora, config.kind, config.quantization != "none")
    if config.gradient_checkpointing:
        recompute_activations(model, True)
        if config.lora is not None:
            # With a frozen embedding no input needs a gradient and checkpointing would cut all.
            model.enable_input_require_grads()
    return model.train()  # type: ignore[no-any-return]


def recomputes_activations(model: Any) -> bool:
    """Whether activations are recomputed in the backward pass."""
    # transformers 5 renamed the flag and the two methods
    names = ("is_activation_checkpointing", "is_gradient_checkpointing")
    flag = next((name for name in names if hasattr(type(model), name)), "")
    return bool(getattr(model, flag, False))


def recompute_activations(model: Any, on: bool) -> None:
    """Switch the recomputing of activations on or off."""
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        arguments = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
        getattr(model, f"{kind}_checkpointing_enable")(**arguments)
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def add_lora(
    model: nn.Module, options: Mapping[str, Any], kind: str = "causal", quantised: bool = False
) -> nn.Module:
    """Wrap in a `peft` LoRA: all linear layers except the head unless `target_modules` says."""
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            "backbone.lora needs the package peft: pip install 'iclr24[rso]'"
        ) from error
    task = peft.TaskType.CAUSAL_LM if kind == "causal" else peft.TaskType.SEQ_2_SEQ_LM
    settings = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear", **options}
    if quantised:
        model = peft.prepare_model_for_kbit_training(model)  # type: ignore[no-untyped-call]
    return peft.get_peft_model(model, peft.LoraConfig(task_type=task, **settings))  # type: ignore[arg-type,no-any-return]


def _quantisation(kind: str) -> Any:
    try:
        import bitsandbytes  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"backbone.quantization={kind} needs the package bitsandbytes: "
            "pip install bitsandbytes, or set backbone.quantization=none"
        ) from error
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def dispatch(model_config: BackboneConfig, checkpoint: str | Path) -> nn.Module:
    """Load a folder of weights into an empty model, spread over devices, for inference only.

    The full model is never held twice: the shell is made on the meta device and every shard of the
    checkpoint goes straight to its device (`accelerate`).
    """
    import transformers
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    described = transformers.AutoConfig.from_pretrained(str(checkpoint))
    auto: Any = (
        transformers.AutoModelForCausalLM
        if model_config.kind == "causal"
        else transformers.AutoModelForSeq2SeqLM
    )
    with init_empty_weights():
        shell = auto.from_config(described)
    shell.tie_weights()
    dtype = DTYPES[model_config.dtype]
    return load_checkpoint_and_dispatch(  # type: ignore[no-any-return]
        shell,
        str(checkpoint),
        device_map="auto",
        no_split_module_classes=list(getattr(shell, "_no_split_modules", None) or []),
        dtype=dtype if isinstance(dtype, torch.dtype) else None,
    ).eval()


def has_adapters(model: nn.Module) -> bool:
    """Whether the model is wrapped in `peft` adapters."""
    return hasattr(model, "disable_adapter")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The frozen base model for the length of the block: the reference policy of a LoRA run."""
    if not has_adapters(model):
        raise ValueError(
            "reference=adapter_off needs adapters: set backbone.lora, or use reference=copy"
        )
    with model.disable_adapter() if has_adapters(model) else nullcontext():  # type: ignore[operator]
        yield


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that take part in training.

    Raises:
        ValueError: There are none.
    """
    found = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not found:
        raise ValueError("the backbone has nothing to train: every parameter is frozen")
    return found


def check_context(model: nn.Module, rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise when a row is longer than the model's positions reach.

    Args:
        model: Causal language model.
        rows: `prompt` and any of `chosen`, `rejected`, `response` as ids, with `index`.

    Raises:
        ValueError: Names the row and the lengths.
    """
    limit = context_length(model)
    if limit is None:
        return
    for number, row in enumerate(rows):
        answers = [row[key] for key in ("chosen", "rejected", "response") if key in row]
        longest = len(row["prompt"]) + max((len(answer) for answer in answers), default=0)
        if longest > limit:
            raise ValueError(
                f"row {row.get('index', number)}: prompt and response have {longest} tokens, more "
                f"than the model's context of {limit}: set data.max_length={limit}"
            )


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """Raise when the tokenizer has ids that the model does not embed.

    Raises:
        ValueError: Names both sizes.
    """
    inner: Any = model.get_base_model() if has_adapters(model) else model  # type: ignore[operator]
    if tokenizer is None or not hasattr(inner, "get_input_embeddings"):
        return
    size = int(inner.get_input_embeddings().num_embeddings)
    if len(tokenizer) > size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries but the model embeds {size}: they do not "
            "belong together"
        )


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0, those of adapters apart.

    A preference loss compares a policy with a reference; noise in one of them is noise in the
    margin.
    """
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for option in ("dropout", "attention_dropout", "activation_dropout", "dropout_rate"):
            if isinstance(getattr(module, option, None), float):
                setattr(module, option, 0.0)


def context_length(model: nn.Module) -> int | None:
    """The longest sequence that the model's positions allow, or None when it names no limit."""
    config = getattr(model, "config", None)
    for name in ("n_positions", "max_position_embeddings"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
