"""PPIformer: learning to design protein-protein interactions (Bushuiev et al., ICLR 2024)."""

from lightning_modules.ppiformer.ddg_module import DDGPPIformer
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.module import PPIformer
from lightning_modules.ppiformer.network import InterfaceNetwork, Scoring, ensemble_ddg

__all__ = [
    "DDGPPIformer",
    "InterfaceNetwork",
    "PPIformer",
    "SE3Encoder",
    "Scoring",
    "ensemble_ddg",
]
