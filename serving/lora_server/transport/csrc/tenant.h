// One adapter in a process of its own: rows come, its deltas go, and its matrices stay here.
#pragma once
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "server.h"

namespace transport {

// lora_jax_lora_rows of the CPU kernels: those that an engine's own slots are computed by.
using LoraRows = int32_t (*)(int32_t, const void*, const void*, const void*, const int32_t*, float,
                             const int32_t*, const int32_t*, float*, const int64_t*);

// What the adapter adds to one output of one site in one layer; rank 0: nothing.
struct TenantMap {
  const void *a, *b;  // [experts or 1, rank, d_in], [experts or 1, rank, d_out]
  int64_t a_rows, b_rows;
  int32_t rank, a_stride, b_stride;  // strides in rows from expert to expert
  float scaling;
};
static_assert(sizeof(TenantMap) == 48);

// A tenant shares its cores with the engine that it answers, so it sleeps at once: eight that yield
// would take most of the time of two cores.
constexpr Patience kTenant{0, 50'000'000, 0};
constexpr uint64_t kLookNanos = 1'000'000'000;

class Tenant {
 public:
  // `maps` is [layers][outputs of all sites, in order].
  Tenant(std::shared_ptr<Server> server, const TenantMap* maps, LoraRows rows)
      : server_(std::move(server)), rows_(rows), slots_(server_->shapes.max_rows, 0) {
    for (const Site& site : server_->shapes.sites) {
      first_.push_back(outputs_);
      outputs_ += int64_t(site.d_outs.size());
    }
    maps_.assign(maps, maps + server_->shapes.layers * outputs_);
  }

  // Answers until the server is aborted; returns how many messages it answered.
  int64_t run() {
    int64_t answered = 0;
    while (!server_->aborted()) {
      Header header;
      int64_t client = server_->receive(kLookNanos, &header, kTenant);
      if (client < 0) continue;
      std::shared_ptr<Seat> seat = server_->seat(client);
      if (!seat) continue;
      header.kind = compute(*seat, header) ? kResponse : kRefusal;
      if (header.kind == kRefusal) header.rows = 0;
      answered += server_->answer(client, header, nullptr);
    }
    return answered;
  }

 private:
  bool compute(const Seat& seat, const Header& header) {
    const Shapes& shapes = server_->shapes;
    const Site& site = shapes.sites[header.site];
    const char* request = seat.request_slot();
    char* response = seat.response_slot(shapes);
    const int32_t* asked = reinterpret_cast<const int32_t*>(request + shapes.experts_offset);
    experts_.assign(asked, asked + header.rows);  // checked and used as they are now
    int32_t most = 0;
    for (int32_t& expert : experts_) {
      if (expert < 0) return false;
      most = std::max(most, expert);
    }
    for (size_t k = 0; k < site.d_outs.size(); ++k) {
      float* out = reinterpret_cast<float*>(response + site.offsets[k]);
      std::memset(out, 0, size_t(header.rows * site.d_outs[k]) * sizeof(float));
      const TenantMap& map = maps_[header.layer * outputs_ + first_[header.site] + k];
      if (map.rank <= 0) continue;
      if ((int64_t(most) * map.a_stride) + map.rank > map.a_rows) return false;
      int32_t entry[5] = {0, 0, map.rank, map.a_stride, map.b_stride};
      int64_t sizes[5] = {header.rows, site.d_in, site.d_outs[k], map.a_rows, map.b_rows};
      if (!rows_(shapes.itemsize == 2, request + shapes.rows_offset, map.a, map.b, entry,
                 map.scaling, slots_.data(), experts_.data(), out, sizes))
        return false;
    }
    return true;
  }

  const std::shared_ptr<Server> server_;
  const LoraRows rows_;
  std::vector<TenantMap> maps_;
  std::vector<int64_t> first_;
  int64_t outputs_ = 0;
  std::vector<int32_t> slots_, experts_;
};

}  // namespace transport
