"""The discrete Gaussian diffusion: marginals, posterior and the model's reverse step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_modules.components.diffusion.respacing import respaced_betas, spaced_timesteps
from lightning_modules.components.diffusion.schedules import Betas, named_betas

PREDICTIONS = ("epsilon", "v", "sample")
VARIANCES = ("learned_range", "fixed_small", "fixed_large")

Index = int | Tensor


class Prediction(NamedTuple):
    """What a network says at one step.

    Attributes:
        x0: ``(n, c, ...)`` predicted clean sample, clipped if asked.
        epsilon: ``(n, c, ...)`` noise after scaling, before clipping.
        raw_epsilon: ``(n, c, ...)`` noise as the network gave it.
        log_variance: log of the reverse step's variance, broadcastable to x.
    """

    x0: Tensor
    epsilon: Tensor
    raw_epsilon: Tensor
    log_variance: Tensor


class GaussianDiffusion:
    """Tables of a diffusion with T steps; index 0 is the cleanest, T - 1 the noisiest.

    q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I) with abar_t the product of 1 - beta.
    Tables are float64; what is gathered from them is cast to the type of the sample.

    Args:
        betas: ``(T,)`` variances in (0, 1].
        prediction: What the network predicts: "epsilon", "v" = sqrt(abar) eps - sqrt(1 - abar) x_0,
            or "sample" = x_0.
        variance: "learned_range" reads the second half of the output channels; "fixed_small" is
            the posterior's variance, "fixed_large" is beta.
        timestep_map: ``(T,)`` original index of each step (respaced processes).
        original_steps: Length of the training process; T if it is not respaced.
        training_signal: ``(original_steps,)`` abar of the training process; its own if it is not
            respaced.

    Raises:
        ValueError: If betas lie outside (0, 1] or a name is unknown.
    """

    def __init__(
        self,
        betas: Betas,
        prediction: str = "epsilon",
        variance: str = "fixed_small",
        timestep_map: Sequence[int] | None = None,
        original_steps: int | None = None,
        training_signal: Tensor | None = None,
    ) -> None:
        betas = np.asarray(betas, dtype=np.float64)
        if betas.ndim != 1 or not ((betas > 0) & (betas <= 1)).all():
            raise ValueError("betas must be a vector of values in (0, 1]")
        if prediction not in PREDICTIONS:
            raise ValueError(f"prediction must be one of {PREDICTIONS}, got {prediction!r}")
        if variance not in VARIANCES:
            raise ValueError(f"variance must be one of {VARIANCES}, got {variance!r}")
        self.prediction, self.variance = prediction, variance
        self.betas = torch.from_numpy(betas)
        self.steps = len(betas)
        self.original_steps = self.steps if original_steps is None else original_steps
        kept = range(self.steps) if timestep_map is None else timestep_map
        self.timestep_map = torch.as_tensor(list(kept), dtype=torch.int64)

        # As published samplers do: where a respaced beta is near 1 this has lost digits of abar
        # (1e-10 of it for the cosine schedule); `training_signal` has them.
        alphas = 1 - betas
        signal = np.cumprod(alphas)
        previous = np.concatenate([[1.0], signal[:-1]])
        posterior = betas * (1 - previous) / (1 - signal)
        # The posterior of the last step is a point; its logarithm borrows the next entry.
        clipped = np.concatenate([posterior[1:2], posterior[1:]]) if self.steps > 1 else betas
        large = np.concatenate([posterior[1:2], betas[1:]]) if self.steps > 1 else betas
        # A schedule of zero terminal SNR divides by 0 at its last step, where noise prediction
        # is undefined anyway: let it be inf there.
        with np.errstate(divide="ignore"):
            tables = {
                "alphas_cumprod": signal,
                "alphas_cumprod_prev": previous,
                "sqrt_alphas_cumprod": np.sqrt(signal),
                "sqrt_one_minus_alphas_cumprod": np.sqrt(1 - signal),
                "sqrt_recip_alphas_cumprod": np.sqrt(1 / signal),
                "sqrt_recipm1_alphas_cumprod": np.sqrt(1 / signal - 1),
                "posterior_variance": posterior,
                "posterior_log_variance_clipped": np.log(clipped),
                "log_betas": np.log(betas),
                "log_fixed_large": np.log(large),
                "posterior_mean_coef1": betas * np.sqrt(previous) / (1 - signal),
                "posterior_mean_coef2": (1 - previous) * np.sqrt(alphas) / (1 - signal),
            }
        self.tables = {name: torch.from_numpy(table) for name, table in tables.items()}
        self.training_signal = self.tables["alphas_cumprod"]
        if training_signal is not None:
            self.training_signal = training_signal
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

    @classmethod
    def from_name(
        cls,
        schedule: str = "linear",
        steps: int = 1000,
        respacing: str | int | Sequence[int] = "",
        prediction: str = "epsilon",
        variance: str = "fixed_small",
    ) -> GaussianDiffusion:
        """Process of a named schedule, respaced to few steps."""
        full = cls(named_betas(schedule, steps), prediction, variance)
        return full.respace(respacing)

    def respace(self, respacing: str | int | Sequence[int]) -> GaussianDiffusion:
        """Shorter process through some of the steps; the network keeps its original indices."""
        return self.restrict(spaced_timesteps(self.steps, respacing))

    def restrict(self, timesteps: Sequence[int]) -> GaussianDiffusion:
        """Shorter process through the listed steps (sorted)."""
        betas, kept = respaced_betas(self.betas.numpy(), timesteps)
        original = self.timestep_map[torch.from_numpy(kept)]
        return type(self)(
            betas,
            self.prediction,
            self.variance,
            original.tolist(),
            self.original_steps,
            self.training_signal,
        )

    def gather(self, name: str, index: Index, like: Tensor) -> Tensor:
        """Entries of a table in the type of `like`, shaped to broadcast over it.

        Args:
            name: Key of `tables`.
            index: One step for the whole batch, or ``(n,)`` int64.
            like: ``(n, ...)`` sample.
        """
        if isinstance(index, int):
            return self.tables[name][index].to(like)
        key = (name, like.device)
        if key not in self._on_device:
            self._on_device[key] = self.tables[name].to(like.device)
        entries = self._on_device[key][index].to(like.dtype)
        return entries.reshape((-1,) + (1,) * (like.ndim - 1))

    def model_timesteps(self, index: Index, like: Tensor) -> Tensor:
        """Original indices ``(n,)`` for the network."""
        if isinstance(index, int):
            return self.timestep_map[index].expand(len(like)).to(like.device)
        return self.timestep_map.to(index.device)[index]

    def q_sample(self, x0: Tensor, index: Index, noise: Tensor) -> Tensor:
        """Noised sample sqrt(abar) x_0 + sqrt(1 - abar) noise."""
        signal = self.gather("sqrt_alphas_cumprod", index, x0)
        return signal * x0 + self.gather("sqrt_one_minus_alphas_cumprod", index, x0) * noise

    def posterior_mean(self, x0: Tensor, x: Tensor, index: Index) -> Tensor:
        """Mean of q(x_(t-1) | x_t, x_0)."""
        return (
            self.gather("posterior_mean_coef1", index, x) * x0
            + self.gather("posterior_mean_coef2", index, x) * x
        )

    def x0_from_epsilon(self, x: Tensor, index: Index, epsilon: Tensor) -> Tensor:
        """Clean sample that x would have with this noise."""
        return (
            self.gather("sqrt_recip_alphas_cumprod", index, x) * x
            - self.gather("sqrt_recipm1_alphas_cumprod", index, x) * epsilon
        )

    def epsilon_from_x0(self, x: Tensor, index: Index, x0: Tensor) -> Tensor:
        """Noise that x would have with this clean sample."""
        # finite where abar is 0, unlike dividing both terms by its root
        signal = self.gather("sqrt_alphas_cumprod", index, x)
        return (x - signal * x0) / self.gather("sqrt_one_minus_alphas_cumprod", index, x)

    def to_epsilon(self, output: Tensor, x: Tensor, index: Index) -> Tensor:
        """Noise that an output of the chosen prediction type stands for."""
        if self.prediction == "epsilon":
            return output
        signal = self.gather("sqrt_alphas_cumprod", index, x)
        noise = self.gather("sqrt_one_minus_alphas_cumprod", index, x)
        if self.prediction == "v":
            return noise * x + signal * output
        return (x - signal * output) / noise

    def from_epsilon(self, epsilon: Tensor, x: Tensor, index: Index) -> Tensor:
        """Inverse of `to_epsilon`."""
        if self.prediction == "epsilon":
            return epsilon
        signal = self.gather("sqrt_alphas_cumprod", index, x)
        noise = self.gather("sqrt_one_minus_alphas_cumprod", index, x)
        if self.prediction == "v":
            return (epsilon - noise * x) / signal
        return (x - noise * epsilon) / signal

    def target(self, x0: Tensor, noise: Tensor, index: Index) -> Tensor:
        """What the network should have predicted."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "sample":
            return x0
        return (
            self.gather("sqrt_alphas_cumprod", index, x0) * noise
            - self.gather("sqrt_one_minus_alphas_cumprod", index, x0) * x0
        )

    def split(self, output: Tensor, channels: int) -> tuple[Tensor, Tensor | None]:
        """Mean part and variance part (None if the variance is fixed) of a network output.

        Raises:
            ValueError: If the number of channels does not fit the variance type.
        """
        wanted = 2 * channels if self.variance == "learned_range" else channels
        if output.shape[1] != wanted:
            raise ValueError(
                f"network gives {output.shape[1]} channels, but variance={self.variance!r} with "
                f"{channels} data channels needs {wanted}; set out_channels or variance to match"
            )
        if self.variance != "learned_range":
            return output, None
        return output[:, :channels], output[:, channels:]

    def log_variance(self, fraction: Tensor | None, x: Tensor, index: Index) -> Tensor:
        """Logarithm of the reverse step's variance.

        Args:
            fraction: Learned part v in about [-1, 1], like x; None for a fixed variance.
            x: ``(n, c, ...)`` noisy sample.
            index: Step.
        """
        if self.variance == "fixed_large":
            return self.gather("log_fixed_large", index, x)
        small = self.gather("posterior_log_variance_clipped", index, x)
        if fraction is None:
            return small
        weight = (fraction + 1) / 2
        return weight * self.gather("log_betas", index, x) + (1 - weight) * small

    def predict(
        self,
        output: Tensor,
        x: Tensor,
        index: Index,
        scale: Tensor | None = None,
        clip: float | None = 1.0,
    ) -> Prediction:
        """Read a network output; the noise is divided by `scale` before x_0 is formed.

        Args:
            output: ``(n, c or 2c, ...)`` network output at x.
            x: ``(n, c, ...)`` noisy sample.
            index: Step.
            scale: Divisor lambda_t of the noise (Epsilon Scaling), or None for none.
            clip: x_0 is clamped to [-clip, clip] after scaling; None leaves it.
        """
        mean_part, fraction = self.split(output, x.shape[1])
        raw = self.to_epsilon(mean_part, x, index)
        epsilon = raw if scale is None else raw / scale
        if self.prediction == "sample" and scale is None:
            x0 = mean_part
        elif self.prediction == "v" and scale is None:
            signal = self.gather("sqrt_alphas_cumprod", index, x)
            x0 = signal * x - self.gather("sqrt_one_minus_alphas_cumprod", index, x) * mean_part
        else:
            x0 = self.x0_from_epsilon(x, index, epsilon)
        if clip is not None:
            x0 = x0.clamp(-clip, clip)
        return Prediction(x0, epsilon, raw, self.log_variance(fraction, x, index))
