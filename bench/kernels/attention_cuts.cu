// Times the CUDA paged attention without XLA: ways to cut the work, and where the time goes.
//
//   nvcc -I src/cuda_backend/csrc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a
//        bench/kernels/attention_cuts.cu -o attention_cuts && ./attention_cuts
//
// Values are a hash of their place, so that the CPU can check results in double without copies. Pages
// are scattered; sets of pages rotate, so that they are cold. One CUDA graph holds all repetitions.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "paged_attention/launch.cuh"

using namespace lora_jax;
using Bf16 = __nv_bfloat16;

#define OK(x)                                                                                 \
  if (cudaError_t e = (x); e != cudaSuccess) {                                                \
    std::printf("line %d: %s\n", __LINE__, cudaGetErrorString(e));                            \
    std::exit(1);                                                                             \
  }

constexpr int kEvery = 1 << 30;  // token may be cut
constexpr double kBandwidth = 4.17e12;  // bytes a second, of a large copy

struct Model {
  const char* name;
  int q_heads, kv_heads, k_dim, v_dim;
  bool latent;
};
constexpr Model kQwen{"qwen3-30b", 32, 4, 128, 128, false}, kLlama{"llama-8b", 32, 8, 128, 128, false};
constexpr Model kMla{"dsv2-lite", 16, 1, 576, 512, true}, kOss{"gpt-oss", 64, 8, 64, 64, false};

struct Case {
  Model model;
  int sequences, context, new_tokens;  // of each sequence
};
struct Cut {
  int chunk, cta_heads, token_groups, part_rows;
};

