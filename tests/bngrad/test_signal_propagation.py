"""The diagnostic: right numbers, on any module, and no trace of it in training."""

import copy
import csv
import math

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from callbacks import SignalPropagation
from callbacks.signal_figure import signal_figure
from callbacks.signal_propagation import summary
from datamodules import Images
from lightning_modules import BNGrad
from lightning_modules.bngrad import DeepBNMLP, isometry_gap
from lightning_modules.bngrad.figures import NETWORK_ROLES
from lightning_modules.components.propagation import Roles, measure_signals, undisturbed

MODULE_ROLES = {
    "linear": r"network\.blocks\.(\d+)\.linear|network\.head",
    "norm": r"network\.blocks\.(\d+)\.norm",
    "activation": r"network\.blocks\.(\d+)\.activation",
}


def trainer(folder, *callbacks, **arguments) -> Trainer:
    options = {
        "max_epochs": 2, "logger": False, "enable_checkpointing": False, "accelerator": "cpu",
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        "use_distributed_sampler": False, "callbacks": list(callbacks),
    }  # fmt: skip
    return Trainer(**{**options, **arguments})


@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
def test_numbers_are_those_of_the_definition(order):
    torch.manual_seed(0)
    net = DeepBNMLP(8, 4, depth=5, width=8, norm="bn_nocenter", order=order).double()
    x, y = torch.randn(8, 8).double(), torch.arange(8) % 4
    signals = measure_signals(
        net, lambda: nn.functional.cross_entropy(net(x), y), NETWORK_ROLES, predict=True
    )
    logits, hidden = net(x, return_hidden=True)
    nn.functional.cross_entropy(logits, y).backward()
    assert signals.layers == list(range(6))
    assert signals.names[2] == "blocks.2.linear"
    assert signals.samples == 8
    for kind in ("fc", "norm", "act"):
        expected = isometry_gap(getattr(hidden, kind)).tolist()
        assert signals.columns[f"{kind}_gap"][:5] == pytest.approx(expected, rel=1e-9)
    for layer, number in zip(net.linear_maps, signals.layers, strict=True):
        assert signals.columns["grad_norm"][number] == pytest.approx(
            float(layer.weight.grad.norm())
        )
        gap = float(isometry_gap(layer.weight.detach()))
        assert signals.columns["weight_gap"][number] == pytest.approx(gap, abs=1e-12)
    assert math.isnan(signals.columns["norm_gap"][5])
    assert math.isinf(signals.columns["fc_gap"][5])  # 8 samples, 4 outputs


def test_prediction_is_the_mean_over_fresh_orthogonal_maps():
    measured, predicted = [], 0.0
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for seed in range(300):
        torch.manual_seed(seed)
        net = DeepBNMLP(8, 2, 1, 8, norm="bn_nocenter", bias=False, gain_exponent=0.0).double()
        signals = measure_signals(net, lambda net=net: net(x).sum(), NETWORK_ROLES, predict=True)
        measured.append(signals.columns["norm_gap"][0])
        predicted = signals.columns["predicted_gap"][0]
    mean = torch.tensor(measured)
    assert abs(mean.mean() - predicted) < 4 * mean.std() / math.sqrt(300)


class Restless(LightningModule):
    """Everything that a measurement could disturb: statistics, dropout, metrics, momentum."""

    def __init__(self) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.net = nn.Sequential(
            nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.5),
            nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)), nn.Tanh(),
            nn.Linear(16, 10),
        )  # fmt: skip
        self.seen = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch.x), batch.y)
        self.seen.update(loss.detach())
        self.log("train/mean", self.seen)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_training_is_the_same_with_and_without_it(tmp_path):
    results = []
    for watch in (False, True):
        torch.manual_seed(0)
        module = Restless()
        watcher = SignalPropagation(every_n_steps=2, probe_size=8)
        run = trainer(tmp_path, *([watcher] if watch else []), max_steps=9, max_epochs=-1)
        run.fit(module, Images(batch_size=64))
        results.append((module.state_dict(), run.callback_metrics))
    assert results[0][0].keys() == results[1][0].keys()
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name]), name
    assert results[0][1] == results[1][1]
    assert {row["step"] for row in watcher.rows} == {0, 2, 4, 6, 8, 9}  # the last at the end


