"""FedRAP: federated recommendation with additive personalisation (arXiv 2301.09109)."""

from lightning_modules.fedrap.module import FedRAP

__all__ = ["FedRAP"]
