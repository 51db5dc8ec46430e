"""FedRAP: federated recommendation with additive personalisation (arXiv 2301.09109)."""

from lightning_modules.fedrap.central import CentralRecommender
from lightning_modules.fedrap.fedncf import FedNCF
from lightning_modules.fedrap.module import FedRAP

__all__ = ["CentralRecommender", "FedNCF", "FedRAP"]