def test_parametrized_weights_have_a_gradient():
    torch.manual_seed(0)
    module = Restless().eval()
    x = torch.randn(8, 64)
    signals = measure_signals(module, lambda: module.net(x).square().mean())
    module.net(x).square().mean().backward()
    original = module.net[4].parametrizations.weight.original
    assert signals.columns["grad_norm"][1] == pytest.approx(float(original.grad.norm()), rel=1e-5)


def test_undisturbed_restores_everything_even_after_an_error():
    module = Restless()
    module.net[0].weight.grad = torch.ones_like(module.net[0].weight)
    module.net[1].eval()
    before = copy.deepcopy(module.state_dict())
    state = torch.random.get_rng_state()

    def disturb():
        with undisturbed(module):
            module.train()
            module.net(torch.randn(4, 64)).sum().backward()
            module.seen.update(3.0)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        disturb()
    assert torch.equal(state, torch.random.get_rng_state())
    assert not module.net[1].training
    assert torch.equal(module.net[0].weight.grad, torch.ones_like(module.net[0].weight))
    assert module.net[6].weight.grad is None
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert module.seen._update_count == 0


def test_table_figure_and_summary_of_a_run(tmp_path):
    torch.manual_seed(0)
    watcher = SignalPropagation(**MODULE_ROLES)
    module = BNGrad(depth=4, width=16, norm="bn_nocenter")
    trainer(tmp_path, watcher).fit(module, Images(batch_size=128))
    assert not watcher._noted  # only the output has an infinite gap
    with (tmp_path / "signal_propagation.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "step", "epoch", "layer", "weight_gap", "fc_gap", "norm_gap", "act_gap", "grad_norm",
    ]  # fmt: skip
    assert [(int(r["step"]), int(r["epoch"]), int(r["layer"])) for r in rows] == [
        (10 * e, e, layer) for e in range(3) for layer in range(5)
    ]
    assert len(watcher.table) == 15
    assert float(rows[0]["weight_gap"]) < 1e-10  # orthogonal before the first step
    assert float(rows[10]["weight_gap"]) > 1e-7
    assert (tmp_path / "figures" / "signal_propagation.png").stat().st_size > 10000
    scalars = summary(watcher.rows[:5])
    logs = [math.log(row["grad_norm"]) for row in watcher.rows[:5]]
    assert scalars["grad_log_norm/spread"] == pytest.approx(max(logs) - min(logs))
    assert scalars["gap/fc/max"] == max(row["fc_gap"] for row in watcher.rows[:4])


def test_predicted_line_and_fallback_of_the_figure():
    constant = {"weight_gap": 0.0, "fc_gap": 1.0, "act_gap": 1.0, "grad_norm": 0.1}
    rows = [
        {"step": s, "epoch": s, "layer": i, "norm_gap": 1 / (i + 1), "predicted_gap": 1 / (i + 1)}
        | constant
        for s in range(2)
        for i in range(3)
    ]
    axes = signal_figure(rows).axes[1]
    assert axes.lines[-1].get_linestyle() == "--"
    assert list(axes.lines[-1].get_ydata()) == [1.0, 0.5, 1 / 3]
    for row in rows:
        row.update(norm_gap=math.inf, act_gap=math.inf, norm_gap_nonzero=0.5)
    rows[1]["norm_gap"] = 2.0  # one finite layer says nothing of the others
    rows[1]["predicted_gap"] = math.inf
    axes = signal_figure(rows).axes[1]
    assert axes.get_ylabel() == "isometry gap behind the norm (non-zero spectrum)"
    assert len(axes.lines) == 2


