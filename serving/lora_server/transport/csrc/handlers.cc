// XLA FFI entry points of the client, and the C calls by which Python drives both ends.
#include <map>
#include <vector>

#include "client.h"
#include "relay.h"
#include "server.h"
#include "tenant.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;
using S32 = ffi::Buffer<ffi::S32>;

namespace transport {

// Compiled programs and Python name an end by number, so that a stale one finds nothing.
template <class T>
class Registry {
 public:
  int64_t add(std::shared_ptr<T> item) {
    std::lock_guard<std::mutex> hold(mutex_);
    items_[++last_] = std::move(item);
    return last_;
  }
  // Items of which each device of a program takes its own; the group's number is negative.
  int64_t add_group(const int64_t* numbers, int64_t count) {
    std::lock_guard<std::mutex> hold(mutex_);
    groups_.emplace_back(numbers, numbers + count);
    return -int64_t(groups_.size());
  }
  std::shared_ptr<T> find(int64_t number, int64_t device = 0) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (number < 0) {
      if (-number > int64_t(groups_.size())) return nullptr;
      const std::vector<int64_t>& group = groups_[-number - 1];
      if (device < 0 || device >= int64_t(group.size())) return nullptr;
      number = group[device];
    }
    auto at = items_.find(number);
    return at == items_.end() ? nullptr : at->second;
  }
  void remove(int64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    items_.erase(number);
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> items_;
  std::vector<std::vector<int64_t>> groups_;  // by device; programs name them as long as they live
  int64_t last_ = 0;
};

static Registry<Client> clients;
static Registry<Server> servers;

static int64_t clamped(const S32& num_rows, int64_t rows) {
  return std::clamp<int64_t>(num_rows.typed_data()[0], 0, rows);
}

static ffi::Error Push(int32_t device, ffi::AnyBuffer x, S32 num_rows, S32 layer, S32 version, S32 to_server,
                       S32 to_adapter, S32 to_expert, ffi::Result<ffi::AnyBuffer> out,
                       int64_t number, int64_t site) {
  if (out->untyped_data() != x.untyped_data())
    std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  std::shared_ptr<Client> client = clients.find(number, device);
  if (!client) return ffi::Error::Success();  // closed: as if every server were lost
  Rows rows{clamped(num_rows, x.dimensions()[0]), client->servers(), to_server.typed_data(),
            to_adapter.typed_data(), to_expert.typed_data()};
  std::string wrong = client->push(site, layer.typed_data()[0], version.typed_data()[0], rows,
                                   static_cast<const char*>(x.untyped_data()));
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
}

static ffi::Error WaitAdd(int32_t device, S32 num_rows, S32 to_server, ffi::AnyBuffer keep,
                          ffi::RemainingArgs args, ffi::Result<S32> status,
                          ffi::RemainingRets rets, int64_t number, int64_t site) {
  std::vector<char*> ys;
  bool wide = true;
  for (size_t i = 0; i < args.size(); ++i) {
    auto y = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!y || !out) return ffi::Error::Internal("wait_add: not a buffer");
    wide = y->element_type() == ffi::F32;
    if ((*out)->untyped_data() != y->untyped_data())
      std::memcpy((*out)->untyped_data(), y->untyped_data(), y->size_bytes());
    ys.push_back(static_cast<char*>((*out)->untyped_data()));
  }
  int64_t num_servers = int64_t(status->element_count());
  Rows rows{clamped(num_rows, keep.dimensions()[0]), num_servers, to_server.typed_data(), nullptr,
            nullptr};
  std::shared_ptr<Client> client = clients.find(number, device);
  if (!client) {
    std::fill_n(status->typed_data(), num_servers, int32_t(kArrived));
    for (int64_t row = 0; row < rows.num_rows; ++row)
      if (rows.to_server[row] >= 0 && rows.to_server[row] < num_servers)
        status->typed_data()[rows.to_server[row]] = kAborted;
    return ffi::Error::Success();
  }
  std::string wrong = client->wait_add(site, rows, ys, wide, status->typed_data());
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(wrong);
}

}  // namespace transport

XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_transport_push, transport::Push,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("client")
                                  .Attr<int64_t>("site"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(lora_jax_transport_wait_add, transport::WaitAdd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<S32>()
                                  .Arg<S32>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<S32>()
                                  .RemainingRets()
                                  .Attr<int64_t>("client")
                                  .Attr<int64_t>("site"));

// Called through ctypes, which lets go of Python's lock meanwhile. Descriptors stay the caller's.
extern "C" {

using namespace transport;

void lora_jax_transport_seal(Header* header) { *header = seal(*header); }
int32_t lora_jax_transport_read(const char* data, Header* header) {
  return read_header(data, header);
}

int64_t lora_jax_transport_client_new(const int64_t* numbers, int64_t num_servers, int32_t fetch,
                                      int32_t each) {
  return clients.add(std::make_shared<Client>(numbers, num_servers, fetch != 0, each != 0));
}
int64_t lora_jax_transport_client_group(const int64_t* numbers, int64_t count) {
  return clients.add_group(numbers, count);
}
int32_t lora_jax_transport_client_attach(int64_t number, int64_t server, int32_t fd, int32_t bell,
                                         uint64_t epoch) {
  auto client = clients.find(number);
  if (!client) return 0;
  auto link = std::make_shared<Link>();
  link->memory = Mapping::open(fd, client->shapes.channel_bytes());
  link->bell_memory = Mapping::open(bell, Shapes::kPage);
  link->epoch = epoch;
  if (!link->memory || !link->bell_memory) return 0;
  client->attach(server, link);
  return 1;
}
void lora_jax_transport_client_detach(int64_t number, int64_t server, uint64_t epoch) {
  if (auto client = clients.find(number)) client->detach(server, epoch);
}
int32_t lora_jax_transport_client_ring(int64_t number, int32_t ring) {
  auto client = clients.find(number);
  auto memory = client ? Mapping::open(ring, Shapes::kPage) : nullptr;
  if (memory) client->set_ring(memory);
  return memory != nullptr;
}
int32_t lora_jax_transport_client_lost(int64_t number, int64_t server) {
  auto client = clients.find(number);
  return !client || client->lost(server);
}
void lora_jax_transport_client_limit(int64_t number, uint64_t nanos) {
  if (auto client = clients.find(number)) client->limit_nanos = nanos;
}
void lora_jax_transport_client_abort(int64_t number, int32_t on) {
  if (auto client = clients.find(number)) client->abort = on != 0;
}
void lora_jax_transport_client_counts(int64_t number, uint64_t* out) {
  auto client = clients.find(number);
  if (!client) return;
  Counts& c = client->counts;
  std::atomic<uint64_t>* all[] = {&c.pushes,  &c.bytes_sent, &c.waits,      &c.timed_out,   &c.aborted,
                                  &c.refused, &c.dropped,    &c.wait_nanos, &c.longest_wait};
  for (auto* count : all) *out++ = count->load();
  for (auto& count : c.by_length) *out++ = count.load();
}
void lora_jax_transport_client_free(int64_t number) {
  auto client = clients.find(number);
  if (!client) return;
  clients.remove(number);
  for (int64_t server = 0; server < client->servers(); ++server) client->attach(server, nullptr);
}

int64_t lora_jax_transport_server_new(const int64_t* numbers, int32_t bell) {
  auto memory = Mapping::open(bell, Shapes::kPage);
  return memory ? servers.add(std::make_shared<Server>(numbers, memory)) : 0;
}
int64_t lora_jax_transport_server_attach(int64_t number, int32_t fd, uint64_t epoch) {
  auto server = servers.find(number);
  if (!server) return 0;
  auto seat = std::make_shared<Seat>();
  seat->memory = Mapping::open(fd, server->shapes.channel_bytes());
  seat->epoch = epoch;
  return seat->memory ? server->attach(seat) : 0;
}
int32_t lora_jax_transport_server_ring(int64_t number, int32_t ring, uint64_t epoch) {
  auto server = servers.find(number);
  auto memory = server ? Mapping::open(ring, Shapes::kPage) : nullptr;
  if (memory) server->sleep_on(memory, ring_bit(epoch));
  return memory != nullptr;
}
void lora_jax_transport_server_detach(int64_t number, int64_t client) {
  if (auto server = servers.find(number)) server->detach(client);
}
int64_t lora_jax_transport_server_receive(int64_t number, uint64_t nanos, Header* header) {
  auto server = servers.find(number);
  return server ? server->receive(nanos, header) : -1;
}
int32_t lora_jax_transport_server_answer(int64_t number, int64_t client, const Header* header,
                                         const char* const* results) {
  auto server = servers.find(number);
  return server && server->answer(client, *header, results);
}
void lora_jax_transport_server_abort(int64_t number) {
  if (auto server = servers.find(number)) server->abort();
}
uint64_t lora_jax_transport_server_dropped(int64_t number) {
  auto server = servers.find(number);
  return server ? server->dropped.load() : 0;
}
void lora_jax_transport_server_free(int64_t number) {
  if (auto server = servers.find(number)) {
    server->abort();
    servers.remove(number);
  }
}

// Returns when the server is aborted, with the number of messages that were answered.
int64_t lora_jax_transport_server_tenant(int64_t number, const TenantMap* maps, void* rows) {
  auto server = servers.find(number);
  return server ? Tenant(server, maps, reinterpret_cast<LoraRows>(rows)).run() : 0;
}

// Counters by their addresses, for relays that are not written here.
uint64_t lora_jax_transport_wait(uint64_t address, uint64_t seen, uint64_t nanos) {
  Counter& counter = *reinterpret_cast<Counter*>(address);
  auto ready = [&] { return counter.value.load() != seen; };
  if (!ready() && nanos) wait_until(counter, now() + nanos, ready, [] { return false; });
  return counter.value.load();
}
void lora_jax_transport_step(uint64_t address, uint64_t value) {
  Counter& counter = *reinterpret_cast<Counter*>(address);
  counter.value.store(value);
  wake(counter);
}
void lora_jax_transport_ring(uint64_t address) {
  Counter& counter = *reinterpret_cast<Counter*>(address);
  counter.value.fetch_add(1);
  wake(counter);
}

// Runs until the socket ends, the other end of the channel being this process's.
int32_t lora_jax_transport_relay(const int64_t* numbers, int32_t socket, int32_t fd, int32_t bell,
                                 uint64_t epoch, int32_t beside_client) {
  Channel channel;
  channel.memory = Mapping::open(fd, Shapes(numbers).channel_bytes());
  channel.bell_memory = Mapping::open(bell, Shapes::kPage);
  channel.epoch = epoch;
  if (!channel.memory || !channel.bell_memory) return 0;
  Relay relay(numbers, socket, std::move(channel));
  beside_client ? relay.beside_client() : relay.beside_server();
  return 1;
}
}
