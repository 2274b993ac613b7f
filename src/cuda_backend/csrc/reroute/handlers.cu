// XLA FFI entry point of the row map, fit for CUDA graphs: one launch for a block of rows, two or three
// for more. A table and the tokens' adapters may follow the ids.
#include "device/ffi_buffers.cuh"
#include "reroute/reroute.cuh"

namespace lora_jax {

static ffi::Error add_table(RerouteArgs* args, const ffi::RemainingArgs& given) {
  const auto slots = given.get<S32>(0), table = given.get<S32>(1);
  if (slots.has_error()) return slots.error();
  if (table.has_error()) return table.error();
  args->token_to_slot = slots->typed_data(), args->table = table->typed_data();
  args->slots = static_cast<int>(table->dimensions()[0]), args->experts = static_cast<int>(table->dimensions()[1]);
  return ffi::Error::Success();
}

// The adapters' arguments are the last two, their results too.
static ffi::Error add_adapters(RerouteArgs* args, const ffi::RemainingArgs& given, const ffi::RemainingRets& results) {
  const auto slots = given.get<S32>(given.size() - 2), order = given.get<S32>(given.size() - 1);
  const auto items = results.get<S32>(0), num_items = results.get<S32>(1), owners = results.get<S32>(2);
  if (slots.has_error()) return slots.error();
  if (order.has_error()) return order.error();
  if (items.has_error()) return items.error();
  if (num_items.has_error()) return num_items.error();
  if (owners.has_error()) return owners.error();
  args->token_to_adapter = slots->typed_data(), args->token_order = order->typed_data();
  args->items = reinterpret_cast<Item*>(items.value()->typed_data());
  args->num_items = num_items.value()->typed_data();
  args->owners = reinterpret_cast<uint32_t*>(owners.value()->typed_data());
  return ffi::Error::Success();
}

static ffi::Error Mapped(cudaStream_t stream, S32 ids, S32 num_tokens, ffi::RemainingArgs more,
                         ffi::Result<S32> order, ffi::Result<S32> inverse, ffi::Result<S32> sizes,
                         ffi::Result<S32> row_to_token, ffi::Result<S32> row_to_expert, ffi::Result<S32> counts,
                         ffi::RemainingRets results, bool rerouted, int64_t item_rows) {
  RerouteArgs args{};
  args.ids = ids.typed_data(), args.num_tokens = num_tokens.typed_data();
  args.tokens = static_cast<int>(ids.dimensions()[0]), args.k = static_cast<int>(ids.dimensions()[1]);
  args.groups = args.experts = static_cast<int>(sizes->element_count());
  args.order = order->typed_data(), args.inverse = inverse->typed_data(), args.sizes = sizes->typed_data();
  args.row_to_token = row_to_token->typed_data(), args.row_to_expert = row_to_expert->typed_data();
  args.counts = reinterpret_cast<uint16_t*>(counts->typed_data());
  args.item_rows = static_cast<int>(item_rows);
  ffi::Error wrong = rerouted ? add_table(&args, more) : ffi::Error::Success();
  if (wrong.success() && args.item_rows) wrong = add_adapters(&args, more, results);
  if (wrong.failure()) return wrong;
  const cudaError_t e = launch_reroute(args, stream);
  return status(e);
}

}  // namespace lora_jax

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_cuda_row_map, lora_jax::Mapped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .RemainingArgs()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .Ret<S32>()
                                  .RemainingRets()
                                  .Attr<bool>("rerouted")
                                  .Attr<int64_t>("item_rows"),
                              {ffi::Traits::kCmdBufferCompatible});
