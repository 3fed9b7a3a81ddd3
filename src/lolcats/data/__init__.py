"""Data: read, template, tokenise, pack, cache or stream, and draw batches that a resumed run draws again."""

from lolcats.data.build import build_datasets, build_evaluation_dataset
from lolcats.data.packed import BatchSampler, PackedDataset
from lolcats.data.streaming import StreamedDataset, build_streams

__all__ = [
    "BatchSampler",
    "PackedDataset",
    "StreamedDataset",
    "build_datasets",
    "build_evaluation_dataset",
    "build_streams",
]
