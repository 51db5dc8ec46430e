"""The exact noise predictor of a mixture of Gaussians, in place of a trained network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_modules.components.diffusion.gaussian import GaussianDiffusion


class ExactScore(nn.Module):
    """E[eps | x_t] for x_0 uniform over centres plus N(0, std^2): closed form, no training.

    With s = sqrt(abar) the posterior weight of centre c is softmax of
    -|x - s c|^2 / (2 (abar std^2 + 1 - abar)), and
    E[x_0 | x] = m + std^2 s / (abar std^2 + 1 - abar) (x - s m), m the weighted mean of centres.

    Args:
        centres: ``(k, c, ...)`` float tensor.
        std: Standard deviation h of each component.
        diffusion: The training process; timesteps are its indices.
        weights: ``(k,)`` mixture weights; uniform if None.
        chunk: Rows handled at a time, to bound the (rows, k) table.

    Raises:
        ValueError: If std is not positive or there are no centres.
    """

    def __init__(
        self,
        centres: Tensor,
        std: float,
        diffusion: GaussianDiffusion,
        weights: Tensor | None = None,
        chunk: int = 1024,
    ) -> None:
        super().__init__()
        if std <= 0:
            raise ValueError(f"std must be positive, got {std}")
        if len(centres) == 0:
            raise ValueError("centres must not be empty")
        self.shape, self.std, self.chunk = centres.shape[1:], std, chunk
        self.register_buffer("centres", centres.flatten(1).clone(), persistent=False)
        self.register_buffer("norms", (self.centres**2).sum(1), persistent=False)
        log_weights = torch.zeros(len(centres)) if weights is None else weights.log()
        self.register_buffer("log_weights", log_weights.to(self.centres), persistent=False)
        signal = diffusion.tables["alphas_cumprod"].to(self.centres.dtype)
        self.register_buffer("signal", signal, persistent=False)
        self.centres: Tensor
        self.norms: Tensor
        self.log_weights: Tensor
        self.signal: Tensor

    def denoise(self, flat: Tensor, signal: Tensor) -> Tensor:
        """E[x_0 | x] for ``(n, d)`` rows at ``(n, 1)`` alphas_cumprod."""
        root = signal.sqrt()
        spread = signal * self.std**2 + 1 - signal
        # |x|^2 is the same for all centres and drops out of the softmax.
        logits = (root * (flat @ self.centres.T) - 0.5 * signal * self.norms) / spread
        mean = torch.softmax(logits + self.log_weights, dim=1) @ self.centres
        return mean + self.std**2 * root / spread * (flat - root * mean)

    def forward(self, x: Tensor, timesteps: Tensor, labels: Tensor | None = None) -> Tensor:
        """Noise ``(n, c, ...)`` at x ``(n, c, ...)`` and original timesteps ``(n,)``."""
        flat = x.flatten(1)
        signal = self.signal[timesteps.long()][:, None]
        parts = [
            self.denoise(flat[start : start + self.chunk], signal[start : start + self.chunk])
            for start in range(0, len(flat), self.chunk)
        ]
        return ((flat - signal.sqrt() * torch.cat(parts)) / (1 - signal).sqrt()).reshape(x.shape)
