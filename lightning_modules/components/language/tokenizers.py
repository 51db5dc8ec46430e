"""Tokenizers: from a hub id or folder, and two that need no download."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def load_tokenizer(source: str | Path, trust_remote_code: bool = False) -> Any:
    """A `transformers` tokenizer by hub id or folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except OSError as error:
        raise ValueError(
            f"tokenizer={str(source)!r} is no folder with a tokenizer and the hub did not give it "
            f"({str(error).splitlines()[0]})"
        ) from error


def character_tokenizer(
    alphabet: Sequence[str], specials: Sequence[str] = (), bos: bool = True
) -> Any:
    """One token per character, plus pad, EOS, BOS and whole-word special tokens.

    The ids are 0 pad, 1 EOS, 2 BOS, then `specials`, then `alphabet`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<bos>", *specials, *alphabet]
    if len(set(words)) != len(words):
        raise ValueError("alphabet and specials must be distinct")
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=list(specials),
    )


def train_byte_bpe(texts: Iterable[str], vocab_size: int = 512) -> Any:
    """Byte-level BPE trained on the fly: every text can be encoded, no unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 259:
        raise ValueError(
            f"vocab_size must be >= 259 (256 bytes and 3 special tokens), got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>"
    )


def english_corpus() -> list[str]:
    """Plain English with no download: the help topics that every Python ships (PSF licence)."""
    from pydoc_data.topics import topics

    return [str(topics[name]) for name in sorted(topics)]


def check_same_vocabulary(policy: Any, reference: Any) -> None:
    """Raise when two tokenizers give other ids to the same text.

    Raises:
        ValueError: Their vocabularies differ; names the first token that does.
    """
    left, right = policy.get_vocab(), reference.get_vocab()
    if left == right:
        return
    word = next(w for w in sorted({*left, *right}) if left.get(w) != right.get(w))
    raise ValueError(
        "the tokenizers of policy and reference differ: token "
        f"{word!r} has id {left.get(word)} in the policy and {right.get(word)} in the reference "
        f"({len(left)} and {len(right)} entries); log-probabilities are only comparable over one "
        "vocabulary"
    )
