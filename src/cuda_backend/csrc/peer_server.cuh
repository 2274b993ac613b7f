// A server rank's kernels: the next message of any client, its rows, and the results back.
#pragma once
#include "peer_copy.cuh"
#include "peer_header.cuh"

namespace lora_jax {

// What receiving says of a message, int32 each: in this order.
enum PeerInfo : int { kClient, kSite, kLayer, kRows, kVersion, kInfoWords = 8 };
constexpr int kNobody = -1;

struct ReceiveArgs {
  PeerState* state;
  PeerShapes shapes;
  int* info;                // [kInfoWords] out; client kNobody when time is up or the host says so
  int *adapters, *experts;  // [max_rows] out, or none; -1 and 0 behind the real rows
  uint64_t limit;           // nanoseconds; 0: look once
  const int* limit_us;      // or microseconds, as data
  int site;                 // messages of this one only, until one of another waits; kAnySite
};
constexpr int kAnySite = -1;

__device__ __forceinline__ bool accept_request(const PeerShapes& s, const PeerLink& link, uint64_t arrivals,
                                               PeerHeader* header, const int* crc) {
  if (!read_header(link.in_slot, header, crc)) return false;
  return header->epoch == link.epoch && header->sequence == arrivals && header->kind == kRequest &&
         header->layer >= 0 && header->layer < s.layers && header->site >= 0 && header->site < s.num_sites &&
         header->rows >= 1 && header->rows <= s.max_rows &&
         header->num_bytes == request_bytes(s, header->site, header->rows);
}

// Takes what has arrived from one client, if it is a message.
__device__ __forceinline__ bool take(const ReceiveArgs& p, int client, PeerLink* link, const int* crc) {
  const uint64_t arrivals = load_acquire_sys(link->in_counter);
  const bool newer = arrivals > link->sequence;
  link->sequence = arrivals;
  PeerHeader header;
  if (!newer || !accept_request(p.shapes, *link, arrivals, &header, crc)) {
    atomicAdd(&p.state->counts[kDropped], 1ull);
    return false;
  }
  link->request = header, link->under_way = 1, p.state->current = link;
  p.info[kClient] = client, p.info[kSite] = header.site, p.info[kLayer] = header.layer, p.info[kRows] = header.rows;
  p.info[kVersion] = static_cast<int>(min(header.table_version, static_cast<int64_t>(0x7fffffff)));
  p.state->served = client + 1;
  return true;
}

// Whether a message that has arrived is one to take; what is no message is taken too, and dropped.
__device__ __forceinline__ bool is_wanted(const ReceiveArgs& p, const PeerLink* link) {
  if (p.site == kAnySite) return true;
  const int site = __ldcv(reinterpret_cast<const int*>(link->in_slot + offsetof(PeerHeader, site)));
  return site == p.site || site < 0 || site >= p.shapes.num_sites;
}

// A lane a client: looks at all of them, beginning behind the one that was served last.
__device__ __forceinline__ void find_message(const ReceiveArgs& p, const int* crc) {
  const int lane = threadIdx.x, first = p.state->served;
  const uint64_t start = now_nanos(), limit = p.limit_us ? max(*p.limit_us, 0) * 1000ull : p.limit;
  // What the host changes, one lane reads for all.
  if (__shfl_sync(0xffffffffu, static_cast<int>(load_acquire_sys(&p.state->stopped)), 0)) return;
  for (unsigned polls = 1;; ++polls) {
    PeerLink* link = load_link(&p.state->links[lane]);
    const bool arrived = link && poll_acquire_sys(link->in_counter) != link->sequence;
    // The first in turn; behind all clients those whose message is of another site.
    int turn = 2 * kMostClients;
    if (arrived) turn = ((lane - first) & (kMostClients - 1)) + (is_wanted(p, link) ? 0 : kMostClients);
    for (int step = 16; step; step /= 2) turn = min(turn, __shfl_xor_sync(0xffffffffu, turn, step));
    if (turn >= kMostClients && turn < 2 * kMostClients) return;
    int done = 0;
    if (turn < kMostClients) {
      const int client = (turn + first) & (kMostClients - 1);
      if (lane == client) done = take(p, client, link, crc);
      done = __shfl_sync(0xffffffffu, done, client);
      if (done) return;
    }
    if (polls % 32 && limit) continue;
    if (lane == 0) done = load_acquire_sys(&p.state->control->abort) || now_nanos() - start >= limit;
    if (__shfl_sync(0xffffffffu, done, 0)) return;
  }
}

__global__ void __launch_bounds__(kPeerThreads) receive_kernel(const ReceiveArgs p) {
  __shared__ int crc[kCrcWords];
  bring_crc(crc);
  if (threadIdx.x < kInfoWords) p.info[threadIdx.x] = threadIdx.x == kClient || threadIdx.x == kSite ? kNobody : 0;
  if (threadIdx.x == 0) p.state->current = nullptr;
  __syncthreads();
  if (threadIdx.x < 32) find_message(p, crc);
  __syncthreads();
  if (!p.adapters) return;
  const PeerLink* link = p.state->current;
  const unsigned char* slot = link ? link->in_slot : nullptr;
  const int rows = link ? link->request.rows : 0;
  for (int i = threadIdx.x; i < p.shapes.max_rows; i += blockDim.x) {
    p.adapters[i] = i < rows ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.adapters_offset) + i) : -1;
    p.experts[i] = i < rows ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.experts_offset) + i) : 0;
  }
}

