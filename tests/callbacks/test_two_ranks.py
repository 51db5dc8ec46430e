"""Callbacks in two processes, replicated (DDP) and sharded (FSDP2), against one process."""

import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from toy import Toy, ToyData

from callbacks import Curriculum, Figures, GradientNorms, Regularization
from callbacks.schedules import Linear
from lightning_modules.components.sharding import full, shard_blocks

KINDS = ("l1", "l2", "group_lasso", "orthogonality", "spectral_norm")


class Blocks(nn.Module):
    """Layers to be sharded one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 7), nn.Linear(7, 8)])
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x)


class Sharded(Toy):
    """`Toy` with a network of blocks and a figure that reads its weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.net = Blocks()
        self.sharded: list[list[str]] = []

    def configure_model(self) -> None:
        self.sharded.append(shard_blocks(self.net, self.device_mesh, "layers.*"))

    def default_optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05)

    def figures(self):
        from matplotlib.figure import Figure

        figure = Figure()
        figure.subplots().imshow(full(self.net.layers[0].weight.detach()))
        return {"weights": figure}


def train(strategy: str, devices: int, accumulate: int) -> dict:
    """Two epochs with a global batch of 12; whole weights, logged values and figures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seed_everything(0, verbose=False)
    folder = tempfile.mkdtemp()
    module = Sharded()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        if strategy == "fsdp2"
        else strategy,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        log_every_n_steps=1,
        default_root_dir=folder,
        callbacks=[
            *[Regularization(kind, weight=0.03) for kind in KINDS],
            Curriculum("loss_weights.l1", Linear(length=6), relative=True),
            GradientNorms(),
            Figures(dpi=40),
        ],
    )
    trainer.fit(module, ToyData(batch_size=12 // devices))
    return {
        "weights": {n: full(p.detach()).clone() for n, p in module.named_parameters()},
        "logged": {k: float(v) for k, v in trainer.logged_metrics.items()},
        "figures": [path.name for path in Path(folder).rglob("*.png")],
        "sharded": module.sharded,
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_equal_to_one_process(ranks, strategy: str, accumulate: int) -> None:
    one = train("auto", 1, accumulate)
    two = ranks(train, strategy, 2, accumulate)
    for result in two:
        for name, weight in one["weights"].items():
            assert torch.allclose(result["weights"][name], weight, rtol=0, atol=1e-6), name
        for name, value in one["logged"].items():
            if name.startswith(("grad_norm/", "curriculum/")) or name[6:] in KINDS:
                assert result["logged"][name] == pytest.approx(value, rel=1e-4), name
    assert [len(result["figures"]) for result in two] == [1, 0]
    first = ["layers.0", "layers.1"] if strategy == "fsdp2" else []
    assert two[0]["sharded"][0] == first
    assert one["sharded"] == [[]]


def shard_twice() -> tuple[list[str], list[str], str]:
    """What two calls shard, and what a wrong pattern says."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    network = nn.Sequential(Blocks(), Blocks())
    first = shard_blocks(network, mesh, ["[01]", "*.layers.*"])
    second = shard_blocks(network, mesh, "[01]")
    try:
        shard_blocks(network, mesh, "b.*")
    except ValueError as error:
        return first, second, str(error)
    return first, second, ""


def test_shard_blocks(ranks) -> None:
    first, second, message = ranks(shard_twice)[0]
    inner = [f"{i}.layers.{j}" for i in (0, 1) for j in (0, 1)]
    assert first == [*inner, "0", "1"]
    assert second == []
    assert message == "pattern='b.*' matches no block; the network has 0, 1"
    assert shard_blocks(nn.Linear(1, 1), None, "anything") == []


def test_full_of_a_plain_tensor_is_itself() -> None:
    tensor = torch.ones(2)
    assert full(tensor) is tensor