__host__ __device__ inline float hashed(uint64_t i, uint32_t seed) {
  uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 31, x *= 0x94d049bb133111ebull, x ^= x >> 29;
  const float a = static_cast<float>(x & 0xffff) - 32768, b = static_cast<float>(x >> 16 & 0xffff) - 32768;
  return (a + b) / 26755.f;  // variance one
}
__global__ void fill(Bf16* to, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += gridDim.x * 256ll)
    to[i] = __float2bfloat16(hashed(i, seed));
}
double value(uint64_t i, uint32_t seed) {
  const float f = hashed(i, seed);
  uint32_t bits;
  memcpy(&bits, &f, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
  float r;
  memcpy(&r, &bits, 4);
  return r;
}

// Takes pages as they come and looks at nothing: what copying alone costs.
template <int STEP>
struct CopyOnly {
  static constexpr int kStep = STEP;
  const AttentionArgs& p;
  SlotRing ring;
  __device__ CopyOnly(const AttentionArgs& p, const SlotRing& ring, unsigned char*) : p(p), ring(ring) {}
  __device__ void begin(const AttentionUnit&, int) {}
  __device__ void begin_chunk() {}
  __device__ void step(const Sight&, int, int boxes) {
    for (int i = 0; i < boxes; i += p.slot_boxes) {
      mbar_wait(&ring.sm.full[ring.at], ring.phase);
      __syncwarp();
      if ((threadIdx.x & 31) == 0) mbar_arrive(&ring.sm.empty[ring.at]);
      ring.next();
    }
  }
  __device__ void end_chunk(const AttentionUnit&, int) {}
  __device__ void finish(const AttentionUnit&) {}
};

template <class T>
T* device(size_t count) {
  T* p;
  OK(cudaMalloc(&p, count * sizeof(T) + 256));
  OK(cudaMemset(p, 0, count * sizeof(T)));
  return p;
}
template <class T>
T* device(const std::vector<T>& v) {
  T* p = device<T>(v.size());
  OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

struct Arrays {
  Case c;
  int page_size, tokens, max_pages, pages, sets;
  std::vector<int> tables, sequence, positions;
  Bf16 *q, *out;
  std::vector<Bf16*> k, v;
  int *d_tables, *d_sequence, *d_positions, *d_num;

  Arrays(const Case& c, int page_size) : c(c), page_size(page_size) {
    tokens = c.sequences * c.new_tokens, max_pages = (c.context + page_size - 1) / page_size;
    pages = c.sequences * max_pages;
    tables.resize(pages);
    std::iota(tables.begin(), tables.end(), 0);
    std::shuffle(tables.begin(), tables.end(), std::mt19937(1));
    for (int s = 0; s < c.sequences; ++s)
      for (int i = 0; i < c.new_tokens; ++i) sequence.push_back(s), positions.push_back(c.context - c.new_tokens + i);
    const int64_t k_count = int64_t(pages) * page_size * c.model.kv_heads * c.model.k_dim;
    const int64_t v_count = c.model.latent ? 0 : int64_t(pages) * page_size * c.model.kv_heads * c.model.v_dim;
    const double bytes = 2.0 * (k_count + v_count);
    sets = std::max(1, std::min(4, int(std::ceil(300e6 / bytes))));
    for (int i = 0; i < sets; ++i) {
      k.push_back(device<Bf16>(k_count)), v.push_back(device<Bf16>(v_count));
      fill<<<2048, 256>>>(k[i], k_count, 1);
      if (v_count) fill<<<2048, 256>>>(v[i], v_count, 2);
    }
    q = device<Bf16>(size_t(tokens) * c.model.q_heads * c.model.k_dim);
    fill<<<512, 256>>>(q, int64_t(tokens) * c.model.q_heads * c.model.k_dim, 3);
    out = device<Bf16>(size_t(tokens) * c.model.q_heads * c.model.v_dim);
    d_tables = device(tables), d_sequence = device(sequence), d_positions = device(positions);
    d_num = device(std::vector<int>{tokens});
    OK(cudaDeviceSynchronize());
  }
  ~Arrays() {
    for (Bf16* p : k) cudaFree(p);
    for (Bf16* p : v) cudaFree(p);
    for (void* p : {(void*)q, (void*)out, (void*)d_tables, (void*)d_sequence, (void*)d_positions, (void*)d_num}) cudaFree(p);
  }
  double scale() const { return 1 / std::sqrt(double(c.model.k_dim)); }
  double bytes() const {
    return 2.0 * c.sequences * c.context * c.model.kv_heads * (c.model.k_dim + (c.model.latent ? 0 : c.model.v_dim));
  }
  double flops() const {
    double seen = 0;
    for (int p : positions) seen += p + 1;
    return 2.0 * seen * c.model.q_heads * (c.model.k_dim + c.model.v_dim);
  }

  // The result of a token and head in double.
  std::vector<double> exact(int token, int head) const {
    const Model& m = c.model;
    const int kv = head / (m.q_heads / m.kv_heads);
    std::vector<double> logits, o(m.v_dim);
    auto at = [&](int position, int dim) {
      const int64_t page = tables[int64_t(sequence[token]) * max_pages + position / page_size];
      return ((page * page_size + position % page_size) * m.kv_heads + kv) * dim;
    };
    for (int i = 0; i <= positions[token]; ++i) {
      double s = 0;
      for (int d = 0; d < m.k_dim; ++d) s += value((int64_t(token) * m.q_heads + head) * m.k_dim + d, 3) * value(at(i, m.k_dim) + d, 1);
      logits.push_back(s * scale());
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    for (int i = 0; i <= positions[token]; ++i) {
      const double w = std::exp(logits[i] - top);
      sum += w;
      for (int d = 0; d < m.v_dim; ++d)
        o[d] += w * (m.latent ? value(at(i, m.k_dim) + d, 1) : value(at(i, m.v_dim) + d, 2));
    }
    for (double& x : o) x /= sum;
    return o;
  }
  // |got - exact| / |exact| over some tokens and heads.
  double error() const {
    std::vector<Bf16> got(size_t(tokens) * c.model.q_heads * c.model.v_dim);
    OK(cudaMemcpy(got.data(), out, got.size() * 2, cudaMemcpyDeviceToHost));
    double off = 0, all = 0;
    for (int i = 0; i < 6; ++i) {
      const int token = i == 0 ? 0 : (tokens - 1) * i / 5, head = i * 7 % c.model.q_heads;
      const auto want = exact(token, head);
      for (int d = 0; d < c.model.v_dim; ++d) {
        const double x = __bfloat162float(got[(size_t(token) * c.model.q_heads + head) * c.model.v_dim + d]);
        off += (x - want[d]) * (x - want[d]), all += want[d] * want[d];
      }
    }
    return std::sqrt(off / all);
  }
};

enum Parts { kAll, kUnits, kAttention, kCombine, kCopies };

cudaError_t launch_part(AttentionArgs p, AttentionUnitsArgs u, bool latent, Parts part, cudaStream_t stream) {
  p.head_groups = p.kv_heads / p.cta_heads;
  p.k_bytes = p.cta_heads * p.k_dim * kBox * 2, p.v_bytes = latent ? 0 : p.cta_heads * p.v_dim * kBox * 2;
  switch (part) {
    case kAll: return launch_attention(p, latent, stream);
    case kUnits: return launch_attention_units(u, stream);
    case kCombine: return launch_combine(p, stream);
    case kCopies:
      return latent ? launch_consumers<CopyOnly<4>>(p, kMostConsumers, 1, sizeof(LatentShared), stream)
                    : launch_consumers<CopyOnly<2>>(p, p.cta_heads, 2, 0, stream);
    case kAttention:  // without combine_kernel
      if (latent) return launch_latent(p, stream);
      return p.k_dim == 64 ? launch_heads<4, 8>(p, stream) : launch_heads<8, 16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

float graph_us(cudaStream_t stream, int ops, const std::vector<AttentionArgs>& sets, const AttentionUnitsArgs& u,
               bool latent, Parts part) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < ops; ++i) OK(launch_part(sets[i % sets.size()], u, latent, part, stream));
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  std::vector<float> times;
  for (int i = 0; i < 7; ++i) {
    OK(cudaEventRecord(a, stream));
    OK(cudaGraphLaunch(exec, stream));
    OK(cudaEventRecord(b, stream));
    OK(cudaStreamSynchronize(stream));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    if (i > 1) times.push_back(ms * 1e3f / ops);
  }
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaEventDestroy(a), cudaEventDestroy(b);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const Arrays& x, const Cut& cut, bool breakdown, cudaStream_t stream) {
  const Model& m = x.c.model;
  const int max_chunks = (x.max_pages * x.page_size + cut.chunk - 1) / cut.chunk;
  const int unit_tokens = cut.token_groups * (16 / (m.q_heads / m.kv_heads)), rows = std::min(cut.part_rows, x.tokens);
  auto* units = device<AttentionUnit>(x.tokens + size_t(rows) * max_chunks);
  int2* part_tokens = device<int2>(rows);
  int* num_units = device<int>(1);
  const size_t parts = size_t(rows) * max_chunks * m.q_heads;
  float *part_o = device<float>(parts * m.v_dim), *part_ml = device<float>(parts * 2);
  AttentionUnitsArgs u{x.d_sequence, x.d_positions, x.d_num, x.tokens, unit_tokens, cut.chunk, 0, rows, units, part_tokens, num_units};
  AttentionArgs p{};
  p.q = x.q, p.block_tables = x.d_tables, p.num_tokens = x.d_num, p.units = units;
  p.part_tokens = part_tokens, p.num_units = num_units, p.out = x.out, p.part_o = part_o, p.part_ml = (float2*)part_ml;
  p.tokens = x.tokens, p.q_heads = m.q_heads, p.kv_heads = m.kv_heads, p.k_dim = m.k_dim, p.v_dim = m.v_dim;
  p.page_size = x.page_size, p.max_pages = x.max_pages, p.chunk = cut.chunk, p.max_chunks = max_chunks;
  p.part_rows = rows, p.cta_heads = cut.cta_heads, p.token_groups = cut.token_groups;
  p.scale_log2 = float(x.scale() * 1.4426950408889634);
  std::vector<AttentionArgs> sets(x.sets, p);
  for (int i = 0; i < x.sets; ++i) {
    OK(page_map(&sets[i].k_map, x.k[i], x.pages, x.page_size, m.kv_heads, m.k_dim, cut.cta_heads));
    if (!m.latent) OK(page_map(&sets[i].v_map, x.v[i], x.pages, x.page_size, m.kv_heads, m.v_dim, cut.cta_heads));
  }
  OK(launch_attention_units(u, stream));
  OK(cudaMemsetAsync(x.out, 0xff, size_t(x.tokens) * m.q_heads * m.v_dim * 2, stream));
  OK(launch_part(sets[0], u, m.latent, kAll, stream));
  OK(cudaStreamSynchronize(stream));
  const double error = x.error(), floor_us = x.bytes() / kBandwidth * 1e6;
  const int ops = std::max(4, int(1500 / (floor_us + 10)));
  const float all = graph_us(stream, ops, sets, u, m.latent, kAll);
  std::printf("%-9s %3d x %5d + %4d page %2d chunk %4d heads %d groups %d rows %4d: %7.1f us, floor %6.1f (%.2fx), %6.1f TFLOP/s, error %.1e",
              m.name, x.c.sequences, x.c.context, x.c.new_tokens, x.page_size, cut.chunk, cut.cta_heads, cut.token_groups, rows, all,
              floor_us, all / floor_us, x.flops() / all * 1e-6, error);
  if (breakdown) {
    float part[5];
    for (Parts which : {kUnits, kAttention, kCombine, kCopies}) part[which] = graph_us(stream, ops, sets, u, m.latent, which);
    std::printf("; units %.1f attention %.1f combine %.1f copies only %.1f", part[kUnits], part[kAttention], part[kCombine], part[kCopies]);
  }
  std::printf("\n");
  std::fflush(stdout);
  for (void* f : {(void*)units, (void*)part_tokens, (void*)num_units, (void*)part_o, (void*)part_ml}) cudaFree(f);
}

int main() {
  cudaStream_t stream;
  OK(cudaStreamCreate(&stream));
  for (const Case& c : {Case{kQwen, 64, 2048, 1}, Case{kQwen, 8, 8192, 1}, Case{kLlama, 64, 2048, 1}}) {
    const Arrays x(c, 16);
    for (int chunk : {256, 512}) measure(x, Cut{chunk, 4, 2, kEvery}, true, stream);
    measure(x, Cut{512, 2, 4, kEvery}, false, stream);
  }
  {
    const Arrays x(Case{kMla, 64, 2048, 1}, 16);
    for (int chunk : {512, 1024}) measure(x, Cut{chunk, 1, 1, kEvery}, true, stream);
  }
  for (const Model& m : {kQwen, kLlama}) {
    const Arrays x(Case{m, 1, 2048, 2048}, 16);
    for (int heads : {1, 2}) measure(x, Cut{256, heads, 8 / heads, 256}, heads == 2, stream);
  }
  {
    const Arrays x(Case{kMla, 1, 2048, 2048}, 16);
    measure(x, Cut{512, 1, 1, 256}, true, stream);
  }
  for (const Case& c : {Case{kOss, 64, 2048, 1}, Case{kQwen, 8, 2048, 1}, Case{kQwen, 1, 32768, 1}}) {
    const Arrays x(c, 16);
    for (int chunk : {256, 512}) measure(x, Cut{chunk, 4, 2, kEvery}, false, stream);
  }
}
