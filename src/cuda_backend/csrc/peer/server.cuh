// A server rank's kernels: find the next message of any client, read its rows, write back the results.
#pragma once
#include "peer/copy.cuh"
#include "peer/header.cuh"

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
  unsigned char* x;         // [most_rows, d_in] of the site out, or none
};
constexpr int kAnySite = -1;
constexpr int kReceiveThreads = 256;  // as many as may keep what a lane knows of a client in registers

__device__ __forceinline__ bool accept_request(const PeerShapes& s, const PeerLink& link, uint64_t arrivals,
                                               const PeerHeader& header) {
  return arrivals > link.sequence && header.epoch == link.epoch && header.sequence == arrivals &&
         header.kind == kRequest && header.layer >= 0 && header.layer < s.layers && header.site >= 0 &&
         header.site < s.num_sites && header.rows >= 1 && header.rows <= s.max_rows &&
         header.num_bytes == request_bytes(s, header.site, header.rows);
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
__device__ __forceinline__ bool take_messages(const ReceiveArgs& p, Watched* watched, int first, uint32_t crc) {
  const int lane = threadIdx.x;
  PeerLink* link = watched->link;
  const uint64_t arrivals = link ? poll_acquire_sys(watched->counter) : 0;
  const bool arrived = link && arrivals != watched->sequence;
  const unsigned waiting = __ballot_sync(0xffffffffu, arrived);
  if (!waiting) return false;
  PeerHeader header{};
  bool good = false;
  for (unsigned left = waiting; left; left &= left - 1) {  // the whole warp reads each
    const int client = __ffs(left) - 1;
    const auto slot = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(arrived ? link->in_slot : nullptr), client);
    PeerHeader found;
    const bool whole = read_header(reinterpret_cast<const unsigned char*>(slot), &found, crc);
    if (lane == client) header = found, good = whole && accept_request(p.shapes, *link, arrivals, found);
  }
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

__device__ __forceinline__ void find_messages(const ReceiveArgs& p, uint32_t crc) {
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

// Finds messages for all CTAs of the launch.
__device__ __forceinline__ void receive(const ReceiveArgs& p) {
  const uint32_t crc = crc_part();
  for (int i = threadIdx.x; i < p.most * kInfoWords; i += blockDim.x)
    p.info[i] = i % kInfoWords == kClient || i % kInfoWords == kSite ? kNobody : 0;
  PeerBatch& batch = p.state->batch;
  if (threadIdx.x == 0) batch.count = batch.starts[0] = 0, batch.site = kNobody;
  __syncthreads();
  if (threadIdx.x < 32) find_messages(p, crc);
  __syncthreads();
  if (p.x && threadIdx.x == 0) store_release(&p.state->decision, batch.count ? kGo : kLeaveAlone);
}

// The batch as one CTA reads it, together.
struct NearBatch {
  const unsigned char* slots[kMostTogether];
  int starts[kMostTogether + 1], count, site;
  __device__ int rows() const { return starts[count]; }
  __device__ int message_of(int row) const {
    int m = 0;
    while (row >= starts[m + 1]) ++m;
    return m;
  }
};
__device__ __forceinline__ void bring_batch(const PeerBatch& batch, NearBatch* near) {
  const int i = threadIdx.x;
  if (i < kMostTogether) near->slots[i] = batch.slots[i];
  if (i <= kMostTogether) near->starts[i] = batch.starts[i];
  if (i == 0) near->count = batch.count, near->site = batch.site;
  __syncthreads();
}

__device__ __forceinline__ void list_rows(const ReceiveArgs& p, const NearBatch& batch) {
  for (int i = threadIdx.x; i < p.most_rows; i += blockDim.x) {
    const int message = i < batch.rows() ? batch.message_of(i) : -1;
    const unsigned char* slot = message < 0 ? nullptr : batch.slots[message];
    const int row = message < 0 ? 0 : i - batch.starts[message];
    p.adapters[i] = slot ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.adapters_offset) + row) : -1;
    p.experts[i] = slot ? __ldcg(reinterpret_cast<const int*>(slot + p.shapes.experts_offset) + row) : 0;
    p.messages[i] = message;
  }
}

// The rows as an array of the device, for ops that are compiled for a shape; by the warps from `warp` on.
__device__ __forceinline__ void copy_rows(const ReceiveArgs& p, const NearBatch& batch, int warp, int warps) {
  const int rows = min(batch.rows(), p.most_rows);
  const Pieces pieces(p.shapes.sites[p.site].d_in * p.shapes.itemsize, rows, warps);
  for (int unit = warp; unit < rows * pieces.per_row; unit += warps) {
    const int row = unit / pieces.per_row, index = unit % pieces.per_row, message = batch.message_of(row);
    const unsigned char* from = batch.slots[message] + p.shapes.rows_offset + (row - batch.starts[message]) * pieces.bytes;
    warp_copy(p.x + row * pieces.bytes + pieces.begin(index), from + pieces.begin(index), pieces.length(index));
  }
}

