"""EDM: Heun and Euler samplers, network preconditioning and training loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_modules.components.diffusion.gaussian import GaussianDiffusion
from lightning_modules.components.diffusion.losses import Model, mean_over_pixels
from lightning_modules.components.diffusion.samplers import require_finite
from lightning_modules.components.diffusion.schedules import karras_sigmas

Denoiser = Callable[[Tensor, Tensor], Tensor]


class EDMSampler:
    """Second-order (Heun) or Euler solver on a noise grid, with optional churn.

    The noise eps = (x - D(x; sigma)) / sigma is divided by lambda, as the denoised image D is
    rebuilt from it: D' = x - sigma eps / lambda.

    Args:
        sigmas: ``(N + 1,)`` float64 decreasing noise levels, the last 0 (`karras_sigmas`).
        solver: "heun" or "euler".
        scale_correction: Whether Heun's second evaluation is scaled too.
        churn: S_churn, added noise; 0 is deterministic.
        churn_min: Churn only at sigma >= churn_min.
        churn_max: Churn only at sigma <= churn_max.
        churn_noise: S_noise, factor of the added noise.

    Raises:
        ValueError: If the solver is unknown, the grid is not decreasing to 0 or a churn value is
            out of range.
    """

    def __init__(
        self,
        sigmas: Tensor | None = None,
        solver: str = "heun",
        scale_correction: bool = True,
        churn: float = 0.0,
        churn_min: float = 0.0,
        churn_max: float = math.inf,
        churn_noise: float = 1.0,
    ) -> None:
        self.sigmas = karras_sigmas(18) if sigmas is None else sigmas.double()
        if solver not in ("heun", "euler"):
            raise ValueError(f"solver must be 'heun' or 'euler', got {solver!r}")
        if not (self.sigmas.diff() < 0).all() or float(self.sigmas[-1]) != 0.0:
            raise ValueError("sigmas must decrease strictly to a last entry of 0")
        if not 0 <= churn < math.inf:
            raise ValueError(f"churn must be finite and at least 0, got {churn}")
        if not 0 <= churn_min <= churn_max:
            raise ValueError(
                f"churn needs 0 <= churn_min <= churn_max, got {churn_min} and {churn_max}"
            )
        if not 0 < churn_noise < math.inf:
            raise ValueError(f"churn_noise must be positive, got {churn_noise}")
        self.solver, self.scale_correction = solver, scale_correction
        self.churn, self.churn_min, self.churn_max = churn, churn_min, churn_max
        self.churn_noise = churn_noise

    @property
    def steps(self) -> int:
        """Number N of positive noise levels."""
        return len(self.sigmas) - 1

    @property
    def evaluations(self) -> int:
        """Network calls of one run: 2 N - 1 for Heun, N for Euler."""
        return 2 * self.steps - 1 if self.solver == "heun" else self.steps

    def step(
        self,
        denoiser: Denoiser,
        position: int,
        x: Tensor,
        noise: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """One step from sigmas[position] to sigmas[position + 1].

        Args:
            denoiser: D(x, sigma) with sigma a 0-d tensor.
            position: 0 is the noisiest.
            x: ``(n, c, ...)`` sample at that level.
            noise: z of the churn.
            scale: lambda of this step.
        """
        sigma, following = self.sigmas[position].item(), self.sigmas[position + 1].item()
        churning = self.churn > 0 and self.churn_min <= sigma <= self.churn_max
        gamma = min(self.churn / self.steps, math.sqrt(2) - 1) if churning else 0.0
        raised = sigma * (1 + gamma)
        if gamma > 0:
            if noise is None:
                raise ValueError("churn > 0 needs noise")
            x = x + math.sqrt(raised**2 - sigma**2) * self.churn_noise * noise
        slope = self._epsilon(denoiser, x, raised, scale)
        proposal = x + (following - raised) * slope
        if self.solver == "euler" or following == 0:
            return proposal
        correction = self._epsilon(
            denoiser, proposal, following, scale if self.scale_correction else None
        )
        return x + (following - raised) * (0.5 * slope + 0.5 * correction)

    @staticmethod
    def _epsilon(denoiser: Denoiser, x: Tensor, sigma: float, scale: Tensor | None) -> Tensor:
        level = torch.tensor(sigma, dtype=x.dtype, device=x.device)
        epsilon = (x - denoiser(x, level)) / level
        return epsilon if scale is None else epsilon / scale


@torch.no_grad()
def run_edm_sampler(
    denoiser: Denoiser,
    sampler: EDMSampler,
    latents: Tensor,
    noise: Callable[[int], Tensor] | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Run the EDM sampler in float64.

    Args:
        denoiser: D(x, sigma); gets float64 samples.
        sampler: The solver and its grid.
        latents: ``(n, c, ...)`` standard normal; multiplied by the first sigma.
        noise: Churn noise by step count.
        scales: ``(N,)`` lambda by index counted from the clean end, as everywhere.

    Raises:
        ValueError: If `scales` has another length than the grid.
        FloatingPointError: If samples become non-finite.
    """
    if scales is not None and scales.shape != (sampler.steps,):
        raise ValueError(
            f"scales must have one entry for each of the {sampler.steps} steps, "
            f"got shape {tuple(scales.shape)}"
        )
    x = latents.double() * sampler.sigmas[0].item()
    for position in range(sampler.steps):
        index = sampler.steps - 1 - position
        scale = None if scales is None else scales[index].to(x)
        drawn = None if noise is None else noise(position).to(x)
        x = sampler.step(denoiser, position, x, drawn, scale)
        require_finite(x, index, scale)
    return x


