"""The Lightning modules: checkpoints, prediction, ranks."""

import csv
import sys
import types
import warnings
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy

from datamodules import Interfaces
from lightning_modules import DDGPPIformer, PPIformer
from lightning_modules.ppiformer.checkpoint import (
    average_weights,
    load_weights,
    read_published,
    to_published,
)
from lightning_modules.ppiformer.network import InterfaceNetwork
from lightning_modules.ppiformer.output import Row, heat_map, scan_matrix

SMALL = {
    "channels": (8, 4),
    "depth": 2,
    "head_widths": (4, 2),
    "radial_hidden": 4,
    "edge_embedding": 2,
}


def small_data(**options):
    defaults = {
        "batch_size": 4,
        "interfaces": 16,
        "residues_per_chain": 10,
        "evaluation_labels": 6,
        "labels_per_interface": 4,
    }
    return Interfaces(**{**defaults, **options})


def build(kind="PPIformer", **options):
    torch.manual_seed(0)
    cls = {"PPIformer": PPIformer, "DDGPPIformer": DDGPPIformer}[kind]
    model = cls(**{**SMALL, "min_mutations": 2, **options})
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():  # outputs start at zero: give every path a gradient
        for p in model.parameters():
            if p.numel() and p.abs().max() == 0:
                p.copy_(0.2 * torch.randn(p.shape, generator=g))
    return model


def trainer(folder, **options):
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "accelerator": "cpu",
        "devices": 1,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return pl.Trainer(**{**quiet, **options})


# ---------------------------------------------------------------------- many processes


