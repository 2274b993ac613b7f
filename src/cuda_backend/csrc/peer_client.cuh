// A client's kernels: rows to the servers' slots, a bounded wait, and the sum of what came back.
#pragma once
#include "peer_copy.cuh"
#include "peer_header.cuh"

namespace lora_jax {

struct PeerRows {  // serving.transport.base.PushRows
  const int *num_rows, *layer, *version;
  const int *to_server, *to_adapter, *to_expert;
  int rows, servers;
  __device__ int live() const { return max(0, min(*num_rows, rows)); }
};

struct PushArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerRows rows;
  const unsigned char* x;
  int site;
};

// Counts each server's rows, and last those of servers that the client does not have. The whole CTA.
__device__ __forceinline__ void count_rows(const PeerRows& rows, int* counts) {
  for (int i = threadIdx.x; i <= rows.servers; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < rows.live(); row += blockDim.x) {
    const int server = rows.to_server[row];
    if (server >= 0) atomicAdd(&counts[min(server, rows.servers)], 1);
  }
  __syncthreads();
}
__device__ __forceinline__ void add_count(PeerState* state, int which, unsigned long long by) {
  atomicAdd(&state->counts[which], by);
}
__device__ __forceinline__ void lose(PeerState* state, int server, PeerLink* link) {
  link->lost = 1;
  store_release_sys(&state->control->lost[server], link->epoch);
}

// Whether a push goes out at all: what no server can be asked for is left to the wait to report.
__device__ __forceinline__ bool may_push(const PushArgs& p) {
  return *p.rows.layer >= 0 && *p.rows.layer < p.shapes.layers;
}
__device__ __forceinline__ bool takes_rows(const PeerLink* link) { return link && !link->lost && !link->under_way; }

__device__ __forceinline__ void push_row(const PushArgs& p, const Pieces& pieces, int row, int index, int* wrote) {
  const int server = p.rows.to_server[row];
  if (server < 0 || server >= p.rows.servers) return;
  // The host may write here meanwhile: one lane reads for all.
  const auto found = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(load_link(&p.state->links[server])), 0);
  const auto* link = reinterpret_cast<const PeerLink*>(found);
  if (!takes_rows(link)) return;
  if ((threadIdx.x & 31) == 0) atomicAdd(&wrote[server], 1);
  const int place = place_of(p.rows.to_server, row, server);
  unsigned char* slot = link->out_slot;
  if (index == 0 && (threadIdx.x & 31) == 0) {
    reinterpret_cast<int*>(slot + p.shapes.adapters_offset)[place] = p.rows.to_adapter[row];
    reinterpret_cast<int*>(slot + p.shapes.experts_offset)[place] = p.rows.to_expert[row];
  }
  const int64_t begin = pieces.begin(index);
  warp_copy(slot + p.shapes.rows_offset + place * pieces.bytes + begin, p.x + row * pieces.bytes + begin,
            pieces.length(index));
}

// One thread a server: the header, when all of the payload is there. Where the host brought the link
// while some CTAs were through already, it is not, and nothing goes.
__device__ __forceinline__ void push_header(const PushArgs& p, int server, int rows, PeerLink* link, const int* crc) {
  if (link->under_way) {  // nobody waited: the server may still read the slot
    lose(p.state, server, link);
    return;
  }
  link->under_way = rows, link->site = p.site, link->layer = *p.rows.layer;
  const uint64_t bytes = request_bytes(p.shapes, p.site, rows);
  post(link->out_slot, link->out_counter,
       PeerHeader{0, 0, link->epoch, ++link->sequence, link->layer, p.site, rows, kRequest, *p.rows.version, bytes, 0},
       crc);
  add_count(p.state, kPushes, 1);
  add_count(p.state, kBytesSent, bytes);
}

__global__ void __launch_bounds__(kPeerThreads) push_kernel(const PushArgs p) {
  __shared__ int counts[kMostServers + 1];
  __shared__ int crc[kCrcWords];
  if (!may_push(p)) return;
  bring_crc(crc);
  const int rows = p.rows.live(), server = threadIdx.x;
  if (server < p.rows.servers) counts[server] = 0;
  __syncthreads();
  const Pieces pieces(p.shapes.sites[p.site].d_in * p.shapes.itemsize, rows);
  for (int unit = grid_warp(); unit < rows * pieces.per_row; unit += grid_warps())
    push_row(p, pieces, unit / pieces.per_row, unit % pieces.per_row, counts);
  __syncthreads();
  if (server < p.rows.servers && counts[server]) atomicAdd(&p.state->written[server], counts[server]);
  if (!last_cta(&p.state->ticket)) return;
  count_rows(p.rows, counts);
  if (server >= p.rows.servers) return;
  const int written = atomicExch(&p.state->written[server], 0);
  PeerLink* link = load_link(&p.state->links[server]);
  const bool whole = written == counts[server] * pieces.per_row;
  if (counts[server] && link && !link->lost && (whole || link->under_way)) push_header(p, server, counts[server], link, crc);
}

