"""Figures: what is drawn, when, where it lands and who gets it."""

import sys
from pathlib import Path

import matplotlib
import pytest
from lightning.pytorch.loggers import CSVLogger

from callbacks import Figures


class ImageLogger(CSVLogger):
    """Takes images, as the W&B logger does."""

    def __init__(self, *args, fail: bool = False, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.images, self.fail = [], fail

    def log_image(self, key: str, images: list[str]) -> None:
        if self.fail:
            raise ConnectionError("no network")
        assert all(Path(image).is_file() for image in images)
        self.images.append((key, *(Path(i).name for i in images)))


@pytest.fixture
def drawing(watched):
    from matplotlib.figure import Figure

    class Drawing(watched):
        drawn = 0

        def figures(self):
            import matplotlib.pyplot as plt

            self.drawn += 1
            bare = Figure()
            bare.subplots().plot([0, 1], [0, self.drawn])
            figure, axes = plt.subplots()
            axes.plot([1, 0])
            return {"loss curve/a b": figure, "plain": bare}

    return Drawing


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "figures").iterdir())


def test_saved_and_logged(fit, drawing, tmp_path) -> None:
    import matplotlib.pyplot as plt

    module, logger = drawing(), ImageLogger(tmp_path / "run", name="", version="")
    fit(module, Figures(), logger=logger, num_sanity_val_steps=1)
    assert module.drawn == 2  # two epochs, none for the sanity check
    assert _names(tmp_path / "run") == ["loss_curve_a_b.png", "plain.png"]
    assert (tmp_path / "run" / "figures" / "plain.png").read_bytes()[:4] == b"\x89PNG"
    keys = [("figures/loss curve/a b", "loss_curve_a_b.png"), ("figures/plain", "plain.png")]
    assert logger.images == 2 * keys
    assert plt.get_fignums() == []
    assert matplotlib.get_backend().lower() == "agg" or "matplotlib.pyplot" in sys.modules


def test_options(fit, drawing, tmp_path) -> None:
    module, logger = drawing(), ImageLogger(tmp_path / "run", name="", version="")
    figures = Figures(every_n_epochs=2, format="svg", keep_all=True, dpi=50)
    fit(module, figures, logger=logger, max_epochs=4)
    assert module.drawn == 2
    expected = [f"plain-epoch={e}.{kind}" for e in (1, 3) for kind in ("png", "svg")]
    assert [name for name in _names(tmp_path / "run") if "plain" in name] == expected


def test_after_testing_and_without_loggers(fit, drawing, tmp_path) -> None:
    from toy import ToyData

    trainer = fit(drawing(), Figures(), limit_val_batches=0)
    assert not (tmp_path / "figures").exists()
    trainer.test(drawing(), ToyData(), verbose=False)
    assert _names(tmp_path) == ["loss_curve_a_b.png", "plain.png"]


def test_a_lost_upload_does_not_end_the_run(fit, drawing, tmp_path, recwarn) -> None:
    logger = ImageLogger(tmp_path / "run", name="", version="", fail=True)
    figures = Figures()
    trainer = fit(drawing(), logger=logger, max_epochs=1)
    with pytest.warns(UserWarning, match="is saved but was not logged: no network"):
        figures._draw(trainer, drawing())
    assert _names(tmp_path / "run") == ["loss_curve_a_b.png", "plain.png"]


def test_modules_without_figures(fit, watched, tmp_path) -> None:
    fit(watched(), Figures())
    fit(watched(), Figures(), fast_dev_run=True)
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("arguments", [{"every_n_epochs": 0}, {"dpi": 0}])
def test_bad_arguments(arguments) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be at least 1, got 0"):
        Figures(**arguments)
