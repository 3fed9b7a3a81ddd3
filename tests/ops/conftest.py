"""Where the operators' tests run, a faithful interpreter, and memory that shows what was never written.

On a machine without a GPU the kernels run through Triton's interpreter, which is slow: there the cases are few and
small, and those marked `gpu` are skipped.
"""

import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

pytest.register_assert_rewrite("kit")
KERNELS = ["*kernel*", "test_huge_strides.py", "test_softmax_step.py"]
TRITON = importlib.util.find_spec("triton") is not None
collect_ignore_glob = [] if TRITON else KERNELS
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"
with torch.device("cpu"):  # which functions take a device is looked up once, and must be before some are replaced
    torch.empty(0)


def round_to_bfloat16(x):
    """float32 bits to bfloat16 bits, to nearest even, as GPUs do; the interpreter would cut the bits off."""
    bits = x.view("uint32").astype("uint64")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("uint16")


@pytest.fixture(scope="module", autouse=True)
def faithful_interpreter():
    """Faults of Triton's interpreter: how it rounds, scalars that NumPy 2.4 no longer converts, programs in their order
    (GPUs have none); and what took most of the time: each call of a function replaced the language anew, and each token
    stored had its own program."""
    if GPU or not TRITON:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    from lolcats.ops.hybrid_attention.kernels import store_tokens

    convert, patch_tensor = interpreter._convert_float, interpreter._patch_lang_tensor

    def convert_float(x, source, target, rounding):
        if source.name == "fp32" and target.name == "bf16":
            return round_to_bfloat16(x)
        return convert(x, source, target, rounding)

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(store_tokens, "FEW", 8)
        monkeypatch.setattr(interpreter, "_convert_float", convert_float)
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        builder, set_index = interpreter.interpreter_builder, interpreter.interpreter_builder.set_grid_idx
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: set_index(builder.grid_dim[0] - 1 - x, y, z))
        scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        monkeypatch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        yield
        scope.restore()


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that nothing wrote is NaN, a large integer or True."""

    def poisoned(make):
        def wrapper(*arguments, **options):
            x = make(*arguments, **options)
            garbage = float("nan") if x.is_floating_point() else x.dtype == torch.bool or torch.iinfo(x.dtype).max
            x.detach().fill_(garbage)  # checkpointing makes one that takes gradients
            return x

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