def test_a_transformer_that_is_not_ours():
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=64, num_labels=3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    before = copy.deepcopy(model.state_dict())
    tokens, labels = torch.randint(50, (8, 10)), torch.randint(3, (8,))
    outer = "bert.encoder.layer."
    roles = Roles(
        linear=r"bert\.encoder\.layer\.(\d+)\.output\.dense",
        norm=r"bert\.encoder\.layer\.(\d+)\.output\.LayerNorm",
        activation=r"bert\.encoder\.layer\.(\d+)\.intermediate\.intermediate_act_fn",
    )
    signals = measure_signals(
        model, lambda: model(input_ids=tokens, labels=labels).loss, roles, nonzero=True
    )
    assert signals.names == [f"{outer}{i}.output.dense" for i in range(3)]
    for name in ("fc_gap", "norm_gap", "act_gap", "grad_norm", "weight_gap"):
        assert all(math.isfinite(v) for v in signals.columns[name]), name
    model.eval()
    evaluated = measure_signals(model, lambda: model(input_ids=tokens, labels=labels).loss, roles)
    hidden = {}
    hook = model.bert.encoder.layer[1].output.LayerNorm.register_forward_hook(
        lambda m, i, o: hidden.update(rows=o.detach().flatten(1))
    )
    model(input_ids=tokens, labels=labels).loss.backward()
    hook.remove()
    assert evaluated.columns["norm_gap"][1] == pytest.approx(float(isometry_gap(hidden["rows"])))
    norm = float(model.bert.encoder.layer[1].output.dense.weight.grad.norm())
    assert evaluated.columns["grad_norm"][1] == pytest.approx(norm, rel=1e-5)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert (
        len(measure_signals(model, lambda: model(input_ids=tokens, labels=labels).loss).layers) > 15
    )


def test_a_graph_network_that_is_not_ours():
    from torch_geometric.nn import GCN

    torch.manual_seed(0)
    model = GCN(16, 16, num_layers=4, out_channels=16, norm="batch_norm")
    edges = torch.randint(12, (2, 30))
    x = torch.randn(12, 16)
    roles = Roles(linear=r"convs\.(\d+)\.lin", norm=r"norms\.(\d+)\.module", activation="act")
    signals = measure_signals(model, lambda: model(x, edges).square().mean(), roles, nonzero=True)
    assert signals.layers == [0, 1, 2, 3]
    assert signals.samples == 12  # the rows are nodes
    assert all(v > 0 for v in signals.columns["grad_norm"])
    # one activation module runs after every layer but the last: numbered by its calls
    assert [math.isnan(v) for v in signals.columns["act_gap_nonzero"]] == [False] * 3 + [True]


def test_compiled_blocks_are_measured_too():
    torch.manual_seed(0)
    net = DeepBNMLP(8, 4, depth=2, width=8)
    x = torch.randn(8, 8)
    expected = measure_signals(net, lambda: net(x).square().mean(), NETWORK_ROLES)
    for block in net.blocks:
        block.compile()
    got = measure_signals(net, lambda: net(x).square().mean(), NETWORK_ROLES)
    assert got.columns["fc_gap"][:2] == expected.columns["fc_gap"][:2]


def two_ranks(folder: str) -> list:
    """Job of one rank: a synchronised network under DDP, watched."""
    torch.manual_seed(0)
    watcher = SignalPropagation(**MODULE_ROLES, nonzero_gaps=True)
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16)
    run = trainer(folder, watcher, max_epochs=1, devices=2, strategy="ddp")
    run.fit(module, Images(batch_size=32))
    return watcher.rows


