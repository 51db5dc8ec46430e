"""Speed of rejection sampling, log-probabilities and a DPO step, beside the plain way of each.

python benchmarks/rso.py

trl is compared with when it is installed (`pip install trl`); it is no dependency.
"""

import argparse
import importlib.util
import inspect
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

PROMPTS, CANDIDATES, SELECTED, BETA = 1000, 64, 8, 0.5
CHUNK = 64  # token rows at a time, less memory than the library's default
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 2048,
    "n_positions": 128,
    "n_embd": 128,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def seconds(function: Callable[[], object], repeats: int = 3) -> float:
    """CPU seconds of one call, the smallest of several."""
    function()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        function()
        best = min(best, time.process_time() - start)
    return best


def one_prompt(texts: list[str], rewards: np.ndarray, rng: np.random.Generator) -> list[str]:
    """Algorithm 1 as the paper writes it: one prompt, one candidate at a time."""
    pool = dict(zip(texts, rewards, strict=True))
    accepted: list[str] = []
    while len(accepted) < SELECTED:
        bound = max(pool.values())
        taken = []
        for text, reward in pool.items():
            if rng.uniform() < np.exp((reward - bound) / BETA):
                accepted.append(text)
                taken.append(text)
                if len(accepted) == SELECTED:
                    break
        for text in taken:
            del pool[text]
    return accepted


def sampler() -> None:
    from lightning_modules.rso import select

    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(PROMPTS, CANDIDATES, generator=generator)
    rows = rewards.numpy()
    scalars = [list(row) for row in rewards]  # what a reward model's output often is
    texts = [f"response {i}" for i in range(CANDIDATES)]
    rng = np.random.default_rng(0)
    loop = seconds(lambda: [one_prompt(texts, row, rng) for row in rows])
    print(f"sampler, {PROMPTS} prompts x {CANDIDATES} candidates -> {SELECTED}")
    print(f"  loop over prompts, numpy          {loop * 1e3:8.1f} ms")
    tensors = seconds(lambda: [one_prompt(texts, np.array(row), rng) for row in scalars], 1)
    print(f"  loop over prompts, tensor scalars {tensors * 1e3:8.1f} ms")
    for mode in ("paper", "iid", "gumbel_topk", "best_of_n"):
        ours = seconds(lambda: select(rewards, SELECTED, BETA, mode), 10)  # noqa: B023
        print(f"  ours, {mode:12s}                {ours * 1e3:8.1f} ms  {loop / ours:6.1f} x")


def peak_megabytes(warm: Callable[[], object], step: Callable[[], object]) -> float:
    """Growth of the largest resident memory during one call, in a child that ran nothing before."""
    import ctypes
    import gc
    import multiprocessing

    # memory that this process freed but kept would serve the child, and its growth be too small
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)

    def child(pipe: Connection) -> None:
        warm()  # loads what the first backward pass of a process loads
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step()
        pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    megabytes = float(ours.recv())
    process.join()
    return megabytes


def logprobs() -> None:
    from lightning_modules.components.language import gather_logprobs, head_logprobs

    rows, width, vocabulary = 1024, 128, 32_000
    default = inspect.signature(gather_logprobs).parameters["chunk"].default
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        hidden = torch.randn(rows, width).to(dtype)
        head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        labels = torch.randint(0, vocabulary, (rows,))
        ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "log_softmax and gather": lambda x, y, head=head: (
                head(x).float().log_softmax(-1).gather(-1, y[:, None]).squeeze(-1)
            ),
            "ours, from logits": lambda x, y, head=head: gather_logprobs(head(x), y, CHUNK),
            "ours, from hidden states": lambda x, y, head=head: head_logprobs(
                x, head, y, chunk=CHUNK
            ),
        }

        def step(
            way: Callable[[Tensor, Tensor], Tensor],
            count: int = rows,
            hidden: Tensor = hidden,
            head: torch.nn.Linear = head,
            labels: Tensor = labels,
        ) -> Tensor:
            x = hidden[:count].clone().requires_grad_()
            head.weight.grad = None
            way(x, labels[:count]).sum().backward()
            assert x.grad is not None
            return x.grad.float()

        print(f"log-probabilities, forward and backward, {rows} tokens x {vocabulary}, {dtype}")
        print(f"  ours in chunks of {CHUNK} tokens (default: {default})")
        peaks = {k: peak_megabytes(partial(step, w, 8), partial(step, w)) for k, w in ways.items()}
        gradients = [step(way) for way in ways.values()]
        scale = gradients[0].abs().max() * (1e-5 if dtype == torch.float32 else 2e-2)
        assert all((gradients[0] - other).abs().max() < scale for other in gradients[1:])
        for name, way in ways.items():
            spent = seconds(partial(step, way), 2)
            print(f"  {name:26s} {spent * 1e3:8.0f} ms  peak {peaks[name]:6.0f} MB")


