// Carries a channel's messages over a socket: one relay beside the client, one beside the server,
// each between the socket and slots of its own process. Messages alternate, so one thread does.
#pragma once
#include <cerrno>
#include <sys/socket.h>
#include <sys/uio.h>

#include <vector>

#include "channel.h"

namespace transport {

class Relay {
 public:
  Relay(const int64_t* numbers, int socket, Channel channel)
      : shapes_(numbers), socket_(socket), channel_(std::move(channel)) {}

  // Requests to the socket, what comes back to the response slot; returns when the socket ends.
  void beside_client() {
    for (uint64_t sent = 0;;) {
      Counter& requests = channel_.requests();
      auto ready = [&] { return requests.value.load() > sent; };
      if (!wait(channel_.bell(), ready)) return;
      sent = requests.value.load();
      Header header;
      if (!read_header(channel_.request_slot(), &header) || !request_fits(header)) return;
      if (!send_all(header, request_parts(channel_.request_slot(), header))) return;
      Header answer;
      if (!receive(&answer, sizeof answer) || !read_header(bytes(&answer), &answer)) return;
      char* slot = channel_.response_slot(shapes_);
      if (!answer_fits(answer, header) || !receive_all(response_parts(slot, answer))) return;
      post(slot, answer, channel_.responses());
      wake(channel_.responses());
    }
  }

  // Requests from the socket to the request slot, the server's answers back.
  void beside_server() {
    for (uint64_t answered = 0;;) {
      Header header;
      char* slot = channel_.request_slot();
      if (!receive(&header, sizeof header) || !read_header(bytes(&header), &header)) return;
      if (!request_fits(header) || header.sequence <= answered) return;
      if (!receive_all(request_parts(slot, header))) return;
      post(slot, header, channel_.requests());
      channel_.bell().value.fetch_add(1);
      wake(channel_.bell());
      Counter& responses = channel_.responses();
      auto ready = [&] { return responses.value.load() >= header.sequence; };
      if (!wait(responses, ready)) return;
      answered = header.sequence;
      Header answer;
      slot = channel_.response_slot(shapes_);
      if (!read_header(slot, &answer) || !answer_fits(answer, header)) return;
      if (!send_all(answer, response_parts(slot, answer))) return;
    }
  }

 private:
  static const char* bytes(const Header* header) { return reinterpret_cast<const char*>(header); }

  // Waits on a counter until ready() or the end of the socket, for which it looks once a ms.
  template <class Ready>
  bool wait(Counter& counter, const Ready& ready) {
    uint64_t looked = now();
    auto ended = [&] {
      if (now() - looked < kYieldNanos) return false;
      looked = now();
      char byte;
      ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
      return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    };
    return wait_until(counter, UINT64_MAX, ready, ended);
  }

  bool request_fits(const Header& h) const {
    return h.epoch == channel_.epoch && h.kind == kRequest && h.layer >= 0 &&
           h.layer < shapes_.layers && h.site >= 0 && h.site < int32_t(shapes_.sites.size()) &&
           h.rows >= 1 && h.rows <= shapes_.max_rows &&
           h.num_bytes == shapes_.request_bytes(h.site, h.rows);
  }
  bool answer_fits(const Header& h, const Header& request) const {
    if (h.epoch != request.epoch || h.sequence != request.sequence || h.site != request.site)
      return false;
    if (h.kind == kRefusal) return h.rows == 0 && h.num_bytes == 0;
    return h.kind == kResponse && h.rows == request.rows &&
           h.num_bytes == shapes_.response_bytes(h.site, h.rows);
  }

  // The payload is in place before the header, the header before the count.
  static void post(char* slot, const Header& header, Counter& counter) {
    std::memcpy(slot, &header, sizeof header);
    counter.value.store(header.sequence);
  }

  std::vector<iovec> request_parts(char* slot, const Header& h) const {
    size_t ids = size_t(h.rows) * 4;
    return {{slot + shapes_.adapters_offset, ids},
            {slot + shapes_.experts_offset, ids},
            {slot + shapes_.rows_offset,
             size_t(h.rows * shapes_.sites[h.site].d_in * shapes_.itemsize)}};
  }
  std::vector<iovec> response_parts(char* slot, const Header& h) const {
    std::vector<iovec> parts;
    const Site& site = shapes_.sites[h.site];
    for (size_t k = 0; k < site.d_outs.size() && h.rows > 0; ++k)
      parts.push_back({slot + site.offsets[k],
                       size_t(h.rows * site.d_outs[k] * shapes_.delta_itemsize)});
    return parts;
  }

  bool receive(void* at, size_t size) {
    return receive_all({{at, size}});
  }
  bool receive_all(std::vector<iovec> parts) {
    return move_all(std::move(parts), [this](msghdr* m) { return recvmsg(socket_, m, 0); });
  }
  bool send_all(Header header, std::vector<iovec> parts) {
    parts.insert(parts.begin(), {&header, sizeof header});
    return move_all(std::move(parts),
                    [this](msghdr* m) { return sendmsg(socket_, m, MSG_NOSIGNAL); });
  }
  template <class Call>
  static bool move_all(std::vector<iovec> parts, const Call& call) {
    for (size_t first = 0; first < parts.size();) {
      msghdr message{};
      message.msg_iov = parts.data() + first;
      message.msg_iovlen = parts.size() - first;
      ssize_t moved = call(&message);
      if (moved < 0 && errno == EINTR) continue;
      if (moved <= 0) return false;
      for (; first < parts.size() && size_t(moved) >= parts[first].iov_len; ++first)
        moved -= ssize_t(parts[first].iov_len);
      if (first < parts.size()) {
        parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + moved;
        parts[first].iov_len -= size_t(moved);
      }
    }
    return true;
  }

  const Shapes shapes_;
  const int socket_;
  const Channel channel_;
};

}  // namespace transport
