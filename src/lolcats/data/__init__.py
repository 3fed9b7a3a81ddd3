"""Data: read, template, tokenise, pack, cache or stream, and draw batches that a resumed run draws again."""

from lolcats.data.build import build_datasets, build_evaluation_dataset
from lolcats.data.packed import BatchSampler, PackedDataset

__all__ = ["BatchSampler", "PackedDataset", "build_datasets", "build_evaluation_dataset"]
