"""The classifier of noisy images: training, resume, ranks, and guidance with its checkpoint."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW

from datamodules import Images
from datamodules.images import ImageBatch
from lightning_modules import EpsilonScaling, NoisyClassifier
from lightning_modules.components.diffusion import ADMClassifier

NETWORK = {
    "model_channels": 32,
    "num_res_blocks": 0,
    "attention_resolutions": [],
    "channel_mult": [1, 1],
    "num_head_channels": 32,
}


FAST = partial(AdamW, lr=2e-3)


def digits(**arguments) -> Images:
    return Images(
        "digits", scaling="minus_one_one", flatten=False, batch_size=128,
        **{"val_fraction": 0.5, **arguments},
    )  # fmt: skip


def trainer(folder, **arguments) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "use_distributed_sampler": False,
        "max_epochs": 10,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 10,
        "callbacks": [ModelCheckpoint(folder, filename="end")],
    }
    return Trainer(**{**settings, **arguments})


@pytest.fixture(scope="module", autouse=True)
def seed():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PL_GLOBAL_SEED", "0")
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, seed):
    """Ten epochs of five batches, with a checkpoint in the middle of the fourth."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    fresh, model = (NoisyClassifier(NETWORK, optimizer=FAST) for _ in range(2))
    untrained = trainer(folder).validate(fresh, datamodule=digits(), verbose=False)[0]
    middle = ModelCheckpoint(
        folder, filename="middle-{step}", every_n_train_steps=17, save_top_k=-1
    )
    run = trainer(folder, callbacks=[middle, ModelCheckpoint(folder, filename="end")])
    run.fit(model, datamodule=digits())
    return folder, model, untrained, run.callback_metrics


def test_training_helps_and_noise_hurts(trained):
    folder, model, untrained, metrics = trained
    assert model.image_shape == [1, 8, 8]
    assert model.num_classes == 10
    assert metrics["val/loss"] < untrained["val/loss"] - 0.2
    assert metrics["val/acc_q1"] > 0.7
    assert metrics["val/acc_q1"] > metrics["val/acc_q2"] > metrics["val/acc_q4"]
    quarters = [float(metrics[f"val/acc_q{each}"]) for each in range(1, 5)]
    assert float(metrics["val/acc"]) == pytest.approx(sum(quarters) / 4, abs=0.01)
    loaded = NoisyClassifier.load_from_checkpoint(folder / "end.ckpt")
    tested = trainer(folder).test(loaded, datamodule=digits(), verbose=False)[0]
    assert tested["test/acc_q1"] > 0.7
    predicted = trainer(folder).predict(loaded, datamodule=digits())
    rows = torch.cat([each.probabilities for each in predicted])
    assert rows.shape == (359, 10)
    assert rows.sum(1) == pytest.approx(torch.ones(359), abs=1e-5)


def test_resume_in_the_middle_of_an_epoch(trained, tmp_path):
    folder, model, _, _ = trained
    again = NoisyClassifier(NETWORK, optimizer=FAST)
    path = folder / "middle-step=17.ckpt"
    trainer(tmp_path).fit(again, datamodule=digits(), ckpt_path=path)
    for name, value in model.classifier.state_dict().items():
        assert torch.equal(again.classifier.state_dict()[name], value), name


def test_ranks_share_the_global_batch(trained, monkeypatch):
    """The mean loss of two halves is that of the whole: each sample keeps its own noise."""
    folder, _, _, _ = trained
    model = NoisyClassifier.load_from_checkpoint(folder / "end.ckpt")
    monkeypatch.setattr(model, "objective", lambda **terms: terms["cross_entropy"].detach())
    data = digits()
    data.setup("fit")
    whole = model.training_step(data.train_set[list(range(32))], 0)
    halves = []
    for rank in (0, 1):
        monkeypatch.setattr(NoisyClassifier, "global_rank", rank)
        batch = data.train_set[list(range(16 * rank, 16 * rank + 16))]
        halves.append(model.training_step(batch, 0))
    assert float(halves[0] + halves[1]) / 2 == pytest.approx(float(whole), rel=1e-5)
    assert float(halves[1]) != pytest.approx(float(whole), rel=1e-3)


def test_its_checkpoint_guides(trained):
    """Samples of a network that ignores labels are classified as what was asked for."""
    folder, classifier, _, _ = trained

    def sampler(scale: float, **arguments) -> EpsilonScaling:
        model = EpsilonScaling(
            network_args={"width": 16, "blocks": 1}, image_shape=[1, 8, 8], num_classes=10,
            guidance="classifier", guidance_scale=scale, respacing="10",
            classifier_checkpoint=str(folder / "end.ckpt"), **arguments,
        )  # fmt: skip
        torch.manual_seed(0)
        for parameter in model.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.01)
        return model

    labels = torch.arange(60) % 10
    agreement = []
    for scale in (0.0, 5.0):
        model = sampler(scale)
        x = model.sample(torch.arange(60), labels)
        with torch.no_grad():
            guess = classifier(x, torch.zeros(60, dtype=torch.int64)).argmax(1)
        agreement.append(float((guess == labels).float().mean()))
        assert not any("classifier" in name for name in model.state_dict())
    assert agreement[0] < 0.3
    assert agreement[1] > agreement[0] + 0.3
    fit = trainer(folder).test(sampler(5.0), datamodule=digits(), verbose=False)[0]
    assert fit["test/fd_classifier"] > 0  # the gradient exists in inference mode too
    with pytest.raises(ValueError, match="trained on another noise schedule"):
        sampler(1.0, schedule="cosine").sample(torch.arange(2), labels[:2])


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match="num_classes must be at least 2"):
        NoisyClassifier(num_classes=1)
    with pytest.raises(ValueError, match=r"network_args: .*widht"):
        NoisyClassifier({"widht": 3}, image_shape=[1, 8, 8], num_classes=10)
    model = NoisyClassifier(NETWORK, image_shape=[1, 8, 8], num_classes=3)
    x = -torch.ones(2, 1, 8, 8)
    with pytest.raises(ValueError, match="below num_classes = 3"):
        model.training_step(ImageBatch(x, torch.tensor([0, 3])), 0)
    with pytest.raises(ValueError, match=r"most likely 0\.\.255"):
        model.training_step(ImageBatch(x + 256, torch.tensor([0, 2])), 0)

    class Unlabelled:
        x = -torch.ones(2, 1, 8, 8)

    with pytest.raises(ValueError, match="the batch has no y"):
        model.training_step(Unlabelled(), 0)
    arguments = {
        "image_size": 8, "in_channels": 1, "out_channels": 10, **NETWORK,
    }  # fmt: skip
    torch.save(ADMClassifier(**arguments).state_dict(), tmp_path / "published.pt")
    for name, kind, message in (
        ("published.pt", ValueError, "needs classifier_args"),
        ("none.pt", FileNotFoundError, "no checkpoint at"),
    ):
        guided = EpsilonScaling(
            network_args={"width": 16, "blocks": 1}, image_shape=[1, 8, 8], num_classes=10,
            guidance="classifier", classifier_checkpoint=str(tmp_path / name),
        )  # fmt: skip
        with pytest.raises(kind, match=message):
            guided.sample(torch.arange(2), torch.tensor([0, 1]))
