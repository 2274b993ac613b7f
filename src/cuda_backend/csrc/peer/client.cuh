// A client's kernels: write rows to the servers' slots, wait for a bounded time, add the answers.
#pragma once
#include "device/launch_early.cuh"
#include "peer/copy.cuh"
#include "peer/header.cuh"

namespace lora_jax {

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
#pragma unroll 4
  for (int row = threadIdx.x; row < rows.rows; row += blockDim.x) {
    const int server = __ldg(rows.to_server + row);
    if (server >= 0 && row < rows.live()) atomicAdd(&counts[min(server, rows.servers)], 1);
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

// A link as a CTA has seen it: the host may write meanwhile, and the next CTA see another one.
struct Going {
  PeerLink* link;
  unsigned char* slot;  // none: nothing goes
  uint64_t* counter;
  uint64_t epoch, sequence;
  bool stuck;  // nobody waited: the server may still read the slot
};
__device__ __forceinline__ Going find_link(PeerLink* const* place) {
  PeerLink* link = load_link(place);
  if (!link || link->lost) return {};
  const bool stuck = link->under_way != 0;
  return {link, stuck ? nullptr : link->out_slot, link->out_counter, link->epoch, link->sequence, stuck};
}
// A byte counts for the epoch in which it went: CTAs that saw different links do not add up to a message.
__device__ __forceinline__ int weigh(uint64_t bytes, uint64_t epoch) {
  return static_cast<int>(static_cast<uint32_t>(bytes * (2 * epoch + 1)));
}

__device__ __forceinline__ void push_row(const PushArgs& p, const Going* going, const Pieces& pieces, int row, int index,
                                         int* wrote) {
  const int server = p.rows.to_server[row];
  if (server < 0 || server >= p.rows.servers) return;
  unsigned char* slot = going[server].slot;
  if (!slot) return;
  if ((threadIdx.x & 31) == 0) atomicAdd(&wrote[server], weigh(pieces.length(index), going[server].epoch));
  const int place = place_of(p.rows.to_server, row, server);
  if (index == 0 && (threadIdx.x & 31) == 0) {
    reinterpret_cast<int*>(slot + p.shapes.adapters_offset)[place] = p.rows.to_adapter[row];
    reinterpret_cast<int*>(slot + p.shapes.experts_offset)[place] = p.rows.to_expert[row];
  }
  const int64_t begin = pieces.begin(index);
  warp_copy(slot + p.shapes.rows_offset + place * pieces.bytes + begin, p.x + row * pieces.bytes + begin,
            pieces.length(index));
}

__device__ __forceinline__ PeerHeader header_of(const PushArgs& p, const Going& going, int rows) {
  return {0, 0, going.epoch, going.sequence + 1, *p.rows.layer, p.site, rows, kRequest, *p.rows.version,
          request_bytes(p.shapes, p.site, rows), 0};
}
// One thread a server, when all of the payload is there. Where the host brought the link while some
// CTAs were through already, it is not, and nothing goes.
__device__ __forceinline__ void push_header(const PushArgs& p, int server, const Going& going, const HeaderWords& sealed) {
  PeerLink* link = going.link;
  if (going.stuck) {
    lose(p.state, server, link);
    return;
  }
  const PeerHeader& header = sealed.header;
  link->under_way = header.rows, link->site = header.site, link->layer = header.layer, link->sequence = header.sequence;
  post(going.slot, going.counter, sealed);
  add_count(p.state, kPushes, 1);
  add_count(p.state, kBytesSent, header.num_bytes);
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS, 1024 / THREADS) push_kernel(const PushArgs p) {
  __shared__ Going going[kMostServers];
  __shared__ HeaderWords sealed[kMostServers];
  __shared__ int wrote[kMostServers];
  __shared__ int counts[kMostServers + 1];
  __shared__ int sent[kSentRows];
  const int server = threadIdx.x;
  if (server < p.rows.servers) wrote[server] = 0, going[server] = find_link(&p.state->links[server]);
  if (!may_push(p)) return;
  const uint32_t crc = crc_part();
  count_rows(p.rows, counts);
  const int64_t row_bytes = p.shapes.sites[p.site].d_in * p.shapes.itemsize;
  for (int begin = 0; begin < p.rows.live(); begin += kSentRows) {
    const int count = find_sent<THREADS>(p.rows, begin, sent);
    const Pieces pieces(row_bytes, count, grid_warps());
    for (int unit = grid_warp(); unit < count * pieces.per_row; unit += grid_warps())
      push_row(p, going, pieces, sent[unit / pieces.per_row], unit % pieces.per_row, wrote);
  }
  __syncthreads();
  if (server < p.rows.servers && wrote[server]) atomicAdd(&p.state->written[server], wrote[server]);
  const auto prepare = [&] {
    for (int i = 0; i < p.rows.servers; ++i)
      if (counts[i] && going[i].slot) seal(header_of(p, going[i], counts[i]), &sealed[i], crc);
  };
  if (!last_cta(&p.state->ticket, prepare) || server >= p.rows.servers) return;
  const int written = atomicExch(&p.state->written[server], 0);
  const Going& mine = going[server];
  const bool whole = mine.slot && written == weigh(counts[server] * row_bytes, mine.epoch);
  if (counts[server] && (whole || mine.stuck)) push_header(p, server, mine, sealed[server]);
}

struct WaitArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerRows rows;
  int site;
  int* status;  // [servers] out
  bool beside;  // a launch beside the base waits, behind the push
  unsigned char* ys[kMostOuts];
};

__device__ __forceinline__ bool accept_answer(const PeerShapes& shapes, const PeerLink& link, int rows,
                                              PeerHeader* header, uint32_t crc) {
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

// A link as a warp has read it, once: an acquire sends every later read far away.
struct Awaited {
  PeerLink* place;
  PeerLink link;
};
__device__ __forceinline__ Awaited find_awaited(PeerState* state, int server) {
  auto found = reinterpret_cast<unsigned long long>(load_link(&state->links[server]));
  auto* place = reinterpret_cast<PeerLink*>(__shfl_sync(0xffffffffu, found, 0));
  return {place, place ? *place : PeerLink{}};
}

// One warp a server with rows. Returns how the wait for it ended.
__device__ __forceinline__ int wait_for(const WaitArgs& p, int server, const Awaited& awaited, int rows, bool nowhere,
                                        bool stopped, uint64_t start, uint32_t crc) {
  PeerState* state = p.state;
  PeerLink* place = awaited.place;
  const PeerLink& link = awaited.link;
  const bool first = (threadIdx.x & 31) == 0;
  if (first) add_count(state, kWaits, 1);
  if (nowhere || !place || link.lost || link.under_way != rows || link.site != p.site) {
    if (!first) return kAborted;
    if (link.under_way) lose(state, server, place);  // not if it joined between push and wait
    add_count(state, kCountAborted, 1);
    return kAborted;
  }
  int status = stopped ? kAborted : kArrived;
  PeerHeader header{};
  for (uint64_t want = link.sequence, arrivals; status == kArrived; want = arrivals + 1) {
    status = __shfl_sync(0xffffffffu, first ? spin(state, server, link, want, start, &arrivals) : 0, 0);
    if (status != kArrived || accept_answer(p.shapes, link, rows, &header, crc)) break;
    if (first) add_count(state, kDropped, 1);
  }
  if (first && status != kArrived) return fail(state, server, place, status);
  if (!first || status != kArrived) return status;
  place->under_way = 0;
  state->answers[server] = link.in_slot;
  if (header.kind == kResponse) return kArrived;
  add_count(state, kCountRefused, 1);
  return kRefused;
}

__device__ __forceinline__ void count_wait(PeerState* state, uint64_t nanos, bool well) {
  int length = 0;
  while (length < kLengths - 1 && nanos >> (length + 1)) ++length;
  add_count(state, kWaitNanos, nanos);
  if (well) add_count(state, kCounts + length, 1);
  if (nanos > state->counts[kLongestWait]) state->counts[kLongestWait] = nanos;
}

// One CTA decides for all: unless every server answered, the sum leaves all y alone.
__device__ __forceinline__ bool decide(const WaitArgs& p) {
  __shared__ int counts[kMostServers + 1];
  __shared__ int failed[1];
  const uint64_t start = now_nanos();
  const int warp = threadIdx.x / 32;
  const bool stopped = p.state->stopped;
  Awaited awaited = warp < p.rows.servers ? find_awaited(p.state, warp) : Awaited{};
  const uint32_t crc = crc_part();
  if (threadIdx.x == 0) failed[0] = 0;
  count_rows(p.rows, counts);
  const bool nowhere = counts[p.rows.servers] > 0;
  int any = nowhere;
  for (int i = 0; i < p.rows.servers; ++i) any |= counts[i];
  for (int server = warp; server < p.rows.servers; server += blockDim.x / 32) {
    if (server > warp) awaited = find_awaited(p.state, server);
    int status = kArrived;
    if (counts[server]) status = wait_for(p, server, awaited, counts[server], nowhere, stopped, start, crc);
    if (nowhere) status = kAborted;
    if (threadIdx.x & 31) continue;
    p.status[server] = status;
    if (status != kArrived) atomicAdd(&failed[0], 1);
  }
  __syncthreads();
  const bool go = any && !failed[0];
  if (threadIdx.x == 0) {
    store_release(&p.state->decision, go ? kGo : kLeaveAlone);
    if (any) count_wait(p.state, now_nanos() - start, !failed[0]);
  }
  return go;
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

// Some columns of a row of an output, and what is to be added to them.
template <class Y, class D>
struct Part {
  Y* y;
  int64_t at, columns;  // of the answer's output
  int server;
  __device__ Part(const WaitArgs& p, int k, int row, const Pieces& pieces, int index) {
    const int64_t width = p.shapes.sites[p.site].widths[k], first = pieces.begin(index) / sizeof(Y);
    server = p.rows.to_server[row], columns = pieces.length(index) / sizeof(Y);
    y = reinterpret_cast<Y*>(p.ys[k]) + row * width + first;
    at = place_of(p.rows.to_server, row, server) * width + first;
  }
  __device__ const D* delta(const WaitArgs& p, int k, const unsigned char* slot) const {
    return reinterpret_cast<const D*>(slot + p.shapes.sites[p.site].offsets[k]) + at;
  }
};

// Calls `use(k, row, pieces, index)` with this warp's parts of the rows of all outputs.
template <class Y, class Use>
__device__ __forceinline__ void for_parts(const WaitArgs& p, const int* sent, int count, const Use& use) {
  const PeerSite& site = p.shapes.sites[p.site];
  const int outs = static_cast<int>(site.num_outs);
  int unit = grid_warp();  // of all outputs, one behind the other
  for (int k = 0; k < outs; ++k) {
    const Pieces pieces(site.widths[k] * sizeof(Y), count * outs, grid_warps());
    const int units = count * pieces.per_row;
    for (; unit < units; unit += grid_warps()) use(k, sent[unit / pieces.per_row], pieces, unit % pieces.per_row);
    unit -= units;
  }
}

template <class Y, class D>
__device__ __forceinline__ void add_part(const WaitArgs& p, int k, int row, const Pieces& pieces, int index) {
  const Part<Y, D> part(p, k, row, pieces, index);
  const D* delta = part.delta(p, k, p.state->answers[part.server]);
  const uint64_t off = reinterpret_cast<uint64_t>(part.y) % (8 * sizeof(Y)) + reinterpret_cast<uint64_t>(delta) % (8 * sizeof(D));
  if (off == 0 && part.columns % 8 == 0) {
    add_columns<Y, D, 8>(part.y, delta, part.columns);
  } else {
    add_columns<Y, D, 1>(part.y, delta, part.columns);
  }
}

// Waits beside the base, so that all is known when that ends.
__global__ void __launch_bounds__(kAwaitThreads) await_kernel(const WaitArgs p) { decide(p); }

// The first CTA waits; the others have found their rows when it is through. Where another launch waits,
// nothing is read before it is: it was behind the push, and what that read is there.
template <class Y, class D>
__global__ void __launch_bounds__(kPeerThreads, 1) wait_add_kernel(const WaitArgs p) {
  __shared__ int sent[kSentRows];
  const bool decides = !p.beside && blockIdx.x == 0;
  Told told{};
  if (p.beside) told = await_decision(p.state);
  if (decides) told.go = decide(p);
  const int rows = p.rows.live();
  int count = find_sent<kPeerThreads>(p.rows, 0, sent);
  if (p.beside) wait_for_previous();
  if (!p.beside && !decides) told = await_decision(p.state);
  for (int begin = 0; told.go && begin < rows;) {
    for_parts<Y>(p, sent, count, [&](int k, int row, const Pieces& pieces, int index) {
      add_part<Y, D>(p, k, row, pieces, index);
    });
    begin += kSentRows;
    if (begin < rows) count = find_sent<kPeerThreads>(p.rows, begin, sent);
  }
  if (p.beside && blockIdx.x == 0 && threadIdx.x < p.rows.servers) p.status[threadIdx.x] = p.state->statuses[threadIdx.x];
  if (!decides) forget(p.state, told, p.beside ? gridDim.x : gridDim.x - 1);
}

inline cudaError_t launch_push(const PushArgs& args, cudaStream_t stream) {
  const auto kernel = push_kernel<kPeerThreads>;
  kernel<<<kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_push_aside(const PushArgs& args, cudaStream_t stream) {
  const auto kernel = push_kernel<kAsideThreads>;
  kernel<<<kAsideCtas, kAsideThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
// The wait that a launch of wait_add with `beside` relies on.
inline cudaError_t launch_await(WaitArgs args, cudaStream_t stream) {
  args.status = args.state->statuses;
  await_kernel<<<1, kAwaitThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
template <class Y, class D>
cudaError_t launch_wait_add_of(const WaitArgs& args, cudaStream_t stream) {
  const auto kernel = wait_add_kernel<Y, D>;
  if (args.beside) return launch_early(kernel, 2 * kPeerCtas, kPeerThreads, 0, stream, args);
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
