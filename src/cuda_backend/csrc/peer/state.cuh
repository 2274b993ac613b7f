// State of both endpoints of a device-memory transport: slots, counters and the header of a message.
//
// A channel is one client and one server. Its slots and counters lie in memory that both devices
// have mapped; a payload is written by its sender's kernel over NVLink, then the header, then the
// counter, which the receiver's kernel polls in its own memory. All that changes from message to
// message (sequences, what is under way, who is lost) lives here, in device memory, and is stepped
// by the kernels: launches carry addresses only, so a CUDA graph of them can be replayed.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace lora_jax {

constexpr int kMostServers = 32, kMostClients = 32, kMostSites = 4, kMostOuts = 4;
constexpr int kMostTogether = 8;  // messages that a server takes in one launch
constexpr int kCounts = 9, kLengths = 64;

enum PeerStatus : int { kArrived = 0, kTimedOut = 1, kAborted = 2, kRefused = 3 };
enum PeerKind : int { kRequest = 1, kResponse = 2, kRefusal = 3 };
enum PeerCount : int {
  kPushes, kBytesSent, kWaits, kCountTimedOut, kCountAborted, kCountRefused, kDropped, kWaitNanos, kLongestWait
};

enum PeerDecision : uint64_t { kUndecided, kGo, kLeaveAlone };

struct PeerHeader {  // as serving/lora_server/transport/header.py packs it
  uint32_t magic, checksum;
  uint64_t epoch, sequence;
  int32_t layer, site, rows, kind;
  int64_t table_version;
  uint64_t num_bytes, reserved;
};
static_assert(sizeof(PeerHeader) == 64);

struct PeerSite {
  int64_t d_in;
  int64_t num_outs;
  int64_t widths[kMostOuts], offsets[kMostOuts];
};
struct PeerShapes {  // as serving/lora_server/transport/shapes.py counts them
  int64_t layers, max_rows, itemsize, delta_itemsize;
  int64_t adapters_offset, experts_offset, rows_offset;
  int64_t num_sites;
  PeerSite sites[kMostSites];
};

// The numbers of serving.lora_server.transport.library.numbers().
inline bool read_shapes(const int64_t* numbers, PeerShapes* s) {
  int64_t *fields[] = {&s->layers, &s->max_rows, &s->itemsize, &s->delta_itemsize, &s->adapters_offset,
                       &s->experts_offset, &s->rows_offset};
  for (int64_t* field : fields) *field = *numbers++;
  numbers += 2;  // bytes of the slots
  s->num_sites = *numbers++;
  if (s->num_sites > kMostSites) return false;
  for (int64_t i = 0; i < s->num_sites; ++i) {
    PeerSite& site = s->sites[i];
    site.d_in = *numbers++, site.num_outs = *numbers++;
    if (site.num_outs > kMostOuts) return false;
    for (int64_t k = 0; k < site.num_outs; ++k) site.widths[k] = *numbers++, site.offsets[k] = *numbers++;
  }
  return true;
}

// One join of a client to a server, in the device memory of either of them. Pushing, `out` is the
// peer's memory and `in` the own; where messages are pulled the slots, not the counters, change places.
struct PeerLink {
  unsigned char* out_slot;
  uint64_t* out_counter;
  const unsigned char* in_slot;
  const uint64_t* in_counter;
  uint64_t epoch;
  uint64_t sequence;  // client: of the last push; server: of the arrivals seen
  int32_t under_way;  // client: rows pushed and not waited for; server: 1 while a request is unanswered
  int32_t site, layer, lost;
  PeerHeader request;  // server: of the request under way
};
static_assert(sizeof(PeerLink) == 128);

// In the host's memory, mapped: what the host says to a kernel that spins, and hears from one.
struct PeerControl {
  uint64_t abort, limit_nanos;
  uint64_t gone[kMostServers];  // by the host: this epoch of the server has ended
  uint64_t lost[kMostServers];  // by the kernels: so it has for them
};

// The messages that a server took last, all of one site: their rows lie one behind the other.
struct PeerBatch {
  PeerLink* links[kMostTogether];
  const unsigned char* slots[kMostTogether];
  int32_t starts[kMostTogether + 1];  // rows of message m are those from starts[m] on
  int32_t count, site;
  __device__ int rows() const { return starts[count]; }
  __device__ int message_of(int row) const {
    int m = 0;
    while (row >= starts[m + 1]) ++m;
    return m;
  }
};

struct PeerState {  // of one client or one server rank, in its device's memory
  PeerControl* control;
  uint64_t stopped;  // as control->abort, for kernels that have not begun to spin
  // The host puts links here and takes them away while kernels run: a kernel of several CTAs goes by
  // `written` or by what a kernel of one CTA found.
  PeerLink* links[kMostServers];
  const unsigned char* answers[kMostServers];  // client: the slots to add, found by the wait
  PeerBatch batch;  // server: count 0: there is none
  unsigned long long counts[kCounts + kLengths];
  uint64_t decision;               // of the wait under way, for all CTAs that add
  int32_t statuses[kMostServers];  // client: of a wait beside the base
  int32_t written[kMostServers];   // client: of the push under way, bytes as their epoch weighs them
  int32_t ticket, knowing, served;
  int32_t host_ticket;  // server: of answers that the host sends, beside a program that waits
};
static_assert(kMostServers == kMostClients);

}  // namespace lora_jax
