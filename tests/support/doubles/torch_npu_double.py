"""A double of torch_npu and vllm-ascend: their operators by schema, checked and computed on a CPU.

Schemas are those that the wheels contain (test_wheels holds them against installed ones). A call
is refused where the real operator refuses or must not be called so; what the real one leaves
undefined comes out as NaN.
"""

import ctypes
import types

import torch

GROUPED_MATMUL = (
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, "
    "Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, "
    "Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, "
    "Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, "
    "Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, "
    "int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, "
    "int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]"
)
NPU_SCHEMAS = (GROUPED_MATMUL, "npu_swiglu(Tensor input, int dim=-1) -> Tensor")
_BY_SEGMENT = "Tensor! x, Tensor! weight, Tensor! lora_indices, Tensor! seq_len, Tensor! y, "
_BY_ROW = "Tensor! x, Tensor! weight, Tensor! indices, Tensor! y, "
LORA_SCHEMAS = (
    f"bgmv_shrink({_BY_ROW}float scale) -> ()",
    f"bgmv_expand({_BY_ROW}int slice_offset, int slice_size) -> Tensor",
    f"sgmv_shrink({_BY_SEGMENT}float scale) -> ()",
    f"sgmv_expand({_BY_SEGMENT}int slice_offset, int slice_size) -> Tensor",
)


class TorchNpuDouble:
    """The operators, and a list of (name, arguments) of the calls they got."""

    def __init__(self):
        self.calls: list[tuple[str, dict]] = []
        self._libraries = []
        for space, schemas in (("npu", NPU_SCHEMAS), ("_C_ascend", LORA_SCHEMAS)):
            library = torch.library.Library(space, "DEF")
            self._libraries.append(library)
            for schema in schemas:
                name = schema.partition("(")[0]
                library.define(schema)
                library.impl(name, getattr(self, name), "CPU")

    def close(self) -> None:
        """Take the operators out of torch again."""
        for library in self._libraries:
            library._destroy()

    def modules(self) -> dict[str, types.ModuleType]:
        """Return what to put into sys.modules."""
        npu = types.ModuleType("torch_npu")
        npu.npu_grouped_matmul = torch.ops.npu.npu_grouped_matmul
        npu.npu_swiglu = torch.ops.npu.npu_swiglu
        npu._C = types.SimpleNamespace(
            _construct_storage_from_data_pointer=_storage,
            _construct_NPU_Tensor_From_Storage_And_Metadata=_tensor,
        )
        names = ("vllm_ascend", "vllm_ascend.vllm_ascend_C")
        return {"torch_npu": npu} | {name: types.ModuleType(name) for name in names}

    def npu_grouped_matmul(self, x, weight, *, group_list, split_item, group_type, **more):
        """One x and one weight with rows grouped; a group without rows is not read."""
        kind = more.pop("group_list_type", 0)
        self.calls.append(("npu_grouped_matmul", {"group_list_type": kind, **more}))
        (x,), (w,) = x, weight
        assert not any(more.values()), f"{more} are not for plain weights"
        assert (split_item, group_type) == (2, 0)
        assert x.dtype == w.dtype
        assert group_list.dtype == torch.int64
        assert len(group_list) == len(w) <= 1024
        assert w.transpose(1, 2).is_contiguous()
        assert max(x.shape[1], w.transpose(1, 2).shape[2]) < 65536
        assert kind == 0 or len(group_list) > 1, "counts must be of more than one group"
        y = x.new_full((len(x), w.shape[2]), torch.nan)
        start = 0
        for group, number in enumerate(group_list.tolist()):
            stop = start + number if kind == 1 else number
            if stop > start:
                y[start:stop] = (x[start:stop].float() @ w[group].float()).to(y.dtype)
            start = stop
        return [y]

    def npu_swiglu(self, input, dim=-1):
        self.calls.append(("npu_swiglu", {"dim": dim}))
        gate, up = input.float().chunk(2, dim)
        return (torch.nn.functional.silu(gate) * up).to(input.dtype)

    def bgmv_shrink(self, x, weight, indices, y, scale):
        self._shrink("bgmv_shrink", x, weight, indices, y, scale)

    def sgmv_shrink(self, x, weight, lora_indices, seq_len, y, scale):
        indices = _rows_of(lora_indices, seq_len, len(x))
        self._shrink("sgmv_shrink", x, weight, indices, y, scale)

    def bgmv_expand(self, x, weight, indices, y, slice_offset, slice_size):
        return self._expand("bgmv_expand", x, weight, indices, y, slice_offset, slice_size)

    def sgmv_expand(self, x, weight, lora_indices, seq_len, y, slice_offset, slice_size):
        indices = _rows_of(lora_indices, seq_len, len(x))
        return self._expand("sgmv_expand", x, weight, indices, y, slice_offset, slice_size)

    def _shrink(self, name, x, weight, indices, y, scale):
        """y[t] = scale * weight[i] @ x[t]; rows of index -1 are not written."""
        self.calls.append((name, {"scale": scale}))
        _check_lora(x, weight, indices, y)
        assert x.dtype == weight.dtype
        assert y.dtype == torch.float32
        assert x.shape[1] > y.shape[1]
        assert x.shape[1] % 16 == 0
        for t, i in enumerate(indices.tolist()):
            if i >= 0:
                y[t] = scale * (weight[i].float() @ x[t].float())

    def _expand(self, name, x, weight, indices, y, offset, size):
        """y[t, offset : offset + size] += weight[i] @ x[t]; other ranks than four give garbage."""
        self.calls.append((name, {"slice_offset": offset, "slice_size": size}))
        _check_lora(x, weight, indices, y)
        assert x.dtype == torch.float32
        assert y.dtype == weight.dtype
        assert x.shape[1] <= size
        assert offset + size <= y.shape[1]
        assert offset % 16 == size % 16 == y.shape[1] % 16 == 0
        garbage = 0.0 if x.shape[1] in (8, 16, 32, 64) else torch.nan
        for t, i in enumerate(indices.tolist()):
            if i >= 0:
                columns = slice(offset, offset + size)
                total = y[t, columns].float() + weight[i].float() @ x[t] + garbage
                y[t, columns] = total.to(y.dtype)
        return y


def _check_lora(x, weight, indices, y) -> None:
    assert weight.dtype in (torch.float16, torch.bfloat16)
    assert all(array.is_contiguous() for array in (x, weight, indices, y))
    assert indices.dtype == torch.int64
    assert len(x) == len(y) == len(indices)


def _rows_of(indices, lengths, num_rows):
    """Return the index of every row; -1 after the last segment."""
    assert lengths.dtype == torch.int64
    rows = indices.repeat_interleave(lengths)[:num_rows]
    return torch.nn.functional.pad(rows, (0, num_rows - len(rows)), value=-1)


def _storage(data_ptr: int, device: torch.device, size_bytes: int):
    assert isinstance(device, torch.device)
    memory = (ctypes.c_char * size_bytes).from_address(data_ptr)
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


def _tensor(metadata: dict, storage):
    assert metadata["npu_format"] == 2, "weights must stay as they lie"
    made = torch.empty(0, dtype=metadata["dtype"])
    return made.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])
