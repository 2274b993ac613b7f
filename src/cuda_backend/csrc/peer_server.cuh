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
  int* info;                // [most, kInfoWords] out; client kNobody behind the messages that were taken
  int most, most_rows;      // messages and rows at once; a message alone always fits
  int *adapters, *experts;  // [most_rows] out, or none; -1 and 0 behind the real rows
  int* messages;            // [most_rows] out: which of the messages a row is of; -1 behind them
  uint64_t limit;           // nanoseconds; 0: look once
  const int* limit_us;      // or microseconds, as data
  int site;                 // messages of this one only, until one of another waits; kAnySite
};
constexpr int kAnySite = -1;

__device__ __forceinline__ bool accept_request(const PeerShapes& s, const PeerLink& link, uint64_t arrivals,
                                               PeerHeader* header, const int* crc) {
  if (arrivals <= link.sequence || !read_header(link.in_slot, header, crc)) return false;
  return header->epoch == link.epoch && header->sequence == arrivals && header->kind == kRequest &&
         header->layer >= 0 && header->layer < s.layers && header->site >= 0 && header->site < s.num_sites &&
         header->rows >= 1 && header->rows <= s.max_rows &&
         header->num_bytes == request_bytes(s, header->site, header->rows);
}

// One client's message becomes the next one of the batch, behind `rows` rows.
__device__ __forceinline__ void take(const ReceiveArgs& p, int client, PeerLink* link, const PeerHeader& header,
                                     int place, int rows) {
  PeerBatch& batch = p.state->batch;
  link->sequence = header.sequence, link->request = header, link->under_way = 1;
  batch.links[place] = link, batch.slots[place] = link->in_slot, batch.site = header.site;
  batch.starts[place + 1] = rows + header.rows, batch.count = place + 1;
  int* info = p.info + place * kInfoWords;
  info[kClient] = client, info[kSite] = header.site, info[kLayer] = header.layer, info[kRows] = header.rows;
  info[kVersion] = static_cast<int>(min(header.table_version, static_cast<int64_t>(0x7fffffff)));
  if (place == 0) p.state->served = client + 1;  // so everybody is the first one some time
}

__device__ __forceinline__ int lowest(int value) {
  for (int step = 16; step; step /= 2) value = min(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}

// A client's link as a lane has read it: whoever polls reads nothing but a counter.
struct Watched {
  PeerLink* link;
  const uint64_t* counter;
  uint64_t sequence;
};
__device__ __forceinline__ Watched watch(PeerState* state, int client) {
  PeerLink* link = load_link(&state->links[client]);
  return link ? Watched{link, link->in_counter, link->sequence} : Watched{};
}

// A lane a client: takes what is there of one site and fits, beginning behind the client that was the first
// one last time. Says whether to look no longer.
__device__ __forceinline__ bool take_messages(const ReceiveArgs& p, Watched* watched, int first, const int* crc) {
  const int lane = threadIdx.x;
  PeerLink* link = watched->link;
  const uint64_t arrivals = link ? poll_acquire_sys(watched->counter) : 0;
  const bool arrived = link && arrivals != watched->sequence;
  if (!__ballot_sync(0xffffffffu, arrived)) return false;
  PeerHeader header{};
  const bool good = arrived && accept_request(p.shapes, *link, arrivals, &header, crc);
  if (arrived && !good) {
    link->sequence = watched->sequence = arrivals;
    atomicAdd(&p.state->counts[kDropped], 1ull);
  }
  const int turn = good ? (lane - first) & (kMostClients - 1) : kMostClients;
  int site = p.site, rows = 0, next = -1;
  for (int taken = 0; taken < p.most; ++taken) {
    const bool fits = (site == kAnySite || header.site == site) && (taken == 0 || rows + header.rows <= p.most_rows);
    next = lowest(fits && turn > next ? turn : kMostClients);
    if (next == kMostClients) break;
    if (turn == next) take(p, lane, link, header, taken, rows);
    const int client = (next + first) & (kMostClients - 1);
    site = __shfl_sync(0xffffffffu, header.site, client), rows += __shfl_sync(0xffffffffu, header.rows, client);
  }
  return lowest(turn) < kMostClients;  // if of another site only, that is all
}

__device__ __forceinline__ void find_messages(const ReceiveArgs& p, const int* crc) {
  const uint64_t start = now_nanos(), limit = p.limit_us ? max(*p.limit_us, 0) * 1000ull : p.limit;
  const int first = p.state->served;
  // What the host changes, one lane reads for all.
  if (__shfl_sync(0xffffffffu, static_cast<int>(load_acquire_sys(&p.state->stopped)), 0)) return;
  Watched watched = watch(p.state, threadIdx.x);
  for (unsigned polls = 1; !take_messages(p, &watched, first, crc); ++polls) {
    if (polls % 32 && limit) continue;
    watched = watch(p.state, threadIdx.x);  // the host may have brought it, or taken it away
    int done = 0;
    if (threadIdx.x == 0) done = load_acquire_sys(&p.state->control->abort) || now_nanos() - start >= limit;
    if (__shfl_sync(0xffffffffu, done, 0)) return;
  }
}

__global__ void __launch_bounds__(kPeerThreads) receive_kernel(const ReceiveArgs p) {
  __shared__ int crc[kCrcWords];
  bring_crc(crc);
  for (int i = threadIdx.x; i < p.most * kInfoWords; i += blockDim.x)
    p.info[i] = i % kInfoWords == kClient || i % kInfoWords == kSite ? kNobody : 0;
  PeerBatch& batch = p.state->batch;
  if (threadIdx.x == 0) batch.count = batch.starts[0] = 0, batch.site = kNobody;
  __syncthreads();
  if (threadIdx.x < 32) find_messages(p, crc);
  __syncthreads();
  if (!p.adapters) return;
  for (int i = threadIdx.x; i < p.most_rows; i += blockDim.x) {
    const int message = i < batch.rows() ? batch.message_of(i) : -1;
    const unsigned char* slot = message < 0 ? nullptr : batch.slots[message];
    const int row = message < 0 ? 0 : i - batch.starts[message];
    p.adapters[i] = slot ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.adapters_offset) + row) : -1;
    p.experts[i] = slot ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.experts_offset) + row) : 0;
    p.messages[i] = message;
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
  const PeerBatch& batch = p.state->batch;
  if (batch.site != p.site) return;
  const int rows = min(batch.rows(), p.rows);
  const Pieces pieces(p.shapes.sites[p.site].d_in * p.shapes.itemsize, rows);
  for (int unit = grid_warp(); unit < rows * pieces.per_row; unit += grid_warps()) {
    const int row = unit / pieces.per_row, index = unit % pieces.per_row, message = batch.message_of(row);
    const unsigned char* from = batch.slots[message] + p.shapes.rows_offset + (row - batch.starts[message]) * pieces.bytes;
    warp_copy(p.x + row * pieces.bytes + pieces.begin(index), from + pieces.begin(index), pieces.length(index));
  }
}

