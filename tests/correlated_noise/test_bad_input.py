"""Every wrong input is answered by one line that names it."""

import numpy as np
import pytest

from callbacks import PrivacyBudget, PrivateGradients
from datamodules import RegressionStream
from lightning_modules import CorrelatedNoiseClassifier, LinearRegressionBench
from lightning_modules.components.privacy import (
    BLT,
    AntiPGD,
    BandedInverse,
    BandedToeplitz,
    Dense,
    NuToeplitz,
    OptimisedBandedToeplitz,
    OptimisedBLT,
    OptimisedDense,
    Participation,
    SquareRoot,
    WhiteNoise,
)
from lightning_modules.components.privacy.theory import privacy_risk


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: NuToeplitz(1.0), r"nu must be in \[0, 1\), got 1.0"),
        (lambda: NuToeplitz(-0.1), "nu must be"),
        (lambda: NuToeplitz(0.1, 0), "bands must be at least 1, got 0"),
        (lambda: NuToeplitz(0.1, 9).coefficients(8), r"bands must be in \[1, 8\].*got 9"),
        (lambda: SquareRoot(0), "bands"),
        (lambda: AntiPGD(1.0), "damping"),
        (lambda: BandedInverse(0), "bands"),
        (lambda: OptimisedBandedToeplitz(9).coefficients(8), r"bands must be in \[1, n=8\]"),
        (lambda: OptimisedBandedToeplitz(2, momentum=1.0), "momentum"),
        (lambda: BandedToeplitz([]), "non-empty"),
        (lambda: BandedToeplitz([0.0, 1.0]), "first coefficient must be positive"),
        (lambda: BandedToeplitz([1.0] * 5).matrix(3), "5 coefficients .* only 3 steps"),
        (lambda: BLT([1.1], [0.1]), r"decays must be in \(0, 1\], got 1.1"),
        (lambda: BLT([0.5, 0.5], [0.1, 0.2]), "different"),
        (lambda: BLT([0.5, 0.4], [0.1]), "one length"),
        (lambda: OptimisedBLT(0), "buffers"),
        (lambda: OptimisedDense().matrix(600), "1 to 512 steps, got 600"),
        (lambda: Dense([[1.0, 0.0]]), "square"),
        (lambda: Dense([[1.0, 0.1], [0.0, 1.0]]), r"entry \(0, 1\)"),
        (lambda: Dense([[1.0]]).matrix(2), "made for 1 steps, the run has 2"),
        (lambda: Dense("nowhere.npy"), "no file nowhere.npy"),
        (lambda: SquareRoot().matrix(6000), "at most 5000 steps"),
        (lambda: Participation(0), "max_participations must be at least 1"),
        (lambda: SquareRoot().sensitivity(10, Participation(4, 4)), "do not fit into 10 steps"),
        (lambda: SquareRoot().sensitivity(0), "number of steps must be at least 1"),
        (lambda: WhiteNoise(0, 1), "size"),
        (lambda: privacy_risk(2.0, 1.0), "below 2"),
        (lambda: privacy_risk(0.0, 1.0), "must be positive"),
        (lambda: LinearRegressionBench(lr=0.0), "lr must be positive"),
        (lambda: CorrelatedNoiseClassifier(network="cnn"), "network must be mlp or vgg"),
        (lambda: CorrelatedNoiseClassifier(cooldown=1.0), "cooldown"),
        (lambda: CorrelatedNoiseClassifier(n_classes=1), "n_classes"),
        (lambda: RegressionStream(dim=0), "dim must be at least 1"),
        (lambda: RegressionStream("npz"), "path belongs to source 'npz'"),
        (lambda: RegressionStream("tables"), "source must be one of"),
        (lambda: PrivacyBudget(points=0), "points"),
        (lambda: PrivacyBudget(stop_at=0.0), "stop_at"),
    ],
)
def test_constructors(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one of target_epsilon"),
        ({"target_epsilon": 1.0, "noise_multiplier": 1.0}, "exactly one of target_epsilon"),
        ({"target_epsilon": 0.0}, "target_epsilon must be positive"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be positive"),
        ({"noise_multiplier": 1.0, "clip_norm": 0.0}, "clip_norm"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, r"delta must be in \(0, 1\), got 1.0"),
        ({"noise_multiplier": 1.0, "noise_seed": 3}, "allow_deterministic_noise"),
        ({"noise_multiplier": 1.0, "sampling": "random"}, "sampling must be one of"),
        ({"noise_multiplier": 1.0, "clipping": "fast"}, "clipping must be one of"),
        ({"noise_multiplier": 1.0, "chunk_size": 0}, "chunk_size"),
        ({"noise_multiplier": 1.0, "strategy": "nus"}, "strategy must be one of identity"),
        ({"noise_multiplier": 1.0, "strategy": "nu"}, "strategy nu takes nu, bands; got 'nu'"),
        ({"noise_multiplier": 1.0, "strategy": "nu(0.1)"}, "must read like"),
        ({"noise_multiplier": 1.0, "strategy": "nu(mu=0.1)"}, "takes nu, bands"),
        ({"noise_multiplier": 1.0, "strategy": "nu(nu=1.5)"}, r"nu must be in \[0, 1\), got 1.5"),
    ],
)
def test_private_gradients(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrivateGradients(**arguments)


def test_regression_files(tmp_path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.ones((3, 2)))
    with pytest.raises(ValueError, match="needs arrays x and y"):
        RegressionStream("npz", path=str(path)).setup("fit")
    np.savez(path, x=np.ones((3, 2)), y=np.ones(2))
    with pytest.raises(ValueError, match=r"x must be \(n, d\) and y \(n,\)"):
        RegressionStream("npz", path=str(path)).setup("fit")
    with pytest.raises(FileNotFoundError, match="no file"):
        RegressionStream("npz", path=str(tmp_path / "b.npz")).setup("fit")
