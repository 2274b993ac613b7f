// XLA FFI entry points of all-gather and all-to-all between the GPUs of a process. They only enqueue a kernel whose
// sequence numbers are in device memory, so XLA may put it into CUDA graphs.
#include <mutex>
#include <vector>

#include "all_gather/all_gather.cuh"
#include "device/ffi_buffers.cuh"

namespace lora_jax {

struct GatherGroup {
  int devices;
  unsigned char* memory[kMostGatherDevices];  // by ordinal
};
// Compiled programs name a group by number, so groups stay for the rest of the process.
static std::mutex groups_mutex;
static std::vector<GatherGroup> groups;

static bool find_group(int64_t number, GatherGroup* group) {
  std::lock_guard<std::mutex> hold(groups_mutex);
  if (number < 1 || number > static_cast<int64_t>(groups.size())) return false;
  *group = groups[number - 1];
  return true;
}

static ffi::Error AllGather(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y,
                            int64_t group_number, int64_t patience, int64_t parts_number) {
  GatherGroup group;
  if (!find_group(group_number, &group) || ordinal < 0 || ordinal >= group.devices)
    return ffi::Error::InvalidArgument("all_gather: the device is in no such group of this process");
  const auto parts = static_cast<GatherParts>(parts_number);
  const int64_t rows = y->dimensions()[0];
  const int64_t bytes = static_cast<int64_t>(x.size_bytes()) / (parts_number ? group.devices : 1);  // to each peer
  if (rows < 1 || x.dimensions()[0] != rows * (parts == GatherParts::kRows ? group.devices : 1) || bytes % (16 * rows) || static_cast<int64_t>(y->size_bytes()) != bytes * group.devices)
    return ffi::Error::InvalidArgument("all_gather: rows must be whole units of 16 bytes");
  if (bytes * group.devices >> 36) return ffi::Error::InvalidArgument("all_gather: the result has 64 GiB or more");
  GatherArgs args{static_cast<const uint4*>(x.untyped_data()), static_cast<uint4*>(y->untyped_data()),
                  static_cast<uint32_t>(rows), static_cast<uint32_t>(bytes / 16 / rows), group.devices, ordinal,
                  static_cast<uint64_t>(patience)};
  turn_memory(args, group.memory);
  const cudaError_t e = launch_gather(args, parts, stream);
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}

// Rows of all devices by their owners: this device's part of the columns, in the order of `source`.
static ffi::Error AllToAllOwned(cudaStream_t stream, int32_t ordinal, ffi::AnyBuffer x, S32 source,
                                S32 owner, ffi::Result<ffi::AnyBuffer> y, int64_t group_number,
                                int64_t patience) {
  GatherGroup group;
  if (!find_group(group_number, &group) || ordinal < 0 || ordinal >= group.devices)
    return ffi::Error::InvalidArgument("all_to_all_owned: the device is in no such group of this process");
  const int64_t rows = y->dimensions()[0], bytes = static_cast<int64_t>(y->size_bytes());
  const int64_t row_bytes = rows < 1 ? 0 : bytes / rows, x_rows = x.dimensions()[0];
  if (row_bytes < 16 || row_bytes % 16 || static_cast<int64_t>(source.element_count()) != rows ||
      static_cast<int64_t>(owner.element_count()) != rows ||
      static_cast<int64_t>(x.size_bytes()) != x_rows * row_bytes * group.devices)
    return ffi::Error::InvalidArgument("all_to_all_owned: each row has a source and an owner, and units of 16 bytes");
  if (bytes >> 36) return ffi::Error::InvalidArgument("all_to_all_owned: the result has 64 GiB or more");
  GatherArgs args{static_cast<const uint4*>(x.untyped_data()), static_cast<uint4*>(y->untyped_data()),
                  static_cast<uint32_t>(rows), static_cast<uint32_t>(row_bytes / 16), group.devices, ordinal,
                  static_cast<uint64_t>(patience), source.typed_data(), owner.typed_data()};
  turn_memory(args, group.memory);
  const cudaError_t e = launch_gather(args, GatherParts::kOwned, stream);
  return e == cudaSuccess ? ffi::Error::Success() : ffi::Error::Internal(cudaGetErrorString(e));
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_all_gather, lora_jax::AllGather,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("patience")
                                  .Attr<int64_t>("parts"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_all_to_all_owned, lora_jax::AllToAllOwned,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("patience"),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" {

int64_t lora_jax_cuda_gather_bytes(int64_t devices) { return lora_jax::gather_bytes(static_cast<int>(devices)); }
int64_t lora_jax_cuda_gather_status_offset() { return offsetof(lora_jax::GatherHead, status); }
int32_t lora_jax_cuda_gather_load(int64_t devices) { return lora_jax::load_gather(static_cast<int>(devices)); }

// Lets kernels of the current device read and write what cudaMalloc gives on another one.
int32_t lora_jax_cuda_gather_reach(int64_t device) {
  const cudaError_t e = cudaDeviceEnablePeerAccess(static_cast<int>(device), 0);
  if (e != cudaSuccess) cudaGetLastError();  // else the next launch would be told of it
  return e == cudaErrorPeerAccessAlreadyEnabled ? cudaSuccess : e;
}

// A number for the group of devices 0..devices-1, whose memories are zero and lie at `memory`; 0 if too many.
int64_t lora_jax_cuda_gather_new(int64_t devices, const uint64_t* memory) {
  if (devices < 2 || devices > lora_jax::kMostGatherDevices) return 0;
  lora_jax::GatherGroup group{static_cast<int>(devices)};
  for (int d = 0; d < devices; ++d) group.memory[d] = reinterpret_cast<unsigned char*>(memory[d]);
  std::lock_guard<std::mutex> hold(lora_jax::groups_mutex);
  lora_jax::groups.push_back(group);
  return static_cast<int64_t>(lora_jax::groups.size());
}
}