def _pairs(number: int) -> list[dict[str, list[int]]]:
    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return rng.integers(3, GPT2["vocab_size"], length).tolist()

    return [
        {"prompt": ids(16), "chosen": [*ids(31), 1], "rejected": [*ids(31), 1]}
        for _ in range(number)
    ]


def dpo(steps: int = 12, batch: int = 8) -> None:
    import logging

    import lightning.pytorch as pl
    from torch.optim import SGD

    from datamodules.base import Collated, SuiteDataModule
    from lightning_modules.components.language import PreferenceCollator
    from lightning_modules.rso import RSO

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows = _pairs(steps * batch)

    class Pairs(SuiteDataModule):
        eos_token_id, pad_token_id = 1, 0

        def setup(self, stage: str | None = None) -> None:
            self.records = [{**row, "index": i} for i, row in enumerate(rows)]

        def train_dataloader(self) -> object:
            module = self.trainer.lightning_module
            records = module.prepare_pairs(self.records, "train", self)
            self.train_set = Collated(records, PreferenceCollator(0))
            return super().train_dataloader()

    class Clock(pl.Callback):
        """CPU seconds of the epochs after the first."""

        def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                self.start = time.process_time()

        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch == 2:
                self.spent = (time.process_time() - self.start) / (2 * steps)

    print(f"DPO step, {batch} pairs of 16 + 32 tokens, GPT-2 of width 128, 2 layers")
    ours = {}
    for reference in ("precomputed", "copy"):
        clock = Clock()
        module = RSO(
            policy="language", backbone=GPT2, pair_source="direct", reference=reference,
            reward=None, evaluate_every=0, gamma=0.1, optimizer=partial(SGD, lr=1e-4),
        )  # fmt: skip
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
            use_distributed_sampler=False, limit_val_batches=0,
        )  # fmt: skip
        trainer.fit(module, Pairs("memory", batch_size=batch))
        ours[reference] = clock.spent
        print(f"  ours, {reference:20s} {clock.spent * 1e3:8.1f} ms")
    print(
        f"  precomputed is {ours['copy'] / ours['precomputed']:.2f} x as fast as a live reference"
    )
    if importlib.util.find_spec("trl") is None:
        print("  trl is not installed: no comparison with its DPOTrainer")
        return
    for precomputed in (True, False):
        spent = _trl(rows, steps, batch, precomputed)
        name = "precomputed" if precomputed else "copy"
        label = f"trl, {'precomputed' if precomputed else 'live reference'}"
        print(f"  {label:26s} {spent * 1e3:8.1f} ms  {spent / ours[name]:.2f} x ours")


def _trl(rows: list[dict[str, list[int]]], steps: int, batch: int, precomputed: bool) -> float:
    """CPU seconds per step of trl's DPOTrainer on the same texts and model."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    from lightning_modules.components.language import build_backbone, character_tokenizer

    words = [chr(0x4E00 + i) for i in range(GPT2["vocab_size"] - 3)]
    tokenizer = character_tokenizer(words, bos=False)
    text = [{k: tokenizer.decode([t for t in v if t > 2]) for k, v in row.items()} for row in rows]

    class Clock(TrainerCallback):
        start = spent = 0.0

        def on_epoch_begin(self, args: object, state: object, control: object, **_: object) -> None:
            if round(state.epoch or 0) == 1:
                self.start = time.process_time()

        def on_epoch_end(self, args: object, state: object, control: object, **_: object) -> None:
            if round(state.epoch or 0) == 3:
                self.spent = (time.process_time() - self.start) / (2 * steps)

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = DPOConfig(
            output_dir=folder, per_device_train_batch_size=batch, num_train_epochs=3, beta=0.1,
            learning_rate=1e-4, optim="sgd", report_to=[], save_strategy="no", use_cpu=True,
            precompute_ref_log_probs=precomputed, disable_tqdm=True, logging_strategy="no",
            gradient_checkpointing=False, bf16=False, max_length=None,
        )  # fmt: skip
        trainer = DPOTrainer(
            model=build_backbone(GPT2), ref_model=None if precomputed else build_backbone(GPT2),
            args=config, train_dataset=Dataset.from_list(text), processing_class=tokenizer,
            callbacks=[clock],
        )  # fmt: skip
        trainer.train()
    return clock.spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="sampler, logprobs, dpo")
    chosen = parser.parse_args().only or ["sampler", "logprobs", "dpo"]
    torch.set_num_threads(1)
    for name in chosen:
        {"sampler": sampler, "logprobs": logprobs, "dpo": dpo}[name]()


if __name__ == "__main__":
    main()