class EDMPreconditioning(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x, log(sigma) / 4).

    Args:
        network: F, called with (x, noise label ``(n,)``).
        data_std: Standard deviation of the data.
    """

    def __init__(self, network: nn.Module, data_std: float = 0.5) -> None:
        super().__init__()
        self.network, self.data_std = network, data_std

    def forward(self, x: Tensor, sigma: Tensor, *args: Tensor) -> Tensor:
        """Denoised image like x ``(n, c, ...)``, at sigma 0-d or ``(n,)``."""
        level = sigma.expand(len(x)).reshape((-1,) + (1,) * (x.ndim - 1)).to(x)
        total = level**2 + self.data_std**2
        skip, out = self.data_std**2 / total, level * self.data_std / total.sqrt()
        label = level.flatten().log() / 4
        kind = next(self.network.parameters()).dtype
        output = self.network((x / total.sqrt()).to(kind), label.to(kind), *args)
        denoised: Tensor = skip * x + out * output.to(x)
        return denoised


def edm_loss(
    denoiser: Denoiser,
    x0: Tensor,
    log_sigma: Tensor,
    noise: Tensor,
    data_std: float = 0.5,
) -> Tensor:
    """Weighted denoising error ``(n,)``; log_sigma ~ N(-1.2, 1.2^2) in the original recipe."""
    sigma = log_sigma.exp()
    level = sigma.reshape((-1,) + (1,) * (x0.ndim - 1))
    weight = (sigma**2 + data_std**2) / (sigma * data_std) ** 2
    return weight * mean_over_pixels((denoiser(x0 + level * noise, sigma) - x0) ** 2)


def as_denoiser(model: Model, diffusion: GaussianDiffusion) -> Denoiser:
    """Run a discrete-time model under an EDM sampler.

    x at noise level sigma is x_t / sqrt(abar_t) with sigma^2 = (1 - abar_t) / abar_t; the
    timestep is interpolated in log sigma and handed over as a fraction.
    """
    grid = diffusion.tables["sqrt_recipm1_alphas_cumprod"].log()

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        wanted = sigma.detach().double().log().cpu().reshape(())
        right = int(torch.searchsorted(grid, wanted).clamp(1, diffusion.steps - 1))
        share = ((wanted - grid[right - 1]) / (grid[right] - grid[right - 1])).clamp(0, 1)
        times = diffusion.timestep_map.double()
        time = times[right - 1] + share * (times[right] - times[right - 1])
        inputs = (x / (1 + sigma**2).sqrt()).float()
        output = model(inputs, time.float().to(inputs.device).expand(len(x)))
        epsilon = output[:, : x.shape[1]]
        if diffusion.prediction != "epsilon":
            raise ValueError(
                f"EDM samplers take networks that predict epsilon, got {diffusion.prediction!r}"
            )
        return x - sigma * epsilon.to(x)

    return denoise
