// Feeds what a hostile peer may write to every parser of serving/lora_server/transport/csrc, under sanitizers.
// fuzz_transport SEED COUNT: ends with status 0 and a line of counts, or by an abort.
#include <sys/socket.h>

#include <cinttypes>
#include <thread>

#include "fuzz_cases.h"

namespace fuzz {

struct Tally {
  uint64_t inputs = 0, accepted = 0, refused = 0;
  void count(bool accept) { ++inputs, ++(accept ? accepted : refused); }
};

// The checksum once more, bit by bit, so that the parser is not its own judge.
bool is_whole(const Header& header) {
  Header copy = header;
  copy.checksum = 0;
  unsigned char data[sizeof copy];
  std::memcpy(data, &copy, sizeof copy);
  uint32_t crc = ~0u;
  for (unsigned char byte : data) {
    crc ^= byte;
    for (int k = 0; k < 8; ++k) crc = crc & 1 ? 0xEDB88320u ^ (crc >> 1) : crc >> 1;
  }
  return header.magic == kMagic && header.reserved == 0 && header.checksum == ~crc;
}

bool is_request(const Header& h, const Shapes& s, uint64_t epoch) {
  return is_whole(h) && h.epoch == epoch && h.kind == kRequest && h.layer >= 0 &&
         h.layer < s.layers && h.site >= 0 && h.site < int64_t(s.sites.size()) && h.rows > 0 &&
         h.rows <= s.max_rows && h.num_bytes == s.request_bytes(h.site, h.rows);
}

void fuzz_headers(Random& random, Tally* tally) {
  Layout layout(random);
  Shapes shapes(layout.numbers.data());
  Header given = mutated(random, shapes, request_of(random, shapes, random.bits(), random.bits()));
  std::vector<char> slot(sizeof given);  // on the heap: a byte too many is seen
  std::memcpy(slot.data(), &given, sizeof given);
  Header read;
  bool whole = read_header(slot.data(), &read);
  CHECK(whole == is_whole(given));
  CHECK(std::memcmp(&read, &given, sizeof read) == 0);
  tally->count(whole);
}

// What a server does with a request that it took: reads its payload, answers with results.
void serve_one(Server& server, int64_t client, const Guarded& guarded, Header header) {
  const Shapes& s = server.shapes;
  const Site& site = s.sites[header.site];
  const char* slot = guarded.memory->data() + Shapes::kPage;
  size_t rows = size_t(header.rows);
  std::vector<char> ids(slot + s.adapters_offset, slot + s.adapters_offset + rows * 4);
  std::vector<char> x(slot + s.rows_offset, slot + s.rows_offset + rows * site.d_in * s.itemsize);
  std::vector<std::vector<char>> results;
  std::vector<const char*> pointers;
  for (int64_t d : site.d_outs) results.emplace_back(rows * d * s.delta_itemsize);
  for (auto& result : results) pointers.push_back(result.data());
  header.kind = kResponse;
  CHECK(server.answer(client, header, pointers.data()));
}

void fuzz_server(Random& random, Tally* tally) {
  Layout layout(random);
  Guarded guarded(layout);
  Server server(layout.numbers.data(), guarded.bell);
  auto seat = std::make_shared<Seat>();
  uint64_t epoch = random.from(1, 3), sequence = 0;
  guarded.give(seat.get(), epoch);
  int64_t client = server.attach(seat);
  for (int64_t n = random.from(1, 6); n > 0; --n) {
    Header given = mutated(random, server.shapes,
                           request_of(random, server.shapes, epoch, ++sequence));
    char* slot = seat->request_slot();
    std::memcpy(slot, &given, sizeof given);
    uint64_t arrivals = random.chance(80) ? sequence : random.any<uint64_t>({0, given.sequence,
                                                                UINT64_MAX, sequence + 2});
    bool newer = arrivals > seat->seen;
    seat->requests().value.store(arrivals);
    Header header;
    bool taken = server.receive(0, &header) == client;
    CHECK(taken == (newer && is_request(given, server.shapes, epoch) &&
                    given.sequence == arrivals));
    if (taken) serve_one(server, client, guarded, header);
    tally->count(taken);
  }
}

void fuzz_client(Random& random, Tally* tally) {
  Layout layout(random);
  Guarded guarded(layout);
  Client client(layout.numbers.data(), 1, random.chance(30), random.chance(50));
  const Shapes& s = client.shapes;
  auto link = std::make_shared<Link>();
  uint64_t epoch = random.from(1, 3);
  guarded.give(link.get(), epoch);
  client.attach(0, link);
  client.limit_nanos = 20'000;
  int64_t site = random.below(int64_t(s.sites.size())), num_rows = random.from(1, s.max_rows);
  std::vector<int32_t> to_server(num_rows, 0), ids(num_rows, 1);
  Rows rows{num_rows, 1, to_server.data(), ids.data(), ids.data()};
  std::vector<char> x(num_rows * s.sites[site].d_in * s.itemsize, 1);
  int64_t layer = random.below(s.layers);
  CHECK(client.push(site, layer, 0, rows, x.data()).empty());

  Header request;
  CHECK(read_header(link->request_slot(), &request) && is_request(request, s, epoch));
  Header right = answer_to(request, s);
  if (random.chance(10)) right.kind = kRefusal, right.rows = 0, right.num_bytes = 0, right = seal(right);
  Header given = mutated(random, s, right);
  char* slot = link->response_slot(s);
  random.fill(slot + 64, size_t(layout.response_end - 64));
  std::memcpy(slot, &given, sizeof given);
  link->responses().value.store(random.any<uint64_t>({1, 1, 1, 1, 2, UINT64_MAX}));

  bool wide = s.itemsize == 4;
  std::vector<std::vector<char>> held;
  std::vector<char*> ys;
  for (int64_t d : s.sites[site].d_outs) held.emplace_back(num_rows * d * (wide ? 4 : 2), 0);
  for (auto& y : held) ys.push_back(y.data());
  auto before = held;
  int32_t status = -1;
  CHECK(client.wait_add(site, rows, ys, wide, &status).empty());
  bool answers = is_whole(given) && given.epoch == epoch && given.sequence == 1 &&
                 given.layer == layer && given.site == site && given.kind == kResponse &&
                 given.rows == num_rows && given.num_bytes == s.response_bytes(site, num_rows);
  CHECK(status != kArrived || answers);  // a thread that was not run may miss the time limit
  if (status != kArrived) CHECK(held == before);
  tally->count(status == kArrived);
}

bool say(int socket, const void* data, size_t size) {
  return send(socket, data, size, MSG_NOSIGNAL) == ssize_t(size);
}

void fuzz_relay_of_server(Random& random, Tally* tally) {
  Layout layout(random);
  Guarded guarded(layout);
  Shapes shapes(layout.numbers.data());
  Channel channel;
  uint64_t epoch = random.from(1, 3), answered = 0;
  guarded.give(&channel, epoch);
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  std::thread relay([&] {
    Relay(layout.numbers.data(), ends[0], channel).beside_server();
    shutdown(ends[0], SHUT_RDWR);
  });
  for (uint64_t sequence = 1; sequence <= 3; ++sequence) {
    Header given = mutated(random, shapes, request_of(random, shapes, epoch, sequence));
    bool fits = is_request(given, shapes, epoch) && given.sequence > answered;
    std::vector<char> message(64 + (fits ? given.num_bytes : uint64_t(random.below(300))));
    std::memcpy(message.data(), &given, 64);
    size_t said = random.chance(85) ? message.size() : size_t(random.below(message.size()));
    bool sent = say(ends[1], message.data(), said);
    if (said < message.size()) shutdown(ends[1], SHUT_WR);  // cut off
    if (!sent || !fits || said < message.size()) break;
    while (channel.requests().value.load() != given.sequence) sched_yield();
    Header answer = answer_to(given, shapes);
    std::memcpy(channel.response_slot(shapes), &answer, 64);
    channel.responses().value.store(given.sequence);
    std::vector<char> heard(64 + answer.num_bytes);
    CHECK(recv(ends[1], heard.data(), heard.size(), MSG_WAITALL) == ssize_t(heard.size()));
    CHECK(std::memcmp(heard.data(), &answer, 64) == 0);
    answered = given.sequence;
  }
  shutdown(ends[1], SHUT_RDWR);
  relay.join();
  CHECK(channel.requests().value.load() == answered);  // nothing else reached the server
  close(ends[0]), close(ends[1]);
  tally->count(answered > 0);
}

void fuzz_relay_of_client(Random& random, Tally* tally) {
  Layout layout(random);
  Guarded guarded(layout);
  Shapes shapes(layout.numbers.data());
  Channel channel;
  uint64_t epoch = random.from(1, 3);
  guarded.give(&channel, epoch);
  int ends[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  Header request = request_of(random, shapes, epoch, 1);
  std::memcpy(channel.request_slot(), &request, 64);
  channel.requests().value.store(1);
  std::thread relay([&] {
    Relay(layout.numbers.data(), ends[0], channel).beside_client();
    shutdown(ends[0], SHUT_RDWR);
  });
  std::vector<char> heard(64 + request.num_bytes);
  CHECK(recv(ends[1], heard.data(), heard.size(), MSG_WAITALL) == ssize_t(heard.size()));
  Header right = answer_to(request, shapes);
  Header given = mutated(random, shapes, right);
  std::vector<char> message(64 + right.num_bytes);
  std::memcpy(message.data(), &given, 64);
  size_t said = random.chance(85) ? message.size() : size_t(random.below(message.size()));
  say(ends[1], message.data(), said);
  shutdown(ends[1], SHUT_WR);
  relay.join();
  bool posted = channel.responses().value.load() != 0;
  bool answers = is_whole(given) && given.epoch == epoch && given.sequence == 1 &&
                 given.site == request.site;
  if (posted) CHECK(answers && (given.kind == kRefusal || given.rows == request.rows));
  bool whole = said == message.size() && std::memcmp(&given, &right, 64) == 0;
  if (whole) CHECK(posted);
  close(ends[0]), close(ends[1]);
  tally->count(posted);
}

}  // namespace fuzz

int main(int argc, char** argv) {
  CHECK(argc == 3);
  uint64_t seed = std::strtoull(argv[1], nullptr, 10), count = std::strtoull(argv[2], nullptr, 10);
  using Target = void (*)(fuzz::Random&, fuzz::Tally*);
  struct {
    const char* name;
    Target run;
    uint64_t share;  // of 100 inputs
  } targets[] = {{"headers", fuzz::fuzz_headers, 30},
                 {"server", fuzz::fuzz_server, 40},
                 {"client", fuzz::fuzz_client, 20},
                 {"relay of a server", fuzz::fuzz_relay_of_server, 5},
                 {"relay of a client", fuzz::fuzz_relay_of_client, 5}};
  for (auto& target : targets) {
    fuzz::Tally tally;
    for (uint64_t n = 0; tally.inputs < count * target.share / 100; ++n) {
      fuzz::Random random(seed * 1'000'003 + n);
      target.run(random, &tally);
    }
    CHECK(tally.accepted > 0 && tally.refused > 0);  // both paths were taken
    std::printf("%s: %" PRIu64 " inputs, %" PRIu64 " accepted\n", target.name, tally.inputs,
                tally.accepted);
  }
  return 0;
}
