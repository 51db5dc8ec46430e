"""The LightningModule: training, guidance, EDM, test, prediction, callbacks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from callbacks import Curriculum, ExposureBiasMonitor, LambdaSearch
from callbacks.schedules import Linear
from datamodules import GaussianMixture, ImageFiles, Images
from datamodules.images import ImageBatch
from lightning_modules import EpsilonScaling
from lightning_modules.components.diffusion import ADMClassifier
from lightning_modules.epsilon_scaling import EpsilonSchedule, generate
from lightning_modules.epsilon_scaling.sample_metrics import sliced_wasserstein

SMALL = {"network_args": {"width": 32, "blocks": 1}}
UNET = {
    "model_channels": 32,
    "num_res_blocks": 1,
    "attention_resolutions": [2],
    "channel_mult": [1, 2],
    "num_head_channels": 32,
}


def digits(batch_size=128, **arguments) -> Images:
    return Images(
        "digits", scaling="minus_one_one", flatten=False, batch_size=batch_size, **arguments
    )


def trainer(folder, **arguments) -> Trainer:
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        "use_distributed_sampler": False,
        "max_epochs": 2,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**settings, **arguments})


def batch(count=8, channels=1, side=8, classes=10) -> ImageBatch:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, channels, side, side, generator=generator) * 2 - 1
    return ImageBatch(x, torch.arange(count) % classes)


def test_training_never_sees_lambda():
    """Scaled or not, the loss and its gradient are the same."""
    gradients = []
    for scale in (1.0, 1.1):
        torch.manual_seed(0)
        model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], epsilon_scale=scale)
        model.training_step(batch(), 0).backward()
        gradients.append(model.denoiser.outlet.weight.grad)
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def test_noise_belongs_to_the_position_and_the_iteration():
    torch.manual_seed(0)
    model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8])
    losses = [model.training_step(batch(), 0).item() for _ in range(2)]
    assert losses[0] == losses[1]
    model._iterations = 1
    assert model.training_step(batch(), 0).item() != losses[0]


@pytest.mark.parametrize("loss", ["mse", "rescaled_mse", "kl", "rescaled_kl"])
def test_learned_variance_trains(tmp_path, loss):
    model = EpsilonScaling(
        "unet", UNET, variance="learned_range", loss=loss, schedule="cosine", respacing="3"
    )
    run = trainer(tmp_path, max_steps=2, max_epochs=-1, limit_val_batches=1)
    run.fit(model, datamodule=digits(8))
    assert np.isfinite(float(run.callback_metrics["train/loss"]))
    expected = {"mse", "vb"} if "mse" in loss else {"vb"}
    logged = {name.removeprefix("train/") for name in run.callback_metrics if "train/" in name}
    assert logged == expected | {"loss"}
    samples = model.sample(torch.arange(2))
    assert samples.shape == (2, 1, 8, 8)
    assert samples.abs().max() > 0


def test_average_weights_are_sampled(tmp_path):
    """After fit with EMA the module holds the average, and the iteration is a whole count."""
    model = EpsilonScaling(**SMALL, respacing="4")
    average = EMAWeightAveraging(decay=0.9, use_buffers=False)
    run = trainer(tmp_path, callbacks=[average])
    run.fit(model, datamodule=digits())
    assert int(model.training_iterations) == run.global_step
    path = tmp_path / "model.ckpt"
    run.save_checkpoint(path)
    loaded = EpsilonScaling.load_from_checkpoint(path, map_location="cpu")
    positions = torch.arange(4)
    assert torch.equal(loaded.sample(positions), model.sample(positions))


def test_validation_uses_fixed_noise_and_quarters(tmp_path):
    model, data = EpsilonScaling(**SMALL), digits()
    run = trainer(tmp_path)
    first, second = (run.validate(model, datamodule=data, verbose=False)[0] for _ in range(2))
    assert first == second
    assert set(first) == {"val/loss", *(f"val/mse_q{quarter}" for quarter in range(1, 5))}
    quarters = [first[f"val/mse_q{quarter}"] for quarter in range(1, 5)]
    assert np.mean(quarters) == pytest.approx(first["val/loss"], rel=0.05)
    shared = trainer(tmp_path).validate(model, datamodule=digits(50), verbose=False)[0]
    assert shared["val/loss"] == pytest.approx(first["val/loss"], rel=1e-5)


def test_samples_do_not_depend_on_the_batch():
    model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], sampler="ancestral", respacing="5")
    whole = model.sample(torch.arange(6))
    parts = torch.cat([model.sample(torch.arange(3)), model.sample(torch.arange(3, 6))])
    torch.testing.assert_close(whole, parts, atol=1e-5, rtol=1e-5)
    other = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], respacing="5", sample_seed=1)
    assert (whole - other.sample(torch.arange(6))).abs().max() > 0.1


def test_network_without_training_cannot_be_fitted(tmp_path):
    with pytest.raises(ValueError, match="nothing to train"):
        trainer(tmp_path).fit(EpsilonScaling("exact"), datamodule=digits())


def test_exact_test_and_search(tmp_path):
    """fd falls with lambda above 1 on paired noise, and the search finds such a lambda."""
    model = EpsilonScaling("exact", respacing="10", clip=None, compare=[1.025], samples_per_image=2)
    search = LambdaSearch("golden", 1.0, 1.06, evaluations=5, samples=300)
    run = trainer(tmp_path, callbacks=[search])
    values = run.test(model, datamodule=digits(), verbose=False)[0]
    assert len(search.tried) == 5
    assert 1.0 < model.epsilon_scale < 1.06
    assert search.tried[0] != search.tried[1]
    assert model.epsilon_schedule.offset == model.epsilon_scale
    plain = EpsilonScaling("exact", respacing="10", clip=None, compare=[1.025], samples_per_image=2)
    base = trainer(tmp_path).test(plain, datamodule=digits(), verbose=False)[0]
    assert base["test/fd_classifier"] > 1.2 * base["test/fd_classifier@1.025"]
    assert values["test/fd_classifier@1.025"] == pytest.approx(
        base["test/fd_classifier@1.025"], rel=1e-6
    )
    assert values["test/fd_classifier"] < base["test/fd_classifier"]
    assert 0.9 < values["test/precision_classifier"] <= 1
    assert 5 < values["test/is_classifier"] < 10  # ten classes, nearly all told apart
    assert set(plain.figures()) == {"samples_1", "samples_1.025"}
    assert not any("fid" in name for name in values)


def test_grid_search_with_one_scale_leaves_it(tmp_path):
    model = EpsilonScaling("exact", respacing="4", clip=None, feature_network="pixels")
    search = LambdaSearch("grid", grid=[1.01], samples=100)
    trainer(tmp_path, callbacks=[search]).test(model, datamodule=digits(), verbose=False)
    assert model.epsilon_scale == 1.01


def test_exposure_bias_monitor(tmp_path):
    model = EpsilonScaling(**SMALL, respacing="5", sampler="ancestral")
    monitor = ExposureBiasMonitor(samples=64)
    run = trainer(tmp_path, max_epochs=1, callbacks=[monitor])
    run.fit(model, datamodule=digits())
    for name in ("delta", "marginal_gap", "norm_ratio"):
        assert np.isfinite(float(run.callback_metrics[f"exposure/{name}"]))
    assert monitor.curves["delta"].shape == (5,)
    assert len(monitor.figure().axes[0].lines) == 3
    bias = model.exposure_bias(digits_images()[:64])
    assert bias.training_norm.shape == (5,)
    with pytest.raises(TypeError, match="exposure_bias"):
        monitor.setup(run, torch.nn.Linear(1, 1), "fit")
    with pytest.raises(ValueError, match="samples"):
        ExposureBiasMonitor(samples=1)
    with pytest.raises(ValueError, match="every_n_epochs"):
        ExposureBiasMonitor(every_n_epochs=0)


def test_exposure_bias_of_a_conditional_model_uses_the_labels_of_the_images(tmp_path):
    torch.manual_seed(0)
    model = EpsilonScaling(**SMALL, respacing="4", num_classes=10, image_shape=[1, 8, 8])
    torch.nn.init.normal_(model.denoiser.label_emb.weight, std=3.0)
    monitor = ExposureBiasMonitor(samples=40)
    data = digits(batch_size=32)
    trainer(tmp_path, callbacks=[monitor]).validate(model, datamodule=data, verbose=False)
    rows = data.val_set[list(range(40))]
    with torch.no_grad():
        right, wrong = model.exposure_bias(rows.x, rows.y), model.exposure_bias(rows.x)
    torch.testing.assert_close(monitor.curves["training_norm"], right.training_norm.float())
    assert (right.training_norm - wrong.training_norm).abs().max() > 1e-3


def test_own_features_called_inception_are_not_fid():
    model = EpsilonScaling(**SMALL, feature_network="my_package.Inception")
    assert model._feature_name == "own_inception"
    assert EpsilonScaling(**SMALL, feature_network="inception")._feature_name == "inception"


def digits_images() -> torch.Tensor:
    data = digits()
    data.setup("fit")
    return data.train_set[list(range(len(data.train_set)))].x


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "random"}, "method"),
        ({"low": 1.1, "high": 1.0}, "low < high"),
        ({"evaluations": 3}, "at least 4"),
        ({"method": "grid"}, "needs grid"),
        ({"samples": 1}, "samples"),
    ],
)
def test_bad_search(arguments, message):
    with pytest.raises(ValueError, match=message):
        LambdaSearch(**arguments)


def test_classifier_free_guidance(tmp_path):
    """Labels are learned, dropped ones too; guidance changes samples, scale 1 does not."""
    model = EpsilonScaling(
        **SMALL, num_classes=10, label_dropout=0.2, guidance="classifier_free", respacing="4"
    )
    trainer(tmp_path, max_epochs=1).fit(model, datamodule=digits())
    assert model.denoiser.label_emb.num_embeddings == 11
    positions, labels = torch.arange(10), torch.arange(10)
    model.guidance_scale = 1.0
    plain = model.sample(positions, labels)
    model.guidance = "none"
    assert torch.equal(model.sample(positions, labels), plain)
    model.guidance, model.guidance_scale = "classifier_free", 3.0
    assert (model.sample(positions, labels) - plain).abs().max() > 1e-3


def test_classifier_guidance(tmp_path):
    config = {
        "image_size": 8,
        "in_channels": 1,
        "model_channels": 32,
        "num_res_blocks": 1,
        "attention_resolutions": [2],
        "channel_mult": [1, 2],
        "num_head_channels": 32,
        "out_channels": 10,
    }
    torch.manual_seed(0)
    torch.save(ADMClassifier(**config).state_dict(), tmp_path / "classifier.pt")
    model = EpsilonScaling(
        **SMALL,
        image_shape=[1, 8, 8],
        num_classes=10,
        guidance="classifier",
        guidance_scale=50.0,
        classifier_args=config,
        classifier_checkpoint=str(tmp_path / "classifier.pt"),
        respacing="4",
    )
    positions, labels = torch.arange(4), torch.arange(4)
    for sampler in ("ddim", "ancestral"):
        model.settings = replace(model.settings, sampler=sampler)
        guided = model.sample(positions, labels)
        model.guidance = "none"
        assert (guided - model.sample(positions, labels)).abs().max() > 1e-4
        model.guidance = "classifier"
    assert not any("classifier" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="needs num_classes and labels"):
        model._gradient(None)


def test_edm_with_classifier_free_guidance():
    torch.manual_seed(0)
    model = EpsilonScaling(
        **SMALL, image_shape=[1, 8, 8], prediction="edm", sampler="heun", edm_steps=4,
        num_classes=3, guidance="classifier_free", guidance_scale=2.0,
    )  # fmt: skip
    positions, labels = torch.arange(3), torch.arange(3)
    guided = model.sample(positions, labels)
    model.guidance_scale = 1.0
    assert torch.isfinite(guided).all()
    assert (guided - model.sample(positions, labels)).abs().max() > 1e-3


@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_edm(tmp_path, solver):
    model = EpsilonScaling(
        **SMALL, prediction="edm", data_std=0.5, sampler=solver, edm_steps=4, epsilon_scale=1.01
    )
    run = trainer(tmp_path, max_epochs=1)
    run.fit(model, datamodule=digits())
    assert np.isfinite(float(run.callback_metrics["val/loss"]))
    samples = model.sample(torch.arange(3))
    assert samples.shape == (3, 1, 8, 8)
    plain = model.sample(torch.arange(3), schedule=EpsilonSchedule())
    assert (samples - plain).abs().max() > 1e-4


def test_discrete_model_under_the_edm_sampler():
    model = EpsilonScaling(
        **SMALL,
        image_shape=[1, 8, 8],
        sampler="heun",
        edm_steps=5,
        churn=10.0,
        variance="fixed_small",
    )
    samples = model.sample(torch.arange(3))
    assert torch.isfinite(samples).all()
    assert samples.shape == (3, 1, 8, 8)


def test_exact_score_of_a_known_mixture(tmp_path):
    """Centres and width come from the data; samples lie around the centres, not the draws."""
    data = GaussianMixture("ring", size=1200, batch_size=300)
    model = EpsilonScaling(
        "exact", respacing="50", clip=None, compare=[1.0], feature_network="pixels",
        samples_per_image=2, data_std=0.5,
    )  # fmt: skip
    values = trainer(tmp_path).test(model, datamodule=data, verbose=False)[0]
    assert torch.equal(model.denoiser.centres, data.mixture.centres.flatten(1))
    assert model.data_std == model.hparams["data_std"] == data.std
    samples = model.sample(torch.arange(600), schedule=EpsilonSchedule()).flatten(1)
    nearest = torch.cdist(samples, data.mixture.centres.flatten(1)).min(1).values
    assert float(nearest.square().mean() / 2) ** 0.5 == pytest.approx(data.std, rel=0.1)
    assert values["test/precision_pixels"] > 0.9
    figure = model.figures()["samples_1"]
    assert len(figure.axes[0].lines[0].get_xdata()) == 600  # points, not a grid of pixels
    model.settings = replace(model.settings, respacing="10")
    few = EpsilonSchedule(), EpsilonSchedule(1.025)
    values = [model.sample(torch.arange(1000), schedule=each).flatten(1) for each in few]
    true = data.train_set[list(range(1000))].x.flatten(1)
    assert sliced_wasserstein(values[1], true) < 0.75 * sliced_wasserstein(values[0], true)
    model.write_predictions([model.predict_step(data.test_set[[0, 1]], 0)], tmp_path)
    assert (tmp_path / "samples.png").stat().st_size > 0


def test_churn_reaches_the_sampler():
    """Reference of a Gaussian mixture in two dimensions, 12 Heun steps with churn in a band."""
    folder = Path(__file__).parents[1] / "diffusion" / "reference"
    case = json.loads((folder / "edm.json").read_text())["heun_churn40_1.005"]
    want = np.load(folder / "edm.npz")
    mu, var, weight = (torch.from_numpy(want[name]) for name in ("mu", "var", "weight"))
    arguments = {
        "churn": case["S_churn"],
        "churn_min": case["S_min"],
        "churn_max": case["S_max"],
        "churn_noise": case["S_noise"],
    }

    def denoise(x, sigma):
        total = var + sigma**2
        difference = x[:, None] - mu
        square = (difference**2).sum(-1) / total
        share = (weight.log() - square / 2 - total.log()).softmax(1)[..., None]
        return (share * (mu + (var / total)[:, None] * difference)).sum(1)

    def samples(**changed):
        model = EpsilonScaling(
            **SMALL, image_shape=[1, 8, 8], prediction="edm", sampler="heun",
            edm_steps=case["num_steps"], epsilon_scale=case["eps_scaler"], **(arguments | changed),
        )  # fmt: skip
        stream = np.random.RandomState(case["noise_seed"])

        def noise(step):
            drawn = want["latents"] if step < 0 else stream.standard_normal((6, 2))
            return torch.from_numpy(drawn)

        return generate(
            denoise, model.diffusion, model.settings, model.epsilon_schedule, noise,
            denoiser=denoise,
        )  # fmt: skip

    got = samples()
    np.testing.assert_allclose(got, want["heun_churn40_1.005"], rtol=1e-10, atol=1e-10)
    assert torch.equal(samples(churn_min=60.0, churn_max=70.0), samples(churn=0.0))
    for name, value in (("churn_min", 1.0), ("churn_max", 1.0), ("churn_noise", 1.0)):
        assert (samples(**{name: value}) - got).abs().max() > 1e-4, name


def test_rivals_run(tmp_path):
    data = digits()
    data.setup("fit")
    model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], sampler="ancestral", respacing="5")
    plain = model.sample(torch.arange(4))
    model.analytic_variance = True
    run = trainer(tmp_path)
    run.predict(model, datamodule=data)
    assert (model.sample(torch.arange(4)) - plain).abs().max() > 1e-3
    shifted = EpsilonScaling(
        **SMALL, image_shape=[1, 8, 8], sampler="ddim", respacing="5", time_shift_window=100
    )
    shifted.load_state_dict(model.state_dict())
    unshifted = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], sampler="ddim", respacing="5")
    unshifted.load_state_dict(model.state_dict())
    assert not torch.equal(shifted.sample(torch.arange(4)), unshifted.sample(torch.arange(4)))


def test_options_of_training_change_the_loss():
    torch.manual_seed(0)
    base = EpsilonScaling(**SMALL, image_shape=[1, 8, 8])
    state = base.state_dict()
    losses = {"base": base.training_step(batch(), 0).item()}
    for name, arguments in {
        "perturbed": {"input_perturbation": 0.5},
        "snr": {"min_snr_gamma": 1.0},
        "share": {"timestep_share": 0.1},
        "v": {"prediction": "v"},
        "sample": {"prediction": "sample"},
    }.items():
        model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8], **arguments)
        model.load_state_dict(state)
        losses[name] = model.training_step(batch(), 0).item()
    assert len(set(losses.values())) == len(losses)


def test_prediction_files(tmp_path):
    model = EpsilonScaling(**SMALL, num_classes=10, respacing="3", samples_per_image=2)
    run, data = trainer(tmp_path), digits()
    predictions = run.predict(model, datamodule=data)
    written = model.write_predictions(predictions, tmp_path)
    assert [path.name for path in written] == ["samples.npz", "samples.png"]
    with np.load(tmp_path / "samples.npz") as arrays:
        count = 2 * len(data.test_set)
        assert arrays["arr_0"].shape == (count, 8, 8, 1)
        assert arrays["arr_0"].dtype == np.uint8
        assert (arrays["arr_1"][::2] == arrays["arr_1"][1::2]).all()
        assert arrays["arr_0"].std() > 1
    assert (tmp_path / "samples.png").stat().st_size > 100


def test_image_files_train_a_unet(tmp_path):
    model = EpsilonScaling(
        "unet", UNET, variance="learned_range", num_classes=2, respacing="2", preview_samples=4
    )
    run = trainer(tmp_path, max_steps=2, max_epochs=-1, limit_val_batches=1)
    run.fit(model, datamodule=ImageFiles(batch_size=4))
    assert model.image_shape == [3, 16, 16]
    (name, figure), *_ = model.figures().items()
    assert name == "samples_1"
    assert figure.axes[0].get_title() == "epsilon scale 1"


def test_published_checkpoint_is_loaded(tmp_path):
    torch.manual_seed(0)
    source = EpsilonScaling("unet", UNET, image_shape=[1, 8, 8])
    for parameter in source.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    torch.save(source.denoiser.state_dict(), tmp_path / "adm.pt")
    model = EpsilonScaling(
        "unet", UNET, image_shape=[1, 8, 8], checkpoint=str(tmp_path / "adm.pt"), respacing="2"
    )
    weights = model.denoiser.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in source.denoiser.state_dict().items())


def test_flat_images_are_refused(tmp_path):
    data = Images("digits", scaling="minus_one_one", flatten=True, batch_size=64)
    with pytest.raises(ValueError, match="set flatten to false"):
        trainer(tmp_path).fit(EpsilonScaling(**SMALL), datamodule=data)


def test_wrongly_scaled_images_are_refused(tmp_path):
    data = Images("digits", scaling="none", flatten=False, batch_size=64)
    with pytest.raises(ValueError, match=r"\[-1, 1\], got \[0, 16\].*minus_one_one"):
        trainer(tmp_path).fit(EpsilonScaling(**SMALL), datamodule=data)


def test_second_test_takes_its_own_reference(tmp_path):
    def model() -> EpsilonScaling:
        return EpsilonScaling("mlp", SMALL["network_args"], respacing="2", feature_network="pixels")

    torch.manual_seed(0)
    used = model()
    run = trainer(tmp_path)
    run.test(used, datamodule=digits(seed=1), verbose=False)
    again = run.test(used, datamodule=digits(seed=2), verbose=False)[0]
    fresh = model()
    fresh.image_shape = [1, 8, 8]
    fresh.configure_model()
    fresh.load_state_dict(used.state_dict())
    assert again == trainer(tmp_path).test(fresh, datamodule=digits(seed=2), verbose=False)[0]


def test_own_feature_network(tmp_path):
    model = EpsilonScaling(
        "exact",
        respacing="2",
        clip=None,
        feature_network="torch.nn.Flatten",
    )
    values = trainer(tmp_path).test(model, datamodule=digits(), verbose=False)[0]
    assert "test/fd_flatten" in values


def test_optimizer_is_a_choice():
    model = EpsilonScaling(**SMALL, image_shape=[1, 8, 8])
    default = model.configure_optimizers()
    assert isinstance(default, torch.optim.AdamW)
    assert default.defaults["lr"] == 1e-4
    assert default.defaults["weight_decay"] == 0
    chosen = EpsilonScaling(
        **SMALL, image_shape=[1, 8, 8], optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    assert isinstance(chosen.configure_optimizers(), torch.optim.SGD)


def test_reference_files(tmp_path):
    """Images of an .npz and their moments give the distance of the same images as data."""
    data = digits()
    data.setup("fit")
    x = data.train_set[list(range(len(data.train_set)))].x
    pixels = ((x + 1) * 127.5).round().to(torch.uint8)
    np.savez(tmp_path / "images.npz", pixels.permute(0, 2, 3, 1).numpy())
    rows = (pixels.float() / 127.5 - 1).flatten(1).double()
    np.savez(tmp_path / "moments.npz", mu=rows.mean(0).numpy(), sigma=torch.cov(rows.T).numpy())
    values = {}
    for reference in ("train", str(tmp_path / "images.npz"), str(tmp_path / "moments.npz")):
        model = EpsilonScaling(
            "exact", respacing="3", clip=None, feature_network="pixels", reference=reference
        )
        values[reference] = trainer(tmp_path).test(model, datamodule=digits(), verbose=False)[0]
    data_set, images, moments = values.values()
    assert images["test/fd_pixels"] == pytest.approx(data_set["test/fd_pixels"], rel=2e-3)
    assert moments["test/fd_pixels"] == pytest.approx(images["test/fd_pixels"], rel=1e-6)
    assert set(moments) == {"test/fd_pixels"}
    np.savez(tmp_path / "moments.npz", mu=np.zeros(3), sigma=np.eye(3))
    wrong = EpsilonScaling(
        "exact", respacing="3", clip=None, reference=str(tmp_path / "moments.npz")
    )
    with pytest.raises(ValueError, match=r"moments of 3 features.*gives 64.*need 'inception'"):
        trainer(tmp_path).test(wrong, datamodule=digits(), verbose=False)
    with pytest.raises(ValueError, match="reference must be"):
        EpsilonScaling("exact", reference="validation")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    for name, error in (("none", FileNotFoundError), ("other", ValueError)):
        model = EpsilonScaling("exact", respacing="3", reference=str(tmp_path / f"{name}.npz"))
        with pytest.raises(error, match=r"does not exist|mu and sigma, or arr_0"):
            trainer(tmp_path).test(model, datamodule=digits(), verbose=False)


def test_average_of_sharded_weights_is_refused(tmp_path):
    model = EpsilonScaling(**SMALL)
    model._device_mesh = object()
    model.trainer = trainer(tmp_path, callbacks=[EMAWeightAveraging()])
    with pytest.raises(ValueError, match="EMAWeightAveraging cannot copy sharded weights"):
        model.configure_model()


def test_mixed_precision(tmp_path):
    model = EpsilonScaling("unet", UNET, variance="learned_range", respacing="2")
    run = trainer(tmp_path, max_steps=2, max_epochs=-1, limit_val_batches=1, precision="bf16-mixed")
    run.fit(model, datamodule=digits(8))
    assert np.isfinite(float(run.callback_metrics["train/loss"]))
    assert model.denoiser.out[2].weight.dtype == torch.float32
    predictions = run.predict(model, datamodule=digits(128, test_fraction=0.05))
    assert predictions[0].images.dtype == torch.uint8


def test_curricula_move_training(tmp_path):
    """The shared curriculum ramps input perturbation and the share of timesteps."""
    moved = [
        Curriculum("input_perturbation", Linear(10, 0.0, 0.1)),
        Curriculum("timestep_share", Linear(10, 0.5, 1.0)),
    ]
    model = EpsilonScaling(**SMALL)
    trainer(tmp_path, callbacks=moved, max_steps=6, max_epochs=-1).fit(model, datamodule=digits())
    assert model.input_perturbation == pytest.approx(0.05)
    assert model.timestep_share == pytest.approx(0.75)
