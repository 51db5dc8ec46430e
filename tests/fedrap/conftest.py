"""Reference rounds and a plain client loop."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from lightning_modules.fedrap.federation import Federation
from lightning_modules.fedrap.local_training import LocalTraining
from lightning_modules.fedrap.objective import Objective, client_loss
from lightning_modules.fedrap.schedule import Order, Samples
from lightning_modules.fedrap.settings import Federating

REFERENCE = Path(__file__).parent / "reference"


@dataclass
class Replay:
    """A federation fed with recorded rounds."""

    arrays: Any
    config: dict[str, Any]
    dtype: torch.dtype = torch.float64

    @classmethod
    def load(cls, name: str, dtype: torch.dtype = torch.float64) -> "Replay":
        arrays = np.load(REFERENCE / f"{name}.npz")
        return cls(arrays, json.loads(str(arrays["config_json"])), dtype)

    @property
    def rounds(self) -> int:
        return sum(key.endswith("_C") and key != "init_C" for key in self.arrays.files)

    def tensor(self, key: str) -> Tensor:
        value = torch.from_numpy(np.asarray(self.arrays[key]))
        return value.to(self.dtype) if value.is_floating_point() else value.long()

    def federation(self, rank: int = 0, world_size: int = 1, **options: Any) -> Federation:
        block_rows = options.pop("block_rows", None)
        store = options.pop("store", "dense")
        settings = Federating(
            round_decay=self.config["decay_rate"], block_rows=block_rows, **options
        )
        initial = [self.tensor(f"init_{name}") for name in "CDub"]
        return Federation(*initial, self.config["num_users"], settings, store, rank, world_size)

    def training(self, **objective: Any) -> LocalTraining:
        c = self.config
        options = {"regulariser": c["regular"], "saturating": True, **objective}
        decay = c["l2_regularization"]
        return LocalTraining(
            Objective(c["lambda"], c["mu"], **options),
            lr_network=c["lr_network"],
            lr_common=c["lr_args"],
            lr_personal=c["lr_args"],
            decay_network=decay,
            decay_common=decay,
            decay_personal=decay,
            epochs=c["local_epoch"],
            tolerance=c["tol"],
        )

    def samples(self, number: int, client: Tensor) -> tuple[Samples, Order]:
        """Recorded samples of some of a round's participants, in the order that was fed."""
        get = lambda key: self.tensor(f"r{number}_batch_{key}")  # noqa: E731
        user = get("user")
        mine = torch.isin(user, client)
        position = torch.searchsorted(client, user[mine])
        every = torch.arange(int(mine.sum()))
        samples = Samples(position, get("item")[mine], get("label")[mine])
        return samples, Order(get("epoch")[mine], get("slot")[mine], every)

    def participants(self, number: int) -> Tensor:
        return self.tensor(f"r{number}_participants").sort().values

    def run_round(
        self, federation: Federation, number: int, training: LocalTraining, pieces: int = 1
    ) -> Tensor:
        """Train a round's participants; returns their record before the round is finished."""
        client = self.participants(number)
        client = client[client % federation.world_size == federation.rank]
        for part in client.chunk(pieces):
            federation.train_clients(part, *self.samples(number, part), training)
        return federation.round_clients.clone()


def client_loop(
    samples: dict[int, list[list[tuple[Tensor, Tensor]]]],
    common: Tensor,
    personal: Tensor,
    vector: Tensor,
    bias: Tensor,
    training: LocalTraining,
) -> tuple[Tensor, dict[int, tuple[float, int]]]:
    """One round as it is written in the paper: one client after the other, autograd, dense SGD.

    Args:
        samples: client -> epochs -> batches -> (items, labels).
        common: ``C``; the others are changed in place, one row per client.

    Returns:
        The averaged ``C``, and for every client its loss and number of epochs.
    """
    uploads, reports = [], {}
    for i, epochs in samples.items():
        tables = [personal[i], common, vector[i], bias[i : i + 1]]
        d, c, u, b = (x.clone().requires_grad_(True) for x in tables)
        lr = [training.lr_personal, training.lr_common] + [training.lr_network] * 2
        decay = [training.decay_personal, training.decay_common] + [training.decay_network] * 2
        total, rows, previous, run, step = 0.0, 0, None, 0, 0
        for batches in epochs:
            for items, labels in batches:
                loss = client_loss(items, labels, d, c, u, b, training.objective)
                grads = torch.autograd.grad(loss, (d, c, u, b))
                factor = training.step_decay**step
                with torch.no_grad():
                    for p, g, eta, wd in zip((d, c, u, b), grads, lr, decay, strict=True):
                        p -= eta * factor * (g + wd * p)
                step += 1
                total, rows = total + loss.item() * len(items), rows + len(items)
            run += 1
            current = total / rows
            if previous is not None and abs(current - previous) / abs(previous) < (
                training.tolerance
            ):
                break
            previous = current
        personal[i], vector[i], bias[i] = d.detach(), u.detach(), b.detach()[0]
        uploads.append(c.detach())
        reports[i] = (total / rows, run)
    return torch.stack(uploads).mean(0), reports


@pytest.fixture
def reference() -> Path:
    return REFERENCE


@pytest.fixture
def replay() -> type[Replay]:
    return Replay


@pytest.fixture
def loop() -> Any:
    return client_loop


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def fit_model(model: Any, data: Any, epochs: int = 2, callbacks: Any = (), **options: Any) -> Any:
    """Train on the CPU without files; gives the trainer."""
    path = options.pop("ckpt_path", None)
    trainer = Trainer(
        **{
            "max_epochs": epochs,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            **options,
        }
    )
    trainer.fit(model, data, ckpt_path=path)
    return trainer


@pytest.fixture
def fit() -> Any:
    seed_everything(0, verbose=False)
    return fit_model
