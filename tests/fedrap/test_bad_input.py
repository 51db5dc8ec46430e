"""What is refused, and with which words."""

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks import Regularization
from datamodules import Interactions
from lightning_modules import FedRAP
from lightning_modules.fedrap import CentralRecommender, FedNCF
from lightning_modules.fedrap.personal_store import DensePersonal

SMALL = {"source": "planted", "max_users": 30, "batch_size": 30}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "addditive"}, "mode must be one of additive, global_only"),
        ({"loss_weights": {"independence": -0.1}}, "loss_weights.independence must be at least 0"),
        ({"loss_weights": {"lambda": 0.1}}, "no term 'lambda'.*independence, sparsity"),
        ({"regulariser": "l3"}, "regulariser must be one of l1, l2, nuc, inf, none"),
        ({"regulariser_scope": "rows"}, "regulariser_scope must be one of batch, table"),
        ({"lr_item": -1.0}, "lr_item must be at least 0, got -1.0"),
        ({"lr_item": float("nan")}, "lr_item must be at least 0, got nan"),
        ({"width": 0}, "width must be at least 1"),
        ({"local_epochs": 0}, "local_epochs must be at least 1"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"round_decay": 0.0}, "round_decay must be above 0"),
        ({"server": "krum"}, "server must be one of mean, weighted, fedadam, median"),
        ({"dp_noise": 1.0}, "dp_noise=1.0 needs dp_clip"),
        ({"dp_clip": 1.0, "server": "weighted"}, "dp_clip bounds .* instead of 'weighted'"),
        ({"dp_delta": 1.0}, r"dp_delta must be in \(0, 1\)"),
        ({"l1_mode": "prox", "regulariser": "l2"}, "needs regulariser='l1'"),
        ({"l1_mode": "prox", "weight_decay": 0.01}, "lr_item \\* weight_decay below 1"),
        ({"store": "disk"}, "store must be one of dense, lazy"),
        ({"custom_objective": "nowhere.loss"}, "custom_objective must be the dotted path"),
        ({"store": "lazy", "mode": "pfedrec", "n_users": 3, "n_items": 9}, "store='lazy' does not"),
    ],
)
def test_model_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        FedRAP(**options)


def test_baseline_arguments():
    with pytest.raises(ValueError, match="network must be one of mf, gmf, bpr, neumf, lightgcn"):
        CentralRecommender("svd")
    with pytest.raises(ValueError, match="lr must be above 0"):
        FedNCF(lr=0.0)


def test_divergence_stops_with_client_and_round(fit):
    module = FedRAP(width=4, lr_item=1e5, loss_weights={"independence": 50.0})
    with pytest.raises(ValueError, match=r"loss of client \d+ is not finite in round \d+"):
        fit(module, Interactions(**SMALL), epochs=5)


def test_a_list_as_long_as_the_candidates_is_refused(fit):
    with pytest.raises(ValueError, match="top_k=100 must be below the number of sampled cand"):
        fit(FedRAP(width=4, top_k=100), Interactions(**SMALL), epochs=1)
    with pytest.raises(ValueError, match="top_k=300 must be below the number of candidates"):
        fit(FedRAP(width=4, top_k=300), Interactions(**SMALL), epochs=1)


def test_checkpoint_of_other_sizes(fit, tmp_path):
    module = FedRAP(width=4, lr_item=10.0)
    trainer = fit(module, Interactions(**SMALL), epochs=1)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    n_items = module.n_items
    more = Interactions(**{**SMALL, "max_users": 31})
    with pytest.raises(ValueError, match="n_users is 30 in the checkpoint and 31 here") as error:
        fit(FedRAP(width=5), more, ckpt_path=path)
    assert "width is 4 in the checkpoint and 5 here" in str(error.value)
    with pytest.raises(ValueError, match="written with store='dense', this is 'lazy'"):
        fit(FedRAP(width=4, store="lazy"), Interactions(**SMALL), ckpt_path=path)
    with pytest.raises(ValueError, match="written with another server="):
        fit(FedRAP(width=4, server="fedadam"), Interactions(**SMALL), ckpt_path=path)
    with pytest.raises(ValueError, match=f"n_items={n_items + 1}, the data have {n_items}"):
        fit(FedRAP(n_users=30, n_items=n_items + 1), Interactions(**SMALL))


def test_too_large_tables_name_the_bytes_and_the_lazy_store(monkeypatch):
    monkeypatch.setattr(
        "lightning_modules.fedrap.personal_store._available_bytes", lambda device: 1000
    )
    with pytest.raises(ValueError, match=r"need 4800 bytes \(10 x 30 x 4\).*store='lazy'"):
        DensePersonal(torch.zeros(30, 4), 10)
    DensePersonal(torch.zeros(30, 4), 2)


def test_penalties_of_a_callback_would_have_no_effect(fit):
    penalty = Regularization("l2", 0.1, "anchor")
    with pytest.raises(ValueError, match="use regulariser= of the model instead"):
        fit(FedRAP(width=4), Interactions(**SMALL), callbacks=[penalty])


def test_a_model_without_sizes_says_so():
    with pytest.raises(ValueError, match="no sizes yet: give n_users and n_items"):
        FedRAP().scores(torch.tensor([0]))
    module = FedRAP()
    loader = torch.utils.data.DataLoader([0])
    trainer = Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match="n_users is not known"):
        trainer.fit(module, loader)
