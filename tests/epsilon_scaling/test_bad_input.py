"""Every bad argument or batch is answered in one line that names it."""

import pytest
import torch

from datamodules.images import ImageBatch
from lightning_modules import EpsilonScaling
from lightning_modules.epsilon_scaling.checks import check_images

SMALL = {"network_args": {"width": 16, "blocks": 1}, "image_shape": [1, 8, 8]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon_scale": 0.0}, "epsilon scale must be positive, got 0"),
        ({"epsilon_scale": float("nan")}, "finite"),
        ({"epsilon_slope": -0.1}, "at step 19 of 20"),
        ({"epsilon_list": [1.0, 1.1]}, "lists 2 values, but the sampler takes 20"),
        ({"epsilon_list": [-1.0] * 20}, "positive"),
        ({"respacing": "1001"}, "choose 1 to 1000"),
        ({"respacing": "ddim300"}, "no whole stride"),
        ({"schedule": "cosin"}, "schedule must be one of"),
        ({"prediction": "eps"}, "prediction must be one of"),
        ({"variance": "learned"}, "variance must be one of"),
        ({"loss": "l1"}, "loss must be one of"),
        ({"sampler": "dpm"}, "sampler must be one of"),
        ({"network": "vit"}, "network must be one of"),
        ({"network_args": {"widht": 3}}, "network_args of network 'mlp'.*widht"),
        ({"timestep_sampling": "loss"}, "timestep_sampling must be one of"),
        ({"timestep_share": 0.0}, "timestep_share"),
        ({"input_perturbation": -1.0}, "input_perturbation"),
        ({"label_dropout": 0.1}, "need num_classes"),
        ({"guidance": "classifier_free"}, "need num_classes"),
        ({"guidance": "classifier", "num_classes": 10}, "classifier_checkpoint"),
        ({"guidance_scale": -1.0}, "guidance_scale"),
        ({"prediction": "edm"}, "needs sampler 'heun' or 'euler'"),
        ({"prediction": "v", "sampler": "heun"}, "need prediction 'edm' or 'epsilon'"),
        (
            {"prediction": "edm", "sampler": "heun", "variance": "learned_range"},
            "no learned variance",
        ),
        ({"analytic_variance": True}, "needs sampler 'ancestral'"),
        ({"checkpoint": "x.pt"}, "needs network 'unet'"),
        ({"samples_per_image": 0}, "samples_per_image"),
        ({"feature_network": "resnet"}, "feature_network must be one of"),
        ({"clip": 0.0}, "clip"),
        ({"eta": -1.0}, "eta"),
        ({"time_shift_window": -1}, "time_shift_window"),
        ({"skip_first": -1}, "skip_first"),
        ({"loss_weights": {"mae": 1.0}}, "no term 'mae'"),
        ({"sampler": "heun", "sigma_min": 0.0}, "sigma_min"),
        ({"sampler": "heun", "churn": -1.0}, "churn must be finite and at least 0"),
        ({"sampler": "heun", "churn_min": 2.0, "churn_max": 1.0}, "churn_min <= churn_max"),
        ({"sampler": "heun", "churn_min": -1.0}, "0 <= churn_min"),
        ({"sampler": "heun", "churn_noise": 0.0}, "churn_noise must be positive"),
        ({"sampler": "ddim", "churn": 1.0}, "churn needs sampler 'heun' or 'euler'"),
    ],
)
def test_arguments(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        EpsilonScaling(**{**SMALL, **arguments})
    assert "\n" not in str(caught.value)


def test_unusual_scale_warns():
    with pytest.warns(UserWarning, match="outside the usual"):
        EpsilonScaling(**SMALL, epsilon_scale=1.5)


def test_unet_sizes():
    with pytest.raises(ValueError, match=r"divisible by 2\^"):
        EpsilonScaling("unet", {"channel_mult": [1, 2, 2, 2]}, image_shape=[1, 12, 12])
    with pytest.raises(ValueError, match="multiples of 32"):
        EpsilonScaling("unet", {"model_channels": 48}, image_shape=[1, 8, 8])
    with pytest.raises(ValueError, match="cannot be split"):
        EpsilonScaling("unet", {"num_head_channels": 48}, image_shape=[1, 8, 8])


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(2, 1, 8, 8) * 255, r"most likely 0\.\.255"),
        (torch.randn(2, 1, 8, 8) * 3, r"must lie in \[-1, 1\]"),
        (torch.full((2, 1, 8, 8), float("nan")), "NaN or infinite"),
        (torch.full((2, 1, 8, 8), float("inf")), "NaN or infinite"),
        (torch.zeros(2, 64), r"must be images \(n, c, h, w\)"),
    ],
)
def test_images(x, message):
    with pytest.raises(ValueError, match=message):
        check_images(x)


def test_unit_images_warn():
    with pytest.warns(UserWarning, match="minus_one_one"):
        check_images(torch.rand(2, 1, 8, 8))


def test_batches():
    model = EpsilonScaling(**SMALL)
    with pytest.raises(ValueError, match=r"shape \[1, 9, 9\] for a model of \[1, 8, 8\]"):
        model.training_step(ImageBatch(torch.zeros(2, 1, 9, 9) - 1, torch.zeros(2)), 0)
    conditional = EpsilonScaling(**SMALL, num_classes=3)

    class Unlabelled:
        x = -torch.ones(2, 1, 8, 8)

    with pytest.raises(ValueError, match="the batch has no labels y"):
        conditional.training_step(Unlabelled(), 0)
    for labels in (torch.tensor([0, 3]), torch.tensor([-1, 0]), torch.tensor([0.0, 1.0])):
        with pytest.raises(ValueError, match="integers below num_classes = 3"):
            conditional.training_step(ImageBatch(Unlabelled.x, labels), 0)


def test_conditional_network_without_labels_and_the_reverse():
    conditional = EpsilonScaling(**SMALL, num_classes=3)
    with pytest.raises(ValueError, match="needs labels"):
        conditional.sample(torch.arange(2))
    with pytest.raises(ValueError, match="without classes"):
        EpsilonScaling(**SMALL).sample(torch.arange(2), torch.tensor([0, 1]))


def test_diverging_samples_name_the_step():
    model = EpsilonScaling(**SMALL, clip=None)
    torch.nn.init.constant_(model.denoiser.outlet.bias, float("nan"))
    with pytest.raises(FloatingPointError, match="step index 19 with epsilon scale 1"):
        model.sample(torch.arange(2))


def test_inception_without_its_package():
    pytest.importorskip("torchmetrics")
    from lightning_modules.epsilon_scaling.features import InceptionFeatures

    try:
        import torch_fidelity  # noqa: F401
    except ImportError:
        with pytest.raises(ModuleNotFoundError, match="pip install torch-fidelity"):
            InceptionFeatures()
    else:
        pytest.skip("torch-fidelity is installed")


def test_missing_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        EpsilonScaling(
            "unet",
            {"model_channels": 32, "channel_mult": [1, 2], "attention_resolutions": [2]},
            checkpoint=str(tmp_path / "none.pt"),
            image_shape=[1, 8, 8],
        )
