"""Preference files in all accepted forms, and the embedded data."""

import bz2
import gzip
import json

import numpy as np
import pandas as pd
import pytest
import torch

from datamodules import Preferences
from datamodules.preferences import LengthTarget, LengthTilt, parse, read_rows
from datamodules.preferences.formats import split_transcripts
from datamodules.preferences.toys import FiniteSet
from lightning_modules.components.language import (
    Encoder,
    PreferenceCollator,
    PromptCollator,
    character_tokenizer,
    check_same_vocabulary,
    train_byte_bpe,
)

PAIR = {"prompt": "say hi", "chosen": "hi there", "rejected": "go away"}
HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant: so long",
    "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant: no",
}


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return train_byte_bpe(["say hi there, go away and so long"], 280)


@pytest.mark.parametrize(
    "form", ["jsonl", "jsonl.gz", "jsonl.bz2", "json", "csv", "parquet", "tsv"]
)
def test_file_forms(tmp_path, form):
    rows = [PAIR, {**PAIR, "prompt": "two,\nlines"}]
    path = tmp_path / f"pairs.{form}"
    text = "\n".join(json.dumps(row) for row in rows) + "\n"
    if form == "jsonl":
        path.write_text(text)
    elif form == "jsonl.gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif form == "jsonl.bz2":
        path.write_bytes(bz2.compress(text.encode()))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        pd.DataFrame(rows).to_csv(path, index=False, sep="," if form == "csv" else "\t")
    examples = parse(read_rows(path))
    assert [e.prompt for e in examples] == ["say hi", "two,\nlines"]
    assert (examples[0].chosen, examples[0].rejected) == ("hi there", "go away")


def test_datasets_objects_and_lists():
    class Table:
        def to_list(self):
            return [PAIR]

    assert parse(read_rows(Table())) == parse(read_rows([PAIR]))


def test_row_forms():
    assert parse([HH])[0][1:4] == (
        "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: bye\n\nAssistant:", "so long", "no",
    )  # fmt: skip
    compared = {"input": "q", "output_1": "a", "output_2": "b"}
    for label, better in ((1, "a"), (2, "b"), ("2", "b"), (2.0, "b")):
        assert parse([{**compared, "label": label}])[0].chosen == better
    zero_based = [{**compared, "preference": k} for k in (0, 1)]
    assert [e.chosen for e in parse(zero_based)] == ["a", "b"]
    # a whole file decides: its first row alone would count from 1
    assert [e.chosen for e in parse(zero_based[::-1])] == ["b", "a"]
    judged = {"info": {"post": "p"}, "summaries": [{"text": "s"}, {"text": "t"}], "choice": 1}
    assert parse([judged])[0][1:4] == ("p", "t", "s")
    assert parse([{"prompt": "q"}], "prompts")[0].chosen is None
    assert parse([{"prompt": "q", "reference": "r"}], "prompts")[0].chosen == "r"
    assert parse([PAIR], "prompts")[0].chosen == "hi there"
    assert parse([PAIR], "demonstrations")[0].chosen == "hi there"
    assert parse([{"instruction": "q", "output": "r"}], "demonstrations")[0].chosen == "r"
    numbers = {"margin": 0.5, "ref_chosen_logps": -3, "ref_rejected_logps": "-4.5"}
    assert parse([{**PAIR, **numbers}])[0].numbers == {
        "margin": 0.5, "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.5,
    }  # fmt: skip


def test_transcripts_with_different_numbers_of_turns():
    longer = HH["chosen"] + "\n\nHuman: more\n\nAssistant: and more"
    prompt, chosen, rejected = split_transcripts(longer, HH["rejected"])
    assert prompt.endswith("Human: bye\n\nAssistant:")
    assert chosen.startswith("so long\n\nHuman: more")
    assert rejected == "no"


def test_chat_messages_go_through_the_template(bytes_tokenizer):
    bytes_tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [{"role": "user", "content": "hi"}]
    row = {
        "chosen": [*talk, {"role": "assistant", "content": "hello"}],
        "rejected": [*talk, {"role": "assistant", "content": "no"}],
    }
    (example,) = parse([row])
    encoder = Encoder(bytes_tokenizer)
    prompt = encoder.prompt(example.prompt)
    assert bytes_tokenizer.decode(prompt) == "<user>hi\n<assistant>"
    assert bytes_tokenizer.decode(encoder.response(example.chosen)) == "hello<eos>"
    bytes_tokenizer.chat_template = None


def test_truncation_keeps_eos_and_is_counted(bytes_tokenizer):
    encoder = Encoder(bytes_tokenizer, max_length=20, max_prompt_length=8)
    eos = bytes_tokenizer.eos_token_id
    prompt, (long, short) = encoder.fit(list(range(10, 40)), [[*range(50, 80), eos], [5, eos]], 3)
    assert prompt == list(range(32, 40))  # cut on the left
    assert long == [*range(50, 61), eos]  # cut on the right, EOS kept
    assert short == [5, eos]
    assert (encoder.truncation.prompts, encoder.truncation.responses) == (1, 1)
    assert encoder.truncation.cut == [3]


