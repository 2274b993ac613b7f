// XLA FFI entry points of the products: plain weights, codes, and values with scales.
#include <memory>

#include "buffers.h"
#include "gemm.h"

namespace lora_jax {

// Weights of one product: plain ones, codes with scales and zeros, in lanes or in quads, or values
// with scales.
enum Form : int64_t { kPlain, kCoded, kScaled, kQuadCoded };
constexpr int64_t kFacts = 3;  // of a product: its form, and the rows and columns of its blocks

template <class D, ffi::DataType dtype>
struct Product {
  Gemm<D> gemm;
  std::unique_ptr<DecodedRows<D>> decoded;

  ffi::Error plain(const ffi::AnyBuffer& w) {
    if (!all_of<dtype>(w)) return WrongTypes("grouped_matmul");
    set_sizes(w.dimensions(), 1), gemm.w = data<typename D::T>(w);
    return ffi::Error::Success();
  }
  ffi::Error coded(const ffi::AnyBuffer& codes, const ffi::AnyBuffer& scales,
                   const ffi::AnyBuffer& zeros, const float* table, bool quads) {
    if (!all_of<ffi::U8>(codes, zeros)) return WrongTypes("coded_gemm");
    set_sizes(codes.dimensions(), 2);
    auto rows = std::make_unique<CodedRows<D>>(table);
    rows->codes = data<uint8_t>(codes), rows->zeros = data<uint8_t>(zeros);
    rows->scales = {scales.untyped_data(), scales.element_type() == ffi::BF16};
    rows->d_in = gemm.d_in, rows->span = gemm.d_in / scales.dimensions()[2];
    if (rows->span % kWords)
      return ffi::Error::InvalidArgument("coded_gemm: groups of 32, 64, ... weights");
    if (quads && (!kReadsQuads || gemm.d_in % kQuads))
      return ffi::Error::InvalidArgument("coded_gemm: no quads on this CPU, or of this d_in");
    rows->quads = quads;
    decoded = std::move(rows);
    return ffi::Error::Success();
  }
  ffi::Error scaled(const ffi::AnyBuffer& values, const ffi::AnyBuffer& scales,
                    int64_t block_rows, int64_t block_cols) {
    if (!all_of<ffi::F8E4M3FN>(values) || !all_of<ffi::F32>(scales))
      return ffi::Error::InvalidArgument("scaled_gemm: values of float8_e4m3fn");
    set_sizes(values.dimensions(), 1);
    if (gemm.d_in % kValueStep || (block_cols % kValueStep && block_cols < gemm.d_in))
      return ffi::Error::InvalidArgument("scaled_gemm: d_in and blocks in multiples of 16");
    auto rows = std::make_unique<ScaledRows<D>>(gemm.d_in, block_cols);
    rows->values = data<uint8_t>(values), rows->scales = data<float>(scales);
    rows->d_out = gemm.d_out, rows->block_rows = block_rows;
    decoded = std::move(rows);
    return ffi::Error::Success();
  }

 private:
  void set_sizes(ffi::Span<const int64_t> d, int64_t per_byte) {
    gemm.w = nullptr, gemm.groups = d[0], gemm.d_out = d[1], gemm.d_in = d[2] * per_byte;
  }
};

// Products of x and several weights, whose buffers and then a bias follow each other in `rest`. A
// table has 16 values for each.
template <class D, ffi::DataType dtype>
ffi::Error GemmCall(ffi::ThreadPool pool, ffi::AnyBuffer x, S32 group_sizes,
                    ffi::RemainingArgs rest, ffi::RemainingRets ys, ffi::Span<const int64_t> facts,
                    ffi::Span<const float> tables) {
  const size_t count = ys.size();
  if (!count || facts.size() != kFacts * count || tables.size() != 16 * count)
    return ffi::Error::InvalidArgument("grouped_matmul: 3 facts and a table of 16 for each result");
  std::vector<Product<D, dtype>> products(count);
  std::vector<Gemm<D>> gemms;
  Rest args(rest);
  for (size_t i = 0; i < count; ++i) {
    const int64_t* fact = facts.begin() + kFacts * i;
    std::optional<ffi::AnyBuffer> parts[3];
    const bool coded = fact[0] == kCoded || fact[0] == kQuadCoded;
    for (int64_t part = 0; part < (fact[0] == kPlain ? 1 : coded ? 3 : 2); ++part)
      if (!(parts[part] = args.next()))
        return ffi::Error::InvalidArgument("grouped_matmul: weights are missing");
    auto bias = args.next();
    auto y = ys.get<ffi::AnyBuffer>(i);
    if (!bias || !y) return ffi::Error::InvalidArgument("grouped_matmul: a bias is missing");
    if (!all_of<dtype>(x, *bias, **y)) return WrongTypes("grouped_matmul");
    Product<D, dtype>& product = products[i];
    ffi::Error error = fact[0] == kPlain ? product.plain(*parts[0])
                       : coded
                           ? product.coded(*parts[0], *parts[1], *parts[2], tables.begin() + 16 * i,
                                           fact[0] == kQuadCoded)
                           : product.scaled(*parts[0], *parts[1], fact[1], fact[2]);
    if (error.failure()) return error;
    Gemm<D>& g = product.gemm;
    g.decoded = product.decoded.get(), g.x = data<typename D::T>(x);
    g.bias = data<typename D::T>(*bias), g.group_sizes = group_sizes.typed_data();
    g.y = data<typename D::T>(*y), g.rows = x.dimensions()[0];
    gemms.push_back(g);
  }
  run_gemms<D>(pool, gemms);
  return ffi::Error::Success();
}

}  // namespace lora_jax

#define LORA_JAX_GEMM(name, D, dtype)                                                   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, (lora_jax::GemmCall<lora_jax::D, dtype>),         \
                                ffi::Ffi::Bind()                                        \
                                    .Ctx<ffi::ThreadPool>()                             \
                                    .Arg<ffi::AnyBuffer>()                              \
                                    .Arg<S32>()                                         \
                                    .RemainingArgs()                                    \
                                    .RemainingRets()                                    \
                                    .Attr<ffi::Span<const int64_t>>("facts")            \
                                    .Attr<ffi::Span<const float>>("tables"))

// Whether products take codes in the order of quads, and fastest so.
extern "C" int32_t lora_jax_reads_quads() { return lora_jax::kReadsQuads; }

LORA_JAX_GEMM(lora_jax_gemm_float32, DotF32, ffi::F32);
LORA_JAX_GEMM(lora_jax_gemm_bfloat16, DotBF16, ffi::BF16);
