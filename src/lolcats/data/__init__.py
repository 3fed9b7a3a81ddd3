"""Data: read, template, tokenise, pack, cache, and draw batches that a killed run can go on from."""

from lolcats.data.build import build_datasets, build_evaluation_dataset
from lolcats.data.packed import PackedDataset
from lolcats.data.sampler import BatchSampler

__all__ = ["BatchSampler", "PackedDataset", "build_datasets", "build_evaluation_dataset"]