def test_two_ranks_measure_what_one_measures(ranks, tmp_path):
    torch.manual_seed(0)
    watcher = SignalPropagation(**MODULE_ROLES, nonzero_gaps=True, probe_size=16)
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16)
    trainer(tmp_path, watcher, max_epochs=1).fit(module, Images(batch_size=64))
    first, second = ranks(two_ranks, str(tmp_path / "two"))
    assert second == []
    assert len(first) == len(watcher.rows) == 10
    for theirs, ours in zip(first, watcher.rows, strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


def sharded(folder: str) -> list:
    """Job of one rank: parameters sharded over two processes, watched."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    torch.manual_seed(0)
    watcher = SignalPropagation(**MODULE_ROLES, nonzero_gaps=True)
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = trainer(folder, watcher, max_steps=3, max_epochs=1, devices=2, strategy=strategy)
    run.fit(module, Images(batch_size=32))
    return watcher.rows[:5]


def test_sharded_parameters(ranks, tmp_path):
    torch.manual_seed(0)
    watcher = SignalPropagation(**MODULE_ROLES, nonzero_gaps=True, probe_size=16)
    module = BNGrad(in_dim=64, out_dim=10, depth=4, width=16)
    trainer(tmp_path, watcher, max_steps=1).fit(module, Images(batch_size=64))
    first, _ = ranks(sharded, str(tmp_path / "two"))
    for theirs, ours in zip(first, watcher.rows[:5], strict=True):
        for name, value in ours.items():
            assert theirs[name] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), name


def test_duplicate_samples_are_noted_and_do_not_stop_the_run(tmp_path):
    class Same(Images):
        def setup(self, stage):
            super().setup(stage)
            self.train_set.x[:] = self.train_set.x[:64].repeat(21, 1, 1, 1)[:1294]
            self.train_set.x[::2] = self.train_set.x[0]
            self.train_set.x[1::2] = self.train_set.x[1]

    watcher = SignalPropagation(**MODULE_ROLES)
    module = BNGrad(depth=3, width=16, norm="none", activation="tanh")
    with pytest.warns(UserWarning, match="gap of layer 0 is inf: its rows are linearly dependent"):
        trainer(tmp_path, watcher, max_steps=2, max_epochs=-1).fit(module, Same(batch_size=64))
    assert math.isinf(watcher.rows[0]["fc_gap"])


def test_refused_settings(tmp_path):
    for arguments, message in (
        ({"every_n_epochs": -1}, "every_n_epochs"),
        ({"probe_size": 1}, "probe_size must be at least 2, got 1"),
        ({"per_layer": "all"}, "per_layer must be scalars, series or none"),
    ):
        with pytest.raises(ValueError, match=message):
            SignalPropagation(**arguments)
    data = Images(batch_size=64)
    for arguments, message in (
        ({"linear": "layers"}, "'layers' matches no submodule; there are network"),
        ({"norm": "("}, "is not a regular expression"),
        ({**MODULE_ROLES, "probe_size": 40}, "probe_size=40 samples in a layer of 16 features"),
    ):
        module = BNGrad(in_dim=64, out_dim=10, depth=2, width=16)
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, SignalPropagation(**arguments)).fit(module, data)
    module = Restless()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match=r"give it a method probe_loss\(batch\)"):
        trainer(tmp_path, SignalPropagation()).fit(module, data)


class Recording(CSVLogger):
    """A logger that takes tables, as that of W&B does."""

    def __init__(self, folder) -> None:
        super().__init__(folder, name="", version="")
        self.tables: list[tuple[str, list[str], list[list[float]]]] = []

    def log_table(self, key, columns, data) -> None:
        self.tables.append((key, columns, data))


def test_loggers_get_scalars_of_every_layer_and_a_table_per_measurement(tmp_path):
    logger = Recording(tmp_path)
    watcher = SignalPropagation(**MODULE_ROLES, every_n_epochs=0)
    module = BNGrad(depth=3, width=16)
    trainer(tmp_path, watcher, max_epochs=1, logger=logger).fit(module, Images(batch_size=128))
    ((key, columns, data),) = logger.tables
    assert key == "signal_propagation"
    assert columns == watcher.columns
    assert len(data) == 4
    with (tmp_path / "metrics.csv").open() as file:
        row = next(r for r in csv.DictReader(file) if r["gap/fc/layer_001"])
    assert float(row["gap/fc/layer_001"]) == pytest.approx(watcher.rows[1]["fc_gap"])
    log_norm = math.log(watcher.rows[2]["grad_norm"])
    assert float(row["grad_log_norm/layer_002"]) == pytest.approx(log_norm)
    assert float(row["gap/norm/layer_000"]) == math.inf  # the norm subtracts the batch mean
    assert "gap/norm/layer_003" not in row  # the output has no norm
