"""ADM networks: reference outputs and gradients, published names, bad sizes."""

import numpy as np
import pytest
import torch

from lightning_modules.components.diffusion import (
    PUBLISHED,
    ADMClassifier,
    ADMUNet,
    load_adm_checkpoint,
    load_adm_state,
)
from lightning_modules.components.diffusion.unet import count_parameters

UNETS = ["adm_updown_new", "adm_updown_new_h16", "legacy_conv_cond", "legacy_updown_heads_cond"]


@pytest.mark.parametrize("variant", UNETS)
def test_unet_reference(reference, recipe, draw, variant):
    spec, want = reference("unet.json")[variant], reference("unet.npz")
    network = ADMUNet(**spec["config"])
    assert {n: list(t.shape) for n, t in network.state_dict().items()} == spec["state_dict"]
    assert count_parameters(network) == spec["n_params"]
    recipe(network, spec["base_seed"])
    x = draw(spec["base_seed"] + 900, (2, spec["config"]["in_channels"], 8, 8))
    labels = None if spec["y"] is None else torch.tensor(spec["y"])
    out = network(x, torch.tensor(spec["timesteps"]), labels)
    np.testing.assert_allclose(
        out.detach(),
        want[f"{variant}/out"],
        rtol=1e-5,
        atol=1e-5 * np.abs(want[f"{variant}/out"]).max(),
    )
    loss = (out**2).mean()
    loss.backward()
    assert loss.item() == pytest.approx(float(want[f"{variant}/loss"]), rel=1e-5)
    parameters = dict(network.named_parameters())
    norms = [name for name in want.files if name.startswith(f"{variant}/gradnorm/")]
    assert len(norms) == 4
    for name in norms:
        got = float(parameters[name.split("/")[-1]].grad.norm())
        assert got == pytest.approx(float(want[name]), rel=2e-5)


def test_checkpointing_gives_the_same_gradients(reference, recipe, draw):
    spec = reference("unet.json")["adm_updown_new"]
    gradients = []
    for checkpointing in (False, True):
        network = ADMUNet(**spec["config"], checkpointing=checkpointing)
        recipe(network)
        (network(draw(5, (2, 3, 8, 8)), torch.tensor([3, 711])) ** 2).mean().backward()
        gradients.append(network.input_blocks[0][0].weight.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_classifier_reference(reference, recipe, draw):
    spec, want = reference("unet.json")["classifier_attention"], reference("unet.npz")
    network = ADMClassifier(**spec["config"])
    assert {n: list(t.shape) for n, t in network.state_dict().items()} == spec["state_dict"]
    recipe(network, spec["base_seed"])
    out = network(draw(spec["base_seed"] + 900, (2, 3, 8, 8)), torch.tensor(spec["timesteps"]))
    np.testing.assert_allclose(out.detach(), want["classifier_attention/out"], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("pool", ["adaptive", "spatial", "spatial_v2"])
def test_other_pools_use_image_and_time(recipe, draw, pool):
    network = ADMClassifier(
        8, 3, 32, 10, 1, [2], channel_mult=(1, 2), num_head_channels=32, pool=pool
    )
    recipe(network)
    x = draw(1, (2, 3, 8, 8))
    out = network(x, torch.tensor([3, 711]))
    assert out.shape == (2, 10)
    assert (out - network(x, torch.tensor([3, 5]))).abs().max() > 1e-4
    assert (out - network(x.flip(0), torch.tensor([3, 711]))).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["cifar10_32", "imagenet_64", "imagenet_128"])
def test_published_names_and_counts(reference, name):
    spec = reference("published_state_dicts.json")[name]
    config = dict(PUBLISHED[name], in_channels=3, out_channels=6)
    listed = dict(
        spec["config"], attention_resolutions=tuple(spec["config"]["attention_resolutions"])
    )
    for key, value in listed.items():
        value = tuple(value) if isinstance(value, list) else value
        default = {"dropout": 0.0, "use_scale_shift_norm": True, "resblock_updown": True}
        assert config.get(key, default.get(key)) == value, key
    with torch.device("meta"):
        network = ADMUNet(**config)
    assert {n: list(t.shape) for n, t in network.state_dict().items()} == spec["state_dict"]
    assert count_parameters(network) == spec["n_params"]


def test_published_checkpoint_file_loads_and_runs(reference, tmp_path):
    spec = reference("published_state_dicts.json")["cifar10_32"]
    generator = torch.Generator().manual_seed(0)
    state = {
        name: torch.randn(shape, generator=generator) * 0.02
        for name, shape in spec["state_dict"].items()
    }
    torch.save(state, tmp_path / "cifar10.pt")
    network = load_adm_checkpoint(tmp_path / "cifar10.pt", ADMUNet(**PUBLISHED["cifar10_32"]))
    out = network.eval()(torch.randn(1, 3, 32, 32, generator=generator), torch.tensor([10]))
    assert out.shape == (1, 6, 32, 32)
    assert torch.isfinite(out).all()
    assert out.abs().max() > 0


def test_misfit_checkpoint_is_explained(recipe):
    small = {
        "image_size": 8,
        "model_channels": 32,
        "num_res_blocks": 1,
        "channel_mult": (1, 2),
        "num_head_channels": 32,
    }
    updown = ADMUNet(**small, attention_resolutions=(2,))
    convolved = ADMUNet(**small, attention_resolutions=(1, 2), resblock_updown=False)
    with pytest.raises(ValueError, match=r"missing: .* unexpected: .*resblock_updown") as caught:
        load_adm_state(updown, convolved.state_dict())
    assert "\n" not in str(caught.value)
    assert "..." in str(caught.value)
    narrow = dict(updown.state_dict())
    narrow["out.2.weight"] = narrow["out.2.weight"][:3]
    with pytest.raises(ValueError, match=r"1 other shape: out\.2\.weight"):
        load_adm_state(updown, narrow)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_adm_checkpoint("nowhere.pt", updown)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 9}, "divisible by"),
        ({"model_channels": 40}, "multiples of 32"),
        ({"num_head_channels": 48}, "cannot be split"),
        ({"num_head_channels": None, "num_heads": 3}, "cannot be split"),
    ],
)
def test_bad_sizes(change, message):
    config = {
        "image_size": 8,
        "model_channels": 32,
        "num_res_blocks": 1,
        "attention_resolutions": (2,),
        "channel_mult": (1, 2),
        "num_head_channels": 32,
    }
    with pytest.raises(ValueError, match=message):
        ADMUNet(**(config | change))


def test_labels_must_fit_the_model():
    config = {"image_size": 8, "model_channels": 32, "num_res_blocks": 1, "channel_mult": (1, 2)}
    x, t = torch.zeros(1, 3, 8, 8), torch.zeros(1)
    with pytest.raises(ValueError, match="needs labels"):
        ADMUNet(**config, num_classes=10)(x, t)
    with pytest.raises(ValueError, match="without classes"):
        ADMUNet(**config)(x, t, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="image sides"):
        ADMUNet(**config)(torch.zeros(1, 3, 7, 7), t)