def test_collated_batches(bytes_tokenizer):
    rows = [
        {"index": 7, "prompt": [5, 6], "chosen": [8, 1], "rejected": [9, 9, 9, 1]},
        {"index": 8, "prompt": [5], "chosen": [8, 8, 1], "rejected": [1, 1], "margin": 2.0,
         "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0},
    ]  # fmt: skip
    batch = PreferenceCollator(0)(rows)
    assert batch.chosen_input_ids.shape == batch.rejected_input_ids.shape == (2, 6)
    assert batch.chosen_input_ids[0].tolist() == [5, 6, 8, 1, 0, 0]
    assert batch.chosen_labels[0].tolist() == [-100, -100, 8, 1, -100, -100]
    assert batch.rejected_labels[1].tolist() == [-100, 1, 1, -100, -100, -100]
    assert batch.prompt_input_ids.tolist() == [[5, 6], [0, 5]]
    assert batch.ref_chosen_logps.isnan().tolist() == [True, False]
    assert batch.margin[1] == 2.0
    prompts = PromptCollator(0)([{"index": 1, "prompt": [4, 5]}, {"prompt": [4], "response": [6]}])
    assert prompts.prompt_attention_mask.tolist() == [[1, 1], [0, 1]]
    assert prompts.target_mask.tolist() == [[0], [1]]
    # padding may share the id of EOS: masks come from lengths
    same = PreferenceCollator(1)(rows)
    assert same.chosen_labels[0].tolist() == [-100, -100, 8, 1, -100, -100]
    assert torch.equal(same.chosen_attention_mask, batch.chosen_attention_mask)


def test_llmbar_is_read_and_split():
    data = Preferences("llmbar", tokenizer="byte_bpe", max_length=4096, batch_size=8)
    data.setup("fit")
    sizes = [len(data.records[name]) for name in ("train", "val", "test")]
    assert sum(sizes) == 419
    seen = {r["index"] for name in ("train", "val", "test") for r in data.records[name]}
    assert seen == set(range(419))
    record = next(r for r in data.records["train"])
    assert data.tokenizer.decode(record["chosen"]).endswith("<eos>")
    assert len(data.prompts) <= sizes[0]
    batch = next(iter(data.val_dataloader()))
    assert len(batch.index) == 8


def test_plain_english_demonstrations():
    data = Preferences(
        "english", task="demonstrations", tokenizer="byte_bpe", n_train=16, n_val=4, batch_size=4
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    text = data.tokenizer.decode(batch.input_ids[0][batch.attention_mask[0] == 1])
    assert len(text.split()) == 48
    assert (batch.labels != -100).sum() > 0


def test_user_file_with_prompts_and_validation(tmp_path):
    rows = [{**PAIR, "prompt": f"say {i % 4}"} for i in range(12)]
    for name, part in (("train", rows), ("val", rows[:3]), ("more", [{"prompt": "other"}])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(r) for r in part))
    data = Preferences(
        str(tmp_path / "train.jsonl"), tokenizer="byte_bpe", vocab_size=270, batch_size=3,
        val_file=str(tmp_path / "val.jsonl"), prompts_file=str(tmp_path / "more.jsonl"),
    )  # fmt: skip
    data.setup("fit")
    assert len(data.records["train"]) == 12
    assert len(data.records["val"]) == 3
    assert [data.tokenizer.decode(p["prompt"]) for p in data.prompts] == ["other"]
    own = Preferences(str(tmp_path / "train.jsonl"), tokenizer="byte_bpe", vocab_size=270)
    own.setup("fit")
    assert len(own.prompts) <= 4  # distinct prompts of the training pairs


@pytest.mark.parametrize(
    "task", [LengthTilt(), LengthTarget(), FiniteSet()], ids=lambda t: type(t).__name__
)
def test_labels_of_synthetic_tasks_have_bradley_terry_odds(task):
    records = task.pairs(20_000, np.random.default_rng(0))
    assert len(records) == 20_000
    assert all(r["chosen"] != r["rejected"] for r in records)
    prompts, chosen, rejected = ([r[k] for r in records] for k in ("prompt", "chosen", "rejected"))
    gap = task.gold(prompts, chosen) - task.gold(prompts, rejected)
    # the share of wins of the better one against the mean of sigma(|gap|)
    size = gap.abs()
    right = (gap > 0).double() + 0.5 * (gap == 0).double()
    assert abs(right.mean() - size.sigmoid().mean()) < 4 * 0.5 / 20_000**0.5


def test_length_target_round_trips_through_its_tokenizer():
    task = LengthTarget()
    record = task.pairs(1, np.random.default_rng(1))[0]
    encoder = Encoder(task.tokenizer)
    assert encoder.prompt(task.tokenizer.decode(record["prompt"][1:])) == record["prompt"]
    word = task.tokenizer.decode([t for t in record["chosen"] if t >= task.first_letter])
    assert encoder.response(word)[:-1] == [t for t in record["chosen"] if t >= task.first_letter]
    assert set(task.allowed) == {1, *range(task.first_letter, len(task.tokenizer))}


def test_pairs_are_a_function_of_the_seed():
    made = []
    for seed in (0, 0, 1):
        data = Preferences("length_target", seed=seed, n_train=8, n_val=8)
        data.setup("fit")
        made.append(data.records)
    assert made[0] == made[1]
    assert made[0]["train"] != made[2]["train"]
    assert made[0]["train"] != made[0]["val"]


def test_vocabularies_are_compared():
    a, b = character_tokenizer("abcd"), character_tokenizer("abce")
    check_same_vocabulary(a, character_tokenizer("abcd"))
    with pytest.raises(ValueError, match=r"'d' has id 6 in the policy and None"):
        check_same_vocabulary(a, b)
