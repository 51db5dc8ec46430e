"""Protein-protein interfaces: reading, cutting, comparing, labelling, and residue graphs."""

from datamodules.interfaces.datamodule import Interfaces
from datamodules.interfaces.extraction import QualityFilter, extract, extract_dimers
from datamodules.interfaces.graphs import InterfaceGraph, ResidueTable, build_graph, residue_table
from datamodules.interfaces.mutations import parse_mutation
from datamodules.interfaces.potts import PottsInterfaces, sample_interfaces
from datamodules.interfaces.skempi import read_labels, read_skempi
from datamodules.interfaces.splits import cluster_folds, read_folds
from datamodules.interfaces.structure import Structure, read_structure

__all__ = [
    "InterfaceGraph",
    "Interfaces",
    "PottsInterfaces",
    "QualityFilter",
    "ResidueTable",
    "Structure",
    "build_graph",
    "cluster_folds",
    "extract",
    "extract_dimers",
    "parse_mutation",
    "read_folds",
    "read_labels",
    "read_skempi",
    "read_structure",
    "residue_table",
    "sample_interfaces",
]
