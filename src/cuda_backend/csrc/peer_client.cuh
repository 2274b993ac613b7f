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
  if ((threadIdx.x & 31) == 0) atomicAdd(&wrote[server], static_cast<int>(pieces.length(index)));
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
  __shared__ int wrote[kMostServers + 1];
  __shared__ int sent[kPeerThreads];
  __shared__ int crc[kCrcWords];
  if (!may_push(p)) return;
  bring_crc(crc);
  const int rows = p.rows.live(), server = threadIdx.x;
  const int64_t row_bytes = p.shapes.sites[p.site].d_in * p.shapes.itemsize;
  if (server < p.rows.servers) wrote[server] = 0;
  for (int begin = 0; begin < rows; begin += blockDim.x) {
    const int count = find_sent(p.rows.to_server, begin, rows, sent);
    const Pieces pieces(row_bytes, count);
    for (int unit = grid_warp(); unit < count * pieces.per_row; unit += grid_warps())
      push_row(p, pieces, sent[unit / pieces.per_row], unit % pieces.per_row, wrote);
  }
  __syncthreads();
  if (server < p.rows.servers && wrote[server]) atomicAdd(&p.state->written[server], wrote[server]);
  if (!last_cta(&p.state->ticket)) return;
  int* counts = wrote;
  count_rows(p.rows, counts);
  if (server >= p.rows.servers) return;
  const int written = atomicExch(&p.state->written[server], 0);
  PeerLink* link = load_link(&p.state->links[server]);
  const bool whole = written == static_cast<int>(counts[server] * row_bytes);
  if (counts[server] && link && !link->lost && (whole || link->under_way)) push_header(p, server, counts[server], link, crc);
}

struct WaitArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerRows rows;
  int site;
  int* status;  // [servers] out
  unsigned char* ys[kMostOuts];
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

// Spins until the counter reaches `want`: kArrived, and what it is; or until time is up or the host
// says so. The host's memory is far away, so it is looked at once in a while.
__device__ __forceinline__ int spin(const PeerState* state, int server, const PeerLink& link, uint64_t want,
                                    uint64_t start, uint64_t* arrivals) {
  for (unsigned polls = 1; (*arrivals = poll_acquire_sys(link.in_counter)) < want; ++polls) {
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
  const bool stopped = state->stopped;
  PeerLink* place = load_link(&state->links[server]);
  const PeerLink link = place ? *place : PeerLink{};  // read once: an acquire sends every later read far away
  add_count(state, kWaits, 1);
  if (nowhere || !place || link.lost || link.under_way != rows || link.site != p.site) {
    if (link.under_way) lose(state, server, place);  // not if it joined between push and wait
    add_count(state, kCountAborted, 1);
    return kAborted;
  }
  if (stopped) return fail(state, server, place, kAborted);
  for (uint64_t want = link.sequence, arrivals;; want = arrivals + 1) {
    const int status = spin(state, server, link, want, start, &arrivals);
    if (status != kArrived) return fail(state, server, place, status);
    PeerHeader header;
    if (accept_answer(p.shapes, link, rows, &header, crc)) {
      place->under_way = 0;
      state->answers[server] = link.in_slot;
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

// One CTA decides for all: unless every server answered, the sum leaves all y alone.
__device__ __forceinline__ void decide(const WaitArgs& p) {
  __shared__ int counts[kMostServers + 1];
  __shared__ int failed[1];
  __shared__ int crc[kCrcWords];
  const uint64_t start = now_nanos();
  bring_crc(crc);
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
  store_release_sys(&p.state->decision, any && !failed[0] ? kAdd : kLeaveAlone);
  if (any) count_wait(p.state, now_nanos() - start, !failed[0]);
}

// Whether to add, when that is decided. The whole CTA; the last one of the grid to know forgets it.
__device__ __forceinline__ bool decided_to_add(PeerState* state) {
  __shared__ int adds[1];
  if (threadIdx.x == 0) {
    uint64_t decision = kUndecided;
    while (decision == kUndecided) decision = poll_acquire_sys(&state->decision);
    adds[0] = decision == kAdd;
    if (atomicAdd(&state->knowing, 1) == static_cast<int>(gridDim.x) - 1) state->knowing = 0, state->decision = kUndecided;
  }
  __syncthreads();
  return adds[0] != 0;
}

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
__device__ __forceinline__ void add_row(const WaitArgs& p, int k, int row, const Pieces& pieces, int index) {
  const PeerSite& site = p.shapes.sites[p.site];
  const int server = p.rows.to_server[row];
  const int place = place_of(p.rows.to_server, row, server);
  const int64_t width = site.widths[k], first = pieces.begin(index) / sizeof(Y);
  Y* y = reinterpret_cast<Y*>(p.ys[k]) + row * width + first;
  const D* delta = reinterpret_cast<const D*>(p.state->answers[server] + site.offsets[k]) + place * width + first;
  const int64_t columns = pieces.length(index) / sizeof(Y);
  const uint64_t off = reinterpret_cast<uint64_t>(y) % (8 * sizeof(Y)) + reinterpret_cast<uint64_t>(delta) % (8 * sizeof(D));
  if (off == 0 && columns % 8 == 0) {
    add_columns<Y, D, 8>(y, delta, columns);
  } else {
    add_columns<Y, D, 1>(y, delta, columns);
  }
}

// The first CTA waits; the others have found their rows when it is through.
template <class Y, class D>
__global__ void __launch_bounds__(kPeerThreads) wait_add_kernel(const WaitArgs p) {
  __shared__ int sent[kPeerThreads];
  if (blockIdx.x == 0) decide(p);
  const PeerSite& site = p.shapes.sites[p.site];
  const int rows = p.rows.live(), outs = static_cast<int>(site.num_outs);
  int count = find_sent(p.rows.to_server, 0, rows, sent);
  if (!decided_to_add(p.state)) return;
  for (int begin = 0; begin < rows;) {
    int unit = grid_warp();  // of all outputs, one behind the other
    for (int k = 0; k < outs; ++k) {
      const Pieces pieces(site.widths[k] * sizeof(Y), count * outs);
      const int units = count * pieces.per_row;
      for (; unit < units; unit += grid_warps())
        add_row<Y, D>(p, k, sent[unit / pieces.per_row], pieces, unit % pieces.per_row);
      unit -= units;
    }
    begin += blockDim.x;
    if (begin < rows) count = find_sent(p.rows.to_server, begin, rows, sent);
  }
}

inline cudaError_t launch_push(const PushArgs& args, int ctas, cudaStream_t stream) {
  push_kernel<<<ctas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
template <class Y, class D>
cudaError_t launch_wait_add_of(const WaitArgs& args, cudaStream_t stream) {
  const auto kernel = wait_add_kernel<Y, D>;
  kernel<<<2 * kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_wait_add(const WaitArgs& args, bool wide_y, cudaStream_t stream) {
  const bool wide_delta = args.shapes.delta_itemsize == 4;
  if (wide_y)
    return wide_delta ? launch_wait_add_of<float, float>(args, stream) : launch_wait_add_of<float, uint16_t>(args, stream);
  return wide_delta ? launch_wait_add_of<uint16_t, float>(args, stream)
                    : launch_wait_add_of<uint16_t, uint16_t>(args, stream);
}

}  // namespace lora_jax
