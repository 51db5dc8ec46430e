"""Sources of data, one file or folder each; every public name is imported when first used."""

from lightning_modules.components.lazy import lazy_names

# public name -> module that defines it
PUBLIC_NAMES = {
    "GaussianMixture": "gaussian_mixture",
    "ImageFiles": "image_folder",
    "Images": "images",
    "IsometryInputs": "isometry_inputs",
    "Interactions": "interactions",
    "Preferences": "preferences",
    "RegressionStream": "regression_stream",
    "Interfaces": "interfaces",
    "SuiteDataModule": "base",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, PUBLIC_NAMES)