// The first CTA finds the messages, and says of whom their rows are; the others bring the rows, if asked to.
__global__ void __launch_bounds__(kReceiveThreads) receive_kernel(const ReceiveArgs p) {
  __shared__ NearBatch near[1];
  const NearBatch& batch = near[0];
  constexpr int kWarps = kReceiveThreads / 32;
  if (blockIdx.x == 0) {
    receive(p);
    bring_batch(p.state->batch, near);
    if (p.adapters) list_rows(p, batch);
    return;
  }
  const Told told = await_decision(p.state);
  if (told.go) {
    bring_batch(p.state->batch, near);
    copy_rows(p, batch, grid_warp() - kWarps, grid_warps() - kWarps);
  }
  forget(p.state, told, gridDim.x - 1);
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

// A message to answer, as a CTA has read it: of the batch, or the one that the host names.
struct Answer {
  PeerLink* link;
  unsigned char* slot;
  uint64_t* counter;
  int start;
  bool due, well;
};
// All of them, a thread each. Returns how many; their rows end where the next one's begin.
__device__ __forceinline__ int find_answers(const RespondArgs& p, Answer* answers) {
  const PeerBatch& batch = p.state->batch;
  const int m = threadIdx.x, count = p.link ? 1 : batch.count, site = p.link ? p.link->request.site : batch.site;
  if (m <= kMostTogether) answers[m].start = p.link ? m * p.link->request.rows : batch.starts[m];
  if (m < count) {
    Answer& answer = answers[m];
    PeerLink* link = answer.link = p.link ? p.link : batch.links[m];
    const int verdict = p.verdicts[m];
    answer.slot = link->out_slot, answer.counter = link->out_counter;
    answer.due = link->under_way && verdict != kLeave, answer.well = verdict == kAnswer;
  }
  __syncthreads();
  return site == p.site ? count : 0;
}
__device__ __forceinline__ PeerHeader header_of(const RespondArgs& p, const Answer& answer) {
  PeerHeader header = answer.link->request;
  header.kind = answer.well ? kResponse : kRefusal;
  if (!answer.well) header.rows = 0;
  header.num_bytes = response_bytes(p.shapes, p.site, header.rows);
  return header;
}

__global__ void __launch_bounds__(kPeerThreads, 1) respond_kernel(const RespondArgs p) {
  __shared__ Answer answers[kMostTogether + 1];
  __shared__ HeaderWords sealed[kMostTogether];
  const int count = find_answers(p, answers);
  if (!count) return;
  const uint32_t crc = crc_part();
  const PeerSite& site = p.shapes.sites[p.site];
  const int rows = answers[count].start, outs = static_cast<int>(site.num_outs);
  int unit = grid_warp();  // of all outputs, one behind the other
  for (int k = 0; k < outs; ++k) {
    const Pieces pieces(site.widths[k] * p.shapes.delta_itemsize, rows * outs, grid_warps());
    const int units = rows * pieces.per_row;
    for (; unit < units; unit += grid_warps()) {
      const int row = unit / pieces.per_row, index = unit % pieces.per_row;
      int m = 0;
      while (row >= answers[m + 1].start) ++m;
      const Answer& answer = answers[m];
      if (!answer.well || !answer.due) continue;
      unsigned char* to = answer.slot + site.offsets[k] + (row - answer.start) * pieces.bytes;
      warp_copy(to + pieces.begin(index), p.deltas[k] + row * pieces.bytes + pieces.begin(index), pieces.length(index));
    }
    unit -= units;
  }
  const auto prepare = [&] {
    for (int m = 0; m < count; ++m)
      if (answers[m].due) seal(header_of(p, answers[m]), &sealed[m], crc);
  };
  const int message = threadIdx.x;
  if (!last_cta(p.link ? &p.state->host_ticket : &p.state->ticket, prepare)) return;
  if (message >= count || !answers[message].due) return;
  answers[message].link->under_way = 0;
  post(answers[message].slot, answers[message].counter, sealed[message]);
}

inline cudaError_t launch_receive(const ReceiveArgs& args, cudaStream_t stream) {
  receive_kernel<<<args.x ? 2 * kPeerCtas : 1, kReceiveThreads, 0, stream>>>(args);
  return cudaGetLastError();
}
inline cudaError_t launch_respond(const RespondArgs& args, cudaStream_t stream) {
  respond_kernel<<<2 * kPeerCtas, kPeerThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace lora_jax