struct WaitArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerRows rows;
  int site;
  int* status;  // [servers] out
};

__device__ __forceinline__ bool accept_answer(const PeerShapes& shapes, const PeerLink& link, int rows,
                                              PeerHeader* header, const int* crc) {
  if (!read_header(link.in_slot, header, crc)) return false;
  if (header->epoch != link.epoch || header->sequence != link.sequence) return false;
  if (header->layer != link.layer || header->site != link.site) return false;
  if (header->kind == kRefusal) return header->rows == 0 && header->num_bytes == 0;
  return header->kind == kResponse && header->rows == rows &&
         header->num_bytes == response_bytes(shapes, link.site, rows);
}

// Spins until the counter reaches `want`: kArrived; or until time is up or the host says so. The
// host's memory is far away, so it is looked at once in a while.
__device__ __forceinline__ int spin(const PeerState* state, int server, const PeerLink& link, uint64_t want,
                                    uint64_t start) {
  for (unsigned polls = 1; poll_acquire_sys(link.in_counter) < want; ++polls) {
    if (polls % 64) continue;
    const PeerControl* control = state->control;
    if (load_acquire_sys(&control->abort) || load_acquire_sys(&control->gone[server]) >= link.epoch) return kAborted;
    if (now_nanos() - start > load_acquire_sys(&control->limit_nanos)) return kTimedOut;
  }
  return kArrived;
}

__device__ __forceinline__ int fail(PeerState* state, int server, PeerLink* link, int status) {
  lose(state, server, link);
  add_count(state, status == kAborted ? kCountAborted : kCountTimedOut, 1);
  return status;
}

// One thread a server with rows. Returns how the wait for it ended.
__device__ __forceinline__ int wait_for(const WaitArgs& p, int server, int rows, bool nowhere, uint64_t start,
                                        const int* crc) {
  PeerState* state = p.state;
  PeerLink* link = load_link(&state->links[server]);
  add_count(state, kWaits, 1);
  if (nowhere || !link || link->lost || link->under_way != rows || link->site != p.site) {
    if (link && link->under_way) lose(state, server, link);  // not if it joined between push and wait
    add_count(state, kCountAborted, 1);
    return kAborted;
  }
  if (state->stopped) return fail(state, server, link, kAborted);
  for (uint64_t want = link->sequence;;) {
    const int status = spin(state, server, *link, want, start);
    if (status != kArrived) return fail(state, server, link, status);
    want = load_acquire_sys(link->in_counter) + 1;
    PeerHeader header;
    if (accept_answer(p.shapes, *link, rows, &header, crc)) {
      link->under_way = 0;
      state->answers[server] = link->in_slot;
      if (header.kind == kResponse) return kArrived;
      add_count(state, kCountRefused, 1);
      return kRefused;
    }
    add_count(state, kDropped, 1);
  }
}

__device__ __forceinline__ void count_wait(PeerState* state, uint64_t nanos, bool well) {
  int length = 0;
  while (length < kLengths - 1 && nanos >> (length + 1)) ++length;
  add_count(state, kWaitNanos, nanos);
  if (well) add_count(state, kCounts + length, 1);
  if (nanos > state->counts[kLongestWait]) state->counts[kLongestWait] = nanos;
}

// One CTA decides for all: unless every server answered, the sum that follows leaves all y alone.
__global__ void __launch_bounds__(kPeerThreads) wait_kernel(const WaitArgs p) {
  __shared__ int counts[kMostServers + 1];
  __shared__ int failed[1];
  __shared__ int crc[kCrcWords];
  bring_crc(crc);
  const uint64_t start = now_nanos();
  if (threadIdx.x == 0) failed[0] = 0;
  count_rows(p.rows, counts);
  const bool nowhere = counts[p.rows.servers] > 0;
  int any = nowhere;
  for (int server = 0; server < p.rows.servers; ++server) any |= counts[server];
  const int server = threadIdx.x;
  if (server < p.rows.servers) {
    int status = kArrived;
    if (counts[server]) status = wait_for(p, server, counts[server], nowhere, start, crc);
    if (nowhere) status = kAborted;
    p.status[server] = status;
    if (status != kArrived) atomicAdd(&failed[0], 1);
  }
  __syncthreads();
  if (threadIdx.x) return;
  p.state->decision = any && !failed[0];
  if (any) count_wait(p.state, now_nanos() - start, !failed[0]);
}

