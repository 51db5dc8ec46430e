"""Jobs that two ranks run together; each returns plain arrays."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy

from callbacks import ExposureBiasMonitor
from datamodules import Images
from lightning_modules import EpsilonScaling

UNET = {
    "model_channels": 32,
    "num_res_blocks": 1,
    "attention_resolutions": [2],
    "channel_mult": [1, 2],
    "num_head_channels": 32,
}


def digits(batch_size: int, val_fraction: float = 0.1) -> Images:
    return Images(
        "digits",
        scaling="minus_one_one",
        flatten=False,
        batch_size=batch_size,
        val_fraction=val_fraction,
    )


# Adam would magnify rounding errors of tiny gradients.
SGD = partial(torch.optim.SGD, lr=0.05)


def fit(kind: str, strategy: str, devices: int, batch_size: int, folder: str) -> dict:
    seed_everything(3)
    torch.set_num_threads(1)
    if kind == "unet":
        model = EpsilonScaling("unet", UNET, variance="learned_range", respacing="4", optimizer=SGD)
    else:
        model = EpsilonScaling(
            "mlp",
            {"width": 16, "blocks": 1},
            timestep_sampling="loss_second_moment",
            diffusion_steps=4,
            schedule="cosine",
            respacing="2",
            num_classes=10,
            label_dropout=0.3,
            input_perturbation=0.1,
            optimizer=SGD,
        )
    chosen = (
        ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
        if strategy == "fsdp2"
        else strategy
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=chosen,
        max_steps=3 if kind == "unet" else 12,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=kind == "unet",
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    trainer.fit(model, datamodule=digits(batch_size))
    if kind == "unet":
        path = Path(folder) / f"{strategy}.ckpt"
        trainer.save_checkpoint(path)
    state = model.state_dict()
    if kind == "unet":
        state = torch.load(path, weights_only=True)["state_dict"]
    return {name: value.numpy() for name, value in state.items()}


def quality_values(devices: int, batch_size: int, folder: str) -> dict[str, float]:
    seed_everything(3)
    torch.set_num_threads(1)
    model = EpsilonScaling(
        "exact", respacing="4", clip=None, compare=[1.02], feature_network="pixels"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    values = trainer.test(model, datamodule=digits(batch_size), verbose=False)[0]
    return {name: float(value) for name, value in values.items()}


def exposure_bias(folder: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Curve of the monitor, that of this rank's images alone, and how many they are."""
    seed_everything(3)
    torch.set_num_threads(1)
    model = EpsilonScaling(network_args={"width": 16, "blocks": 1}, respacing="3")
    measure, own = model.exposure_bias, []

    def noted(x0: torch.Tensor, labels: torch.Tensor | None = None):
        bias = measure(x0, labels)
        own.append((bias.training_norm.numpy(), len(x0)))
        return bias

    model.exposure_bias = noted
    monitor = ExposureBiasMonitor(samples=100)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[monitor],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        use_distributed_sampler=False,
    )
    trainer.validate(model, datamodule=digits(32, 0.0995), verbose=False)
    return monitor.curves["training_norm"].numpy(), *own[-1]