def fit_on_ranks(folder, kind, strategy, devices, batch_size, options, data):
    """Weights and metrics after two epochs."""
    pl.seed_everything(0, verbose=False)
    model, source = build(kind, **options), small_data(batch_size=batch_size, **data)
    if strategy == "fsdp2":
        strategy = ModelParallelStrategy(
            data_parallel_size=devices, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    optimizer = torch.optim.SGD
    model.optimizer = lambda parameters: optimizer(parameters, lr=0.1)
    t = trainer(folder, max_epochs=2, strategy=strategy, devices=devices)
    t.fit(model, source)
    path = Path(folder) / f"{kind}-{devices}.ckpt"
    t.save_checkpoint(path, weights_only=True)
    metrics = {k: float(v) for k, v in t.callback_metrics.items() if k.startswith("val/")}
    t.strategy.barrier()
    return str(path), metrics


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["PPIformer", "DDGPPIformer"])
def test_two_processes_equal_one(ranks, tmp_path, kind, strategy):
    data = {"task": "ddg"} if kind == "DDGPPIformer" else {}
    path, metrics = fit_on_ranks(str(tmp_path), kind, "auto", 1, 4, {}, data)
    results = ranks(fit_on_ranks, str(tmp_path), kind, strategy, 2, 2, {}, data)
    one, two = (torch.load(p)["state_dict"] for p in (path, results[0][0]))
    start = build(kind).state_dict()
    assert any(
        (one[k] - start[k]).abs().max() > 1e-3 for k in start if start[k].is_floating_point()
    )
    for key, value in one.items():
        assert (two[key] - value).abs().max() < 1e-6, key
    for _, other in results:
        assert other == pytest.approx(metrics, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(
    "options",
    [
        {"read_out": "embedding_difference", "correction": True, "reverse": True},
        {"read_out": "wt_marginals", "encoder": "egnn", "unbound": True},
        {"loss_weights": {"masked": 0.1}, "read_out": "embedding_concatenation"},
    ],
)
def test_options_train_under_ddp(ranks, tmp_path, options):
    """No parameter is without gradient, and uneven batches are weighted by their rows."""
    data = {"task": "ddg", "max_nodes_per_batch": 60}
    paths = ranks(fit_on_ranks, str(tmp_path), "DDGPPIformer", "ddp", 2, 2, options, data)
    assert torch.load(paths[0][0])["state_dict"]


def uneven(total, count):
    """One rank's mean over the rows of both."""
    import os

    from lightning_modules.ppiformer.losses import mean_over_ranks

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    value = torch.tensor(total[rank], requires_grad=True)
    mean = mean_over_ranks(value, count[rank], 2)
    mean.backward()
    return mean.item(), value.grad.item()


def test_uneven_ranks_give_the_mean_over_rows(ranks):
    results = ranks(uneven, [6.0, 4.0], [3, 1])
    assert np.mean([mean for mean, _ in results]) == pytest.approx(10 / 4)
    assert [gradient for _, gradient in results] == [0.5, 0.5]  # times 1/2 by the strategy: 1/4


# ---------------------------------------------------------------------- checkpoints


def authors_checkpoint(path, network):
    """A file as the authors' Lightning writes it, with objects of a package that isn't here."""
    module = types.ModuleType("ppiformer_authors")

    class Config:
        def __init__(self):
            self.nested = {"a": [1, 2]}

    Config.__module__, Config.__qualname__ = "ppiformer_authors", "Config"
    module.Config = Config
    sys.modules["ppiformer_authors"] = module
    try:
        state = {f"model.{k}": v for k, v in to_published(network.state_dict()).items()}
        extra = {"hyper_parameters": {"model": Config()}, "callbacks": {Config: 1}}
        torch.save({"state_dict": state, **extra}, path)
    finally:
        del sys.modules["ppiformer_authors"]


def test_published_file_loads_without_its_package(tmp_path):
    source = build().network
    torch.manual_seed(5)
    full = InterfaceNetwork(**SMALL)
    from lightning_modules.ppiformer.encoder import SE3Encoder

    full.encoder = SE3Encoder((8, 4), (20, 1), 2, 2, (4, 2), 4, 2, last_layer_scalar_only=False)
    path = tmp_path / "authors.ckpt"
    authors_checkpoint(path, full)
    assert "model.classifier.lins.0.weight" in read_published(path)
    model = build(weights=str(path))
    data = small_data()
    trainer(tmp_path).validate(model, data, verbose=False)
    batch = data.val_set[[0, 1]]
    with torch.no_grad():
        assert torch.allclose(model.network(batch), full(batch), atol=1e-6)
        assert not torch.allclose(model.network(batch), source(batch), atol=1e-3)


def test_a_pickle_cannot_run_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            import os

            return os.mkdir, (str(tmp_path / "ran"),)

    path = tmp_path / "bomb.ckpt"
    torch.save({"state_dict": {"model.x": torch.zeros(1)}, "x": Bomb()}, path)
    read_published(path)
    assert not (tmp_path / "ran").exists()


def test_weights_start_and_checkpoint_wins(tmp_path):
    first = build()
    t = trainer(tmp_path, max_epochs=1)
    t.fit(first, small_data())
    path = tmp_path / "first.ckpt"
    t.save_checkpoint(path)
    tuned = build("DDGPPIformer", weights=str(path))
    t = trainer(tmp_path, max_epochs=2)
    data = small_data(task="ddg")
    t.fit(tuned, data)
    assert "val/spearman" in t.callback_metrics
    t.save_checkpoint(tmp_path / "tuned.ckpt")
    path.unlink()  # the tuned checkpoint needs no other file
    again = DDGPPIformer.load_from_checkpoint(tmp_path / "tuned.ckpt")
    results = [trainer(tmp_path).test(m, data, verbose=False)[0] for m in (tuned, again)]
    assert results[0] == results[1]
    assert "test/rmse" in results[0]
    assert "test/precision@-0.5" in results[0]
    averaged = average_weights([tmp_path / "tuned.ckpt"] * 2)
    network = InterfaceNetwork(**SMALL)
    load_weights(network, averaged)
    assert torch.allclose(network.classifier.weight, tuned.network.classifier.weight)


def test_frozen_encoder(tmp_path):
    model = build("DDGPPIformer", encoder_gradient=0.0)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    trainer(tmp_path, max_epochs=1).fit(model, small_data(task="ddg"))
    for key, value in model.state_dict().items():
        if key.startswith("network.encoder."):
            assert torch.equal(value, start[key]), key
    assert not torch.equal(model.network.classifier.weight, start["network.classifier.weight"])


def test_class_weights_of_the_data(tmp_path):
    model = build(class_weights="inverse_frequency")
    data = small_data()
    trainer(tmp_path, max_epochs=1).fit(model, data)
    counts = data.residue_counts.clamp(min=1).double()
    expected = (1 / counts) / (1 / counts).sum()
    assert torch.allclose(model.class_weight.double(), expected, atol=1e-6)


def test_validation_does_not_depend_on_epoch_or_batches(tmp_path):
    model = build()
    values = [
        trainer(tmp_path).validate(model, small_data(batch_size=size), verbose=False)[0]
        for size in (4, 7)
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0]["val/perplexity"] > 1


# ---------------------------------------------------------------------- prediction


def test_scan_writes_table_and_heat_map(tmp_path):
    paths = []
    for seed in range(2):
        model = build()
        with torch.no_grad():
            model.network.classifier.bias.normal_(generator=torch.Generator().manual_seed(seed))
        torch.save({"state_dict": model.state_dict()}, tmp_path / f"{seed}.ckpt")
        paths.append(str(tmp_path / f"{seed}.ckpt"))
    model = build(ensemble=paths)
    data = small_data(task="scan", sites=["A:3", "B:7"], batch_size=3)
    predictions = trainer(tmp_path, limit_predict_batches=1).predict(model, data)
    torch.save(predictions, tmp_path / "predictions.pt")
    assert torch.load(tmp_path / "predictions.pt", weights_only=True)
    written = model.write_predictions(predictions, tmp_path)
    assert len(written) == 1 + 3
    with open(written[0]) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 38
    assert all(float(row["sd"]) >= 0 for row in rows)
    assert max(float(row["sd"]) for row in rows) > 0
    batch = data.predict_set[[0]]
    members = []
    for path in paths:
        one = InterfaceNetwork(**SMALL)
        load_weights(one, torch.load(path)["state_dict"])
        with torch.no_grad():
            members.append(one.ddg(batch)[0])
    mean = torch.stack(members).mean(0)
    assert [float(r["ddg"]) for r in rows[:38]] == pytest.approx(mean.tolist(), abs=1e-5)
    assert rows[0]["mutation"] == batch.mutation[0][0]


def test_outside_is_imputed_and_embeddings_have_the_channels(reference, tmp_path):
    options = {"source": "files", "structures": str(reference / "1BRS_A_D.pdb.gz")}
    data = Interfaces(task="mutations", mutations=["KA27A", "VA3A"], **options)
    prediction = trainer(tmp_path).predict(build(), data)[0]
    assert prediction["in_interface"].tolist() == [True, False]
    assert prediction["ddg"][1].item() == pytest.approx(0.691834179286864)
    assert torch.isnan(prediction["sd"][1])
    plain = small_data(evaluation_labels=0)
    embedded = trainer(tmp_path).predict(build(), plain)[0]["embedding"]
    assert next(iter(embedded.values())).shape == (20, 8)


def test_case_study_ranks(tmp_path):
    data = Interfaces(source="real", task="sak")
    result = trainer(tmp_path).test(build(), data, verbose=False)[0]
    assert {"test/P@1", "test/P@4", "test/P@8", "test/mean_rank", "test/KC130T"} <= set(result)
    assert 0 < result["test/mean_rank"] <= 100


def test_testing_writes_mutations_and_groups(tmp_path):
    model, data = build(), small_data()
    logger = CSVLogger(tmp_path)
    result = trainer(tmp_path, logger=logger).test(model, data, verbose=False)[0]
    folder = Path(logger.log_dir)
    with open(folder / "test_ddg.csv") as file:
        assert len(list(csv.DictReader(file))) == 20 * 6
    with open(folder / "test_metrics.csv") as file:
        rows = {row["group"]: row for row in csv.DictReader(file)}
    assert len(rows) == 20 + 2
    groups = [rows[data.group_names[number]] for number in range(20)]
    assert all(row["n"] == "6" for row in groups)
    rmse = np.array([float(row["RMSE"]) for row in groups])
    assert float(rows["mean"]["RMSE"]) == pytest.approx(rmse.mean(), abs=1e-5)
    assert float(rows["mean"]["RMSE"]) == pytest.approx(result["test/rmse"], abs=1e-5)
    rounded = float(rows["mean of rounded"]["RMSE"])
    assert rounded == pytest.approx(rmse.round(2).mean(), abs=1e-5)


def test_figures(tmp_path):
    model, data = build(), small_data()
    trainer(tmp_path).validate(model, data, verbose=False)
    trainer(tmp_path).test(model, data, verbose=False)
    figures = model.figures()
    assert set(figures) == {"interface", "ddg"}
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.png")
    rows = [Row("x", "SC16A", 1.0, 0, True, np.nan), Row("x", "SC16A,FC47A", 2.0, 0, True, np.nan)]
    sites, matrix = scan_matrix(rows)
    assert sites == ["S C16"]
    assert matrix[0, 0] == 1.0
    assert matrix[15, 0] == 0.0
    assert np.isnan(matrix).sum() == 18
    assert heat_map(rows[1:]) is None


def test_a_network_without_training_says_so(tmp_path):
    data = small_data(task="scan", interfaces=1)
    with pytest.warns(UserWarning, match="never trained, its predictions are random"):
        trainer(tmp_path).predict(build(), data)
    trained = build()
    fit = trainer(tmp_path, max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    fit.fit(trained, small_data())
    fit.save_checkpoint(tmp_path / "trained.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*never trained")
        trainer(tmp_path).predict(build(), data, ckpt_path=tmp_path / "trained.ckpt")
