"""Two CPU processes, DDP and FSDP2, give the result of one."""

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.optim import SGD

from datamodules import Preferences
from lightning_modules.rso import RSO, RewardRanking, SupervisedFineTuning

TINY = {
    "model_type": "gpt2",
    "vocab_size": 16,
    "n_positions": 48,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


_SGD = partial(SGD, lr=0.05)


def job(kind, strategy, devices, folder, options):
    """Fit a module on one or two processes; weights, records and metrics."""
    torch.set_num_threads(1)
    pl.seed_everything(0)
    if strategy == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(
            data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    task = "demonstrations" if kind == "sft" else "pairs"
    data = Preferences(
        "length_target", task=task, n_train=32, n_val=9, n_prompts=12, batch_size=8 // devices
    )
    if kind == "sft":
        module = SupervisedFineTuning(TINY, optimizer=_SGD)
    elif kind == "reward":
        module = RewardRanking(TINY, optimizer=_SGD, **options)
    else:
        module = RSO(
            policy="language", backbone=TINY, temperature=1.0, top_k=0, n_candidates=6, n_select=4,
            gamma=0.5, group=5, optimizer=_SGD, **options,
        )  # fmt: skip
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=devices, strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        use_distributed_sampler=False, default_root_dir=folder, num_sanity_val_steps=0,
        gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, data)
    path = f"{folder}/{kind}-{devices}.ckpt"
    trainer.save_checkpoint(path)
    metrics = {k: v.item() for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
    records = getattr(module, "_records", None)
    weights = torch.load(path, weights_only=True)["state_dict"] if trainer.is_global_zero else None
    return weights, records, metrics


def compare(one, two, tolerance):
    assert one[0].keys() == two[0].keys()
    for name, value in one[0].items():
        assert torch.allclose(value, two[0][name], atol=tolerance), name
    assert one[1] == two[1]
    assert one[2].keys() == two[2].keys()
    for name, value in one[2].items():
        assert abs(value - two[2][name]) < 1e-4, name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rso", {}),
        ("rso", {"pair_source": "direct", "reference": "copy"}),
        ("sft", {}),
        ("reward", {"kind": "pairwise_text"}),
        ("reward", {"kind": "bradley_terry"}),
    ],
    ids=["rso", "dpo-copy", "sft", "pairwise", "bradley-terry"],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_equal_one(ranks, tmp_path, kind, options, strategy):
    one = job(kind, "auto", 1, str(tmp_path), options)
    first, second = ranks(job, kind, strategy, 2, str(tmp_path), options)
    compare(one, first, 1e-6)
    assert first[1] == second[1]


def test_a_sharded_checkpoint_loads_in_one_process(ranks, tmp_path):
    ranks(job, "rso", "fsdp2", 2, str(tmp_path), {"pair_source": "direct"})
    module = RSO.load_from_checkpoint(tmp_path / "rso-2.ckpt", weights_only=True)
    assert not any(hasattr(p, "full_tensor") for p in module.parameters())
    data = Preferences("length_target", n_train=8, n_val=8, batch_size=8)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        default_root_dir=tmp_path, use_distributed_sampler=False,
    )  # fmt: skip
    (metrics,) = trainer.validate(module, data, verbose=False)
    assert metrics["val/loss"] > 0