struct FetchArgs {
  const PeerState* state;
  PeerShapes shapes;
  unsigned char* x;  // [rows, d_in] of the site
  int rows, site;
};

// The rows as an array of the device, for ops that are compiled for a shape; of another site: none.
__global__ void __launch_bounds__(kPeerThreads) fetch_kernel(const FetchArgs p) {
  const PeerLink* link = p.state->current;
  if (!link || link->request.site != p.site) return;
  const int rows = min(link->request.rows, p.rows);
  const Pieces pieces(p.shapes.sites[p.site].d_in * p.shapes.itemsize, rows);
  for (int unit = grid_warp(); unit < rows * pieces.per_row; unit += grid_warps()) {
    const int row = unit / pieces.per_row, index = unit % pieces.per_row;
    const int64_t at = row * pieces.bytes + pieces.begin(index);
    warp_copy(p.x + at, link->in_slot + p.shapes.rows_offset + at, pieces.length(index));
  }
}

// What to do with a message.
enum PeerVerdict : int { kRefuse, kAnswer, kLeave };

struct RespondArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerLink* link;  // to whom; none: whose message was received last
  const int* verdict;
  const unsigned char* deltas[kMostOuts];  // [rows or more, width] each
  int site;  // messages of other sites are none of this launch's business
};

__device__ __forceinline__ PeerLink* link_of_request(const RespondArgs& p) {
  PeerLink* link = p.link ? p.link : p.state->current;
  return link && link->under_way && link->request.site == p.site && *p.verdict != kLeave ? link : nullptr;
}

__global__ void __launch_bounds__(kPeerThreads, 1) respond_kernel(const RespondArgs p) {
  __shared__ int crc[kCrcWords];
  PeerLink* link = link_of_request(p);
  if (!link) return;
  bring_crc(crc);
  const PeerSite& site = p.shapes.sites[p.site];
  const bool well = *p.verdict == kAnswer;
  const int rows = well ? link->request.rows : 0;
  for (int k = 0; k < site.num_outs; ++k) {
    const Pieces pieces(site.widths[k] * p.shapes.delta_itemsize, rows);
    for (int unit = grid_warp(); unit < rows * pieces.per_row; unit += grid_warps()) {
      const int row = unit / pieces.per_row, index = unit % pieces.per_row;
      const int64_t at = row * pieces.bytes + pieces.begin(index);
      warp_copy(link->out_slot + site.offsets[k] + at, p.deltas[k] + at, pieces.length(index));
    }
  }
  if (!last_cta(p.link ? &p.state->host_ticket : &p.state->ticket) || threadIdx.x) return;
  PeerHeader answer = link->request;
  answer.rows = rows, answer.kind = well ? kResponse : kRefusal;
  answer.num_bytes = well ? response_bytes(p.shapes, p.site, rows) : 0;
  link->under_way = 0;
  post(link->out_slot, link->out_counter, answer, crc);
}

inline cudaError_t launch_receive(const ReceiveArgs& args, cudaStream_t stream) {
  receive_kernel<<<1, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_fetch(const FetchArgs& args, cudaStream_t stream) {
  fetch_kernel<<<kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_respond(const RespondArgs& args, cudaStream_t stream) {
  respond_kernel<<<2 * kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
