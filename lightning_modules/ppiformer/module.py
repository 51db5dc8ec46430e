"""PPIformer: masked pre-training on protein-protein interfaces, and zero-shot ddG."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_modules.base import PaperModule
from lightning_modules.components.randomness import global_seed
from lightning_modules.components.sharding import shard_blocks
from lightning_modules.ppiformer.checkpoint import load_weights, read_weights
from lightning_modules.ppiformer.encoder import SE3Encoder
from lightning_modules.ppiformer.evaluation import TRAINING_MEAN_DDG, design_table, impute
from lightning_modules.ppiformer.losses import MaskedLoss, masked_loss, mean_over_ranks
from lightning_modules.ppiformer.masking import mask_residues
from lightning_modules.ppiformer.metrics import GroupedDDG, Perplexity
from lightning_modules.ppiformer.network import InterfaceNetwork, ReadOut, Scoring, ensemble_ddg
from lightning_modules.ppiformer.output import (
    Row,
    heat_map,
    interface_figure,
    rows_of,
    scatter_figure,
    write_csv,
    write_metrics,
)
from lightning_modules.ppiformer.residues import class_weights as make_class_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class PPIformer(PaperModule):
    """Masked modelling of residues in protein-protein interfaces (Bushuiev et al., ICLR 2024).

    An SE(3)-equivariant transformer reads the residue graph of an interface and predicts hidden
    residue types. Read as log-odds, its predictions rank mutations without any ddG label.

    A batch needs `position`, `types`, `chain`, `vectors`, `neighbors`, `exists`, `key`, `batch`,
    `ptr` of the graphs, and for mutations `point_node`, `point_type`, `point_mutation`,
    `mutation_graph`, `ddg`, `group`, `inside`, `mutation`, `name`, `partner` (see
    `datamodules.interfaces.graphs.InterfaceGraph`).

    Logs `val/loss` (training objective), `val/accuracy`, `val/perplexity` (exp of the mean plain
    cross entropy over masked residues), `val/perplexity_reference` (mean of exp of the weighted,
    smoothed loss, as the authors log it), and where mutations have labels `val/spearman`,
    `val/pearson`, `val/rmse`, ... as means over complexes with at least `min_mutations` labels.

    Args:
        channels: hidden channels of degree 0 and 1.
        vectors: vector features per residue (1: virtual C-beta; 3: also along the backbone).
        depth: layers.
        heads: attention heads.
        head_widths: channels per head of degree 0 and 1.
        radial_hidden: width of the radial networks.
        edge_embedding: size of the embedding of the same-chain token.
        radius: longest edge in scaled units (1 is 4 A).
        gate_heads: gate attention heads by the scalars.
        reference_attention: degree-0 attention ignores `radius`, as in the original encoder.
        chain_tokens: tell edges within a chain from those between chains.
        encoder: `se3`, or `egnn` for the invariant baseline (uses `channels[0]` and `depth`).
        mask_ratio: share of the residues of the masked chain.
        bert: hide 80 %, replace 10 %, keep 10 % of the masked residues; false hides all.
        same_chain: mask one chain, chosen at random; false masks anywhere.
        class_weights: `published`, `inverse_frequency` (of the training data), null or 20 numbers.
        class_weight_power: exponent of the weights, 0 makes them equal.
        label_smoothing: of the masked loss.
        focal_gamma: exponent of the focal factor, 0 is none.
        read_out: how mutations are scored, see `readout.py`.
        unbound: subtract the score of the mutation in its binding side alone.
        correction: learn a scale and a shift of ddG.
        contexts: masked marginals are averaged over this many contexts; all but the first hide
            `context_ratio` of the other residues as well.
        context_ratio: see `contexts`.
        impute: ddG (kcal/mol) of mutations outside the interface; null gives NaN.
        min_mutations: complexes with fewer labels don't count in validation.
        max_variants: masked variants of an interface encoded at once outside of training.
        activation_checkpointing: recompute layers in the backward pass to save memory.
        weights: checkpoint to start from, ours or a published one.
        ensemble: checkpoints whose mean predicts in testing and prediction.
        optimizer: default Adam with the published learning rate 5e-4.
        lr_scheduler: default none.
        lr_interval: what the scheduler counts.
        loss_weights: of `masked`.

    Raises:
        ValueError: for arguments out of range, or weights of another architecture.
    """

    monitor: str = "val/perplexity"
    default_loss_weights: ClassVar[dict[str, float]] = {"masked": 1.0}
    class_weight: Tensor

    def __init__(
        self,
        channels: tuple[int, int] = (128, 64),
        vectors: int = 1,
        depth: int = 8,
        heads: int = 2,
        head_widths: tuple[int, int] = (32, 16),
        radial_hidden: int = 64,
        edge_embedding: int = 16,
        radius: float = 8.0,
        gate_heads: bool = False,
        reference_attention: bool = False,
        chain_tokens: bool = True,
        encoder: Literal["se3", "egnn"] = "se3",
        mask_ratio: float = 0.5,
        bert: bool = True,
        same_chain: bool = True,
        class_weights: str | list[float] | None = "published",
        class_weight_power: float = 1.0,
        label_smoothing: float = 0.05,
        focal_gamma: float = 0.0,
        read_out: ReadOut = "masked_marginals",
        unbound: bool = False,
        correction: bool = False,
        contexts: int = 1,
        context_ratio: float = 0.15,
        impute: float | None = TRAINING_MEAN_DDG,
        min_mutations: int = 10,
        max_variants: int | None = 32,
        activation_checkpointing: bool = False,
        weights: str | None = None,
        ensemble: list[str] | None = None,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["step", "epoch"] = "step",
        loss_weights: dict[str, float] | None = None,
    ) -> None:
        super().__init__(optimizer, lr_scheduler, lr_interval, loss_weights)
        if not 0 < mask_ratio <= 1:
            raise ValueError(f"mask_ratio must be in (0, 1], got {mask_ratio}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if focal_gamma < 0:
            raise ValueError(f"focal_gamma must be at least 0, got {focal_gamma}")
        self.mask_ratio, self.bert, self.same_chain = mask_ratio, bert, same_chain
        self.class_weights, self.class_weight_power = class_weights, class_weight_power
        self.label_smoothing, self.focal_gamma = label_smoothing, focal_gamma
        self.impute = impute
        self.weights, self.ensemble = weights, ensemble
        self.network = InterfaceNetwork(
            channels=channels,
            vectors=vectors,
            depth=depth,
            heads=heads,
            head_widths=head_widths,
            radial_hidden=radial_hidden,
            edge_embedding=edge_embedding,
            radius=radius,
            gate_heads=gate_heads,
            reference_attention=reference_attention,
            chain_tokens=chain_tokens,
            encoder=encoder,
            read_out=read_out,
            correction=correction,
            scoring=Scoring(unbound, contexts, context_ratio, max_variants),
            activation_checkpointing=activation_checkpointing,
        )
        fixed = None if class_weights == "inverse_frequency" else make_class_weights(class_weights)
        self.register_buffer("class_weight", torch.ones(20) if fixed is None else fixed)
        self.val_loss, self.val_accuracy = MeanMetric(), MeanMetric()
        self.val_perplexity, self.val_perplexity_reference = Perplexity(), MeanMetric()
        self.val_ddg = GroupedDDG(min_mutations, (0.0, -0.5))
        self.test_accuracy, self.test_perplexity = MeanMetric(), Perplexity()
        self.test_ddg = GroupedDDG(1, (0.0, -0.5))
        # Pre-training has no use for the heads of a read-out: they would get no gradient.
        for part in (self.network.head, self.network.affine):
            if part is not None:
                part.requires_grad_(False)
        self._loaded = weights is None
        self._members: list[InterfaceNetwork] = []
        self._rows: list[Row] = []
        self._shown: dict[str, Tensor] = {}

    # ------------------------------------------------------------------ set-up

    def setup(self, stage: str) -> None:
        """Read the weights to start from, ensemble members, and class weights from the data."""
        if not self._loaded and self.weights is not None:
            load_weights(self.network, read_weights(self.weights), self.weights)
            self._loaded = True
        if self.class_weights == "inverse_frequency" and stage == "fit":
            counts = getattr(self._datamodule(), "residue_counts", None)
            weight = make_class_weights("inverse_frequency", counts)
            assert weight is not None
            self.class_weight.copy_(weight)
        if self.ensemble and stage in ("test", "predict") and not self._members:
            for path in self.ensemble:
                member = type(self)(**{**self._arguments(), "weights": None}).network
                load_weights(member, read_weights(path), path)
                self._members.append(member.eval())

    def _arguments(self) -> dict[str, Any]:
        """Constructor arguments without those of training, which a member doesn't need."""
        training = {"optimizer", "lr_scheduler", "ensemble", "_class_path", "_instantiator"}
        return {name: value for name, value in self.hparams.items() if name not in training}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The weights of a checkpoint win over `weights`."""
        self._loaded = True

    def configure_model(self) -> None:
        """Under FSDP2 shard every layer, the rest of the encoder and the heads."""
        mesh = self.device_mesh
        if mesh is None:
            return
        network = self.network
        blocks = "blocks.*" if isinstance(network.encoder, SE3Encoder) else "message.*"
        shard_blocks(network.encoder, mesh, blocks)
        for head in (network.classifier, network.head, network.affine):
            if head is not None:
                shard_blocks(head, mesh, [])

    def default_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Adam, 5e-4, as in the published pre-training."""
        return torch.optim.Adam(parameters, lr=5e-4)

    def _datamodule(self) -> Any:
        return getattr(self._trainer, "datamodule", None)

    @property
    def _world_size(self) -> int:
        return int(self._trainer.world_size) if self._trainer is not None else 1

    # ------------------------------------------------------------------ training

    def forward(self, batch: Any, features: Tensor | None = None) -> Tensor:
        """Logits of the residue types, (nodes, [variants,] 20)."""
        logits: Tensor = self.network(batch, features)
        return logits

    def _weight(self) -> Tensor | None:
        if self.class_weights is None:
            return None
        if self.class_weight_power == 1.0:
            return self.class_weight
        weight = self.class_weight**self.class_weight_power
        return weight / weight.sum()

    def masked(self, batch: Any, *key: object) -> MaskedLoss:
        """Masked loss of a batch; every interface's mask is drawn from `key` and its name."""
        masking = mask_residues(
            batch.types,
            batch.chain,
            batch.ptr.tolist(),
            [(*key, name) for name in batch.key.tolist()],
            self.mask_ratio,
            self.same_chain,
            self.bert,
            batch.vectors.dtype,
        )
        rows = masking.masked.nonzero()[:, 0]
        logits = self.network.classifier(self.network.embed(batch, masking.features)[rows])
        return masked_loss(
            logits,
            batch.types[rows],
            batch.batch[rows],
            len(batch.key),
            self._weight(),
            self.label_smoothing,
            self.focal_gamma,
        )

    def masked_term(self, batch: Any) -> Tensor:
        """Mean over the interfaces of all ranks of the masked loss."""
        graphs = self.masked(batch, global_seed(), "mask", self.current_epoch).per_graph
        return mean_over_ranks(graphs.sum(), len(graphs), self._world_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Hide residues of every interface and predict their types."""
        return self.objective(masked=self.masked_term(batch))

    # ------------------------------------------------------------------ evaluation

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Masked residues, hidden by a mask that depends on the interface alone, and ddG."""
        loss = self.masked(batch, "validation mask")
        self.val_loss.update(loss.per_graph)
        self.val_perplexity_reference.update(loss.reference_perplexity)
        self.val_accuracy.update(loss.correct.float())
        self.val_perplexity.update(loss.cross_entropy)
        self.log("val/loss", self.val_loss, batch_size=1)
        self.log("val/accuracy", self.val_accuracy, batch_size=1)
        self.log("val/perplexity", self.val_perplexity, prog_bar=True, batch_size=1)
        self.log("val/perplexity_reference", self.val_perplexity_reference, batch_size=1)
        if torch.isfinite(batch.ddg).any():
            predicted = impute(self.network.ddg(batch)[0], batch.inside, self.impute)
            self.val_ddg.update(predicted, batch.ddg, batch.group)
        if not self._shown:
            first = slice(0, int(batch.ptr[1]))
            names = ("position", "chain", "neighbors", "exists")
            self._shown = {name: getattr(batch, name)[first].cpu() for name in names}

    def _log_ddg(self, metric: GroupedDDG, stage: str) -> None:
        metric.add_nothing(self.device)
        values = metric.compute()
        for name, value in values.items():
            if values["mutations"]:
                self.log(f"{stage}/{name}", value, batch_size=1)

    def on_validation_epoch_end(self) -> None:
        """Correlations over all rows of all ranks, not per batch."""
        self._log_ddg(self.val_ddg, "val")
        self.val_ddg.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """As validation, with an ensemble if there is one; every mutation becomes a row."""
        loss = self.masked(batch, "validation mask")
        self.test_accuracy.update(loss.correct.float())
        self.test_perplexity.update(loss.cross_entropy)
        self.log("test/accuracy", self.test_accuracy, batch_size=1)
        self.log("test/perplexity", self.test_perplexity, batch_size=1)
        if len(batch.mutation_graph):
            prediction = self.predict_step(batch, batch_idx)
            self._rows += rows_of(prediction)
            self.test_ddg.update(prediction["ddg"].to(batch.ddg), batch.ddg, batch.group)

    def _warn_untrained(self) -> None:
        """A network that never saw data ranks at random, which its table would not tell."""
        if self.weights is None and not self.ensemble and not int(self.training_iterations):
            rank_zero_warn(
                "the network was never trained, its predictions are random: give --ckpt_path, "
                "model.init_args.weights or model.init_args.ensemble"
            )

    def on_predict_start(self) -> None:
        """Warn of a network without training."""
        self._warn_untrained()

    def on_test_start(self) -> None:
        """Warn of a network without training."""
        self._warn_untrained()

    def on_test_epoch_start(self) -> None:
        """Start a new table."""
        self.test_ddg.reset()
        self._rows = []

    def on_test_epoch_end(self) -> None:
        """Mean metrics, ranks of a case study, the table of mutations and that of groups."""
        self._log_ddg(self.test_ddg, "test")
        improving = getattr(self._datamodule(), "improving", None)
        if improving and self._rows:
            names = [row.mutation for row in self._rows]
            reported = getattr(self._datamodule(), "reported", None)
            table = design_table(names, [row.ddg for row in self._rows], improving, reported)
            for name, value in table.items():
                self.log(f"test/{name}", value, batch_size=1)
        folder = self._trainer.log_dir if self._trainer is not None else None
        if self._rows and folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            rank = "" if self.global_rank == 0 else f".rank{self.global_rank}"
            write_csv(self._rows, Path(folder) / f"test_ddg{rank}.csv")
            if self.global_rank == 0 and self.test_ddg.table:
                names = getattr(self._datamodule(), "group_names", [])
                write_metrics(self.test_ddg.table, names, Path(folder) / "test_metrics.csv")

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        """DdG of the mutations of a batch, or residue embeddings where there are none.

        Returns:
            `interface` and `mutation` (strings, one per mutation), `ddg`, `sd` (spread over the
            ensemble, else over contexts), `in_interface`, `measured`; or `embedding` by interface.
        """
        if not len(batch.mutation_graph):
            sizes = batch.ptr.diff().tolist()
            parts = torch.split(self.network.embed(batch), sizes)
            named = zip(batch.name, parts, strict=True)
            return {"embedding": {name: part.cpu() for name, part in named}}
        members = [member.to(self.device) for member in self._members] or [self.network]
        mean, spread = ensemble_ddg(members, batch)
        return {
            "interface": [batch.name[graph] for graph in batch.mutation_graph.tolist()],
            "mutation": [text for texts in batch.mutation for text in texts],
            "ddg": impute(mean, batch.inside, self.impute).float().cpu(),
            "sd": impute(spread, batch.inside, None).float().cpu(),
            "in_interface": batch.inside.cpu(),
            "measured": batch.ddg.float().cpu(),
        }

    # ------------------------------------------------------------------ output

    def write_predictions(self, predictions: list[Any], folder: Path) -> list[Path]:
        """Write `ddg.csv`, and a heat map for every interface with single mutations."""
        rows = [row for prediction in predictions for row in rows_of(prediction)]
        if not rows:
            return []
        written = [write_csv(rows, folder / "ddg.csv")]
        for name in dict.fromkeys(row.interface for row in rows):
            figure = heat_map([row for row in rows if row.interface == name], name)
            if figure is not None:
                path = folder / f"scan_{name}.png"
                figure.savefig(path, dpi=150)
                written.append(path)
        return written

    def figures(self) -> "dict[str, Figure]":
        """The first validated interface, and predicted against measured ddG after testing."""
        figures: dict[str, Figure] = {}
        if self._shown:
            figures["interface"] = interface_figure(
                **{name: value.numpy() for name, value in self._shown.items()},
                title="C-alphas, and edges between chains",
            )
        if len(self.test_ddg.predicted):
            predicted, target, group = self.test_ddg.rows()
            if len(target):
                summary = self.test_ddg.compute()
                figures["ddg"] = scatter_figure(predicted, target, group, summary)
        return figures