// What to do with a message.
enum PeerVerdict : int { kRefuse, kAnswer, kLeave };

struct RespondArgs {
  PeerState* state;
  PeerShapes shapes;
  PeerLink* link;  // to whom; none: to whose messages were received last
  const int* verdicts;  // of each message
  const unsigned char* deltas[kMostOuts];  // [rows or more, width] each
  int site;  // messages of other sites are none of this launch's business
};

// The messages to answer: the batch, or the one that the host names.
struct Answered {
  const RespondArgs& p;
  const PeerBatch& batch;
  __device__ explicit Answered(const RespondArgs& args) : p(args), batch(args.state->batch) {}
  __device__ int count() const { return p.link ? 1 : batch.count; }
  __device__ int site() const { return p.link ? p.link->request.site : batch.site; }
  __device__ int rows() const { return p.link ? p.link->request.rows : batch.rows(); }
  __device__ int message_of(int row) const { return p.link ? 0 : batch.message_of(row); }
  __device__ int start(int message) const { return p.link ? 0 : batch.starts[message]; }
  __device__ PeerLink* link(int message) const { return p.link ? p.link : batch.links[message]; }
  __device__ bool well(int message) const { return p.verdicts[message] == kAnswer; }
  __device__ bool due(int message) const { return link(message)->under_way && p.verdicts[message] != kLeave; }
};

__global__ void __launch_bounds__(kPeerThreads, 1) respond_kernel(const RespondArgs p) {
  __shared__ int crc[kCrcWords];
  const Answered answered(p);
  if (answered.site() != p.site) return;
  bring_crc(crc);
  const PeerSite& site = p.shapes.sites[p.site];
  const int rows = answered.rows(), outs = static_cast<int>(site.num_outs);
  int unit = grid_warp();  // of all outputs, one behind the other
  for (int k = 0; k < outs; ++k) {
    const Pieces pieces(site.widths[k] * p.shapes.delta_itemsize, rows * outs);
    const int units = rows * pieces.per_row;
    for (; unit < units; unit += grid_warps()) {
      const int row = unit / pieces.per_row, index = unit % pieces.per_row, message = answered.message_of(row);
      if (!answered.well(message) || !answered.due(message)) continue;
      unsigned char* to = answered.link(message)->out_slot + site.offsets[k];
      to += (row - answered.start(message)) * pieces.bytes;
      warp_copy(to + pieces.begin(index), p.deltas[k] + row * pieces.bytes + pieces.begin(index), pieces.length(index));
    }
    unit -= units;
  }
  if (!last_cta(p.link ? &p.state->host_ticket : &p.state->ticket)) return;
  const int message = threadIdx.x;
  if (message >= answered.count() || !answered.due(message)) return;
  PeerLink* link = answered.link(message);
  PeerHeader answer = link->request;
  answer.kind = answered.well(message) ? kResponse : kRefusal;
  if (answer.kind == kRefusal) answer.rows = 0;
  answer.num_bytes = response_bytes(p.shapes, p.site, answer.rows);
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
