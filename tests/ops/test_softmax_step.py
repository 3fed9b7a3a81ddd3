"""The kernels of one token of softmax attention, against plain softmax attention over the visible keys."""

import pytest
import torch
from kit import DEVICE, TOLERANCE
from torch import Tensor

from lolcats.modeling.softmax import softmax_attention
from lolcats.ops import Scoring
from lolcats.ops.eight_bits import is_packed, pack, unpack
from lolcats.ops.hybrid_attention.kernels import softmax_step as kernel

KEYS = 300  # of a slot, in three splits
LENGTHS = (1, 300, 64, 130, 0)


class Slots:
    """Queries, and keys and values in slots, of which those of the rows are adjacent. Behind a row's length is NaN."""

    def __init__(
        self,
        lengths: tuple[int, ...] = LENGTHS,
        keys: int = KEYS,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        sinks: bool = False,
        softcap: float | None = None,
        packed: bool = False,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)

        batch = len(lengths)
        self.length_B = torch.tensor(lengths, device=DEVICE)
        self.q_BH1D = 3.0 * normal(batch, 1, heads, head_dim).transpose(1, 2)
        self.k_BGKD, self.v_BGKD = (normal(batch + 2, kv_heads, keys + 1, head_dim)[1:-1, :, :-1] for _ in range(2))
        self.scoring = Scoring(normal(heads) if sinks else None, softcap=softcap)
        if packed:
            self.k_BGKD, self.v_BGKD = pack(self.k_BGKD), pack(self.v_BGKD)
        for x in (self.k_BGKD, self.v_BGKD):
            for row, length in zip(x, lengths, strict=True):
                row[:, length:] = -1 if packed else torch.nan  # four bytes of -1 are NaN, too

    def step(self) -> Tensor:
        return kernel.softmax_step(self.q_BH1D, self.k_BGKD, self.v_BGKD, self.length_B, self.scoring).double()

    def expected(self) -> Tensor:
        """Each row alone; zeros without keys."""
        rows = torch.zeros(self.q_BH1D.shape, dtype=torch.float64, device=DEVICE)
        for b, length in enumerate(self.length_B.tolist()):
            if length:
                keys = [x[b : b + 1, :, :length] for x in (self.k_BGKD, self.v_BGKD)]
                if is_packed(keys[0]):
                    keys = [unpack(x, torch.float64) for x in keys]
                keys = [x.double() for x in keys]
                rows[b] = softmax_attention(self.q_BH1D[b : b + 1].double(), *keys, self.scoring)[0]
        return rows

    def check(self) -> None:
        found, expected = self.step(), self.expected()
        error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
        assert error.max() <= TOLERANCE[self.q_BH1D.dtype], f"relative error {error.max():.1e}"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.bfloat16, "head_dim": 20},
        {"heads": 3, "kv_heads": 3},
        {"heads": 20, "kv_heads": 1, "sinks": True, "softcap": 5.0},
        {"packed": True},
        {"dtype": torch.bfloat16, "head_dim": 20, "packed": True},
        {"dtype": torch.bfloat16, "head_dim": 100, "packed": True},
    ],
    ids=["float32", "bfloat16", "ungrouped", "large group, sinks, softcap", "8 bits", "8 bits, bfloat16", "words"],
)
def test_each_row_sees_its_keys(settings):
    assert kernel.splits_of_a_row(len(LENGTHS) * 2, KEYS) == 3
    Slots(**settings).check()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads", "kv_heads"),
    [
        (torch.bfloat16, 64, 9, 3),
        (torch.bfloat16, 128, 32, 8),
        (torch.bfloat16, 128, 4, 4),
        (torch.bfloat16, 256, 4, 1),
        (torch.float16, 80, 8, 8),
        (torch.float32, 64, 9, 3),
        (torch.float32, 128, 32, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("packed", [False, True], ids=["", "8 bits"])
def test_large(dtype, head_dim, heads, kv_heads, packed):
    for lengths, keys in (((8192,), 8192), ((5000, 1, 257, 8192, 0, 64), 8192), (tuple(range(1, 600, 7)), 600)):
        Slots(lengths, keys, heads, kv_heads, head_dim, dtype, packed=packed).check()


def test_many_splits_of_short_rows(monkeypatch):
    """Most have no keys; long rows and few of them are split most."""
    assert [kernel.splits_of_a_row(rows, 8192) for rows in (1, 64, 640, 5000)] == [64, 33, 4, 1]
    assert [kernel.splits_of_a_row(1, keys) for keys in (1, 10**6)] == [1, 128]
    monkeypatch.setattr(kernel, "LEAST_KEYS", 8)
    assert kernel.splits_of_a_row(2, KEYS) == 38
    Slots((3, 100), heads=2, kv_heads=1).check()


@pytest.mark.gpu
def test_one_graph_serves_all_lengths():
    slots = Slots((700, 3), 1000, dtype=torch.bfloat16, head_dim=64)
    for x in (slots.k_BGKD, slots.v_BGKD):
        x.nan_to_num_(1.0)
    slots.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = slots.step()
    for lengths in ((1, 1000), (999, 64)):
        slots.length_B.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(found, slots.expected(), rtol=2e-2, atol=1e-2)  # bfloat16