struct AddArgs {
  const PeerState* state;
  PeerShapes shapes;
  PeerRows rows;
  unsigned char* ys[kMostOuts];
  int site;
};

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(uint16_t x) { return __int_as_float(static_cast<int>(static_cast<uint32_t>(x) << 16)); }
__device__ __forceinline__ void narrow(float x, float* out) { *out = x; }
__device__ __forceinline__ void narrow(float x, uint16_t* out) {  // to the nearest, ties to even
  const uint32_t bits = static_cast<uint32_t>(__float_as_int(x));
  *out = static_cast<uint16_t>(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40);
}

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};
// N columns at a time, from both on their boundaries; T is uint16_t for bfloat16.
template <class Y, class D, int N>
__device__ __forceinline__ void add_columns(Y* y, const D* delta, int64_t columns) {
  // Loads before the first store, which the compiler must take for a change of theirs; as registers allow.
  constexpr int kFlying = 18 / (sizeof(Y) + sizeof(D));
  auto* out = reinterpret_cast<Pack<Y, N>*>(y);
  const auto* in = reinterpret_cast<const Pack<D, N>*>(delta);
  const int64_t packs = columns / N;
  for (int64_t first = threadIdx.x & 31; first < packs; first += 32 * kFlying) {
    Pack<Y, N> sums[kFlying];
    Pack<D, N> more[kFlying];
#pragma unroll
    for (int k = 0; k < kFlying; ++k) {
      const int64_t i = min(first + 32 * k, packs - 1);
      sums[k] = out[i], more[k] = in[i];
    }
#pragma unroll
    for (int k = 0; k < kFlying; ++k) {
      if (first + 32 * k >= packs) break;
#pragma unroll
      for (int j = 0; j < N; ++j) narrow(wide(sums[k].values[j]) + wide(more[k].values[j]), &sums[k].values[j]);
      out[first + 32 * k] = sums[k];
    }
  }
}

template <class Y, class D>
__device__ __forceinline__ void add_row(const AddArgs& p, int k, int row, int place, const unsigned char* slot,
                                        const Pieces& pieces, int index) {
  const PeerSite& site = p.shapes.sites[p.site];
  const int64_t width = site.widths[k], first = pieces.begin(index) / sizeof(Y);
  Y* y = reinterpret_cast<Y*>(p.ys[k]) + row * width + first;
  const D* delta = reinterpret_cast<const D*>(slot + site.offsets[k]) + place * width + first;
  const int64_t columns = pieces.length(index) / sizeof(Y);
  const uint64_t off = reinterpret_cast<uint64_t>(y) % (8 * sizeof(Y)) + reinterpret_cast<uint64_t>(delta) % (8 * sizeof(D));
  if (off == 0 && columns % 8 == 0) {
    add_columns<Y, D, 8>(y, delta, columns);
  } else {
    add_columns<Y, D, 1>(y, delta, columns);
  }
}

template <class Y, class D>
__global__ void __launch_bounds__(kPeerThreads) add_kernel(const AddArgs p) {
  if (!p.state->decision) return;
  const int rows = p.rows.live();
  for (int k = 0; k < p.shapes.sites[p.site].num_outs; ++k) {
    const Pieces pieces(p.shapes.sites[p.site].widths[k] * sizeof(Y), rows);
    for (int unit = grid_warp(); unit < rows * pieces.per_row; unit += grid_warps()) {
      const int row = unit / pieces.per_row, server = p.rows.to_server[row];
      if (server < 0) continue;
      const int place = place_of(p.rows.to_server, row, server);
      add_row<Y, D>(p, k, row, place, p.state->answers[server], pieces, unit % pieces.per_row);
    }
  }
}

inline cudaError_t launch_push(const PushArgs& args, int ctas, cudaStream_t stream) {
  push_kernel<<<ctas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_wait(const WaitArgs& args, cudaStream_t stream) {
  wait_kernel<<<1, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
template <class Y, class D>
cudaError_t launch_add_of(const AddArgs& args, cudaStream_t stream) {
  const auto kernel = add_kernel<Y, D>;
  kernel<<<2 * kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_add(const AddArgs& args, bool wide_y, cudaStream_t stream) {
  const bool wide_delta = args.shapes.delta_itemsize == 4;
  if (wide_y) return wide_delta ? launch_add_of<float, float>(args, stream) : launch_add_of<float, uint16_t>(args, stream);
  return wide_delta ? launch_add_of<uint16_t, float>(args, stream) : launch_add_of<uint16_t, uint16_t>(args, stream);
}

}  // namespace lora_jax
