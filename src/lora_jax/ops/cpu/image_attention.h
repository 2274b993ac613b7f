// Attention between the patches of one image, all to all, of several images of one size in a row. What
// a patch gets depends on its query and on the keys and values of its image's valid patches, in order:
// scores, exponentials and sums are those of attention.h.
//
// Where there are angles, q and k are turned by them before, as heads.h turns heads, and rounded.
#pragma once
#include "attention.h"
#include "heads.h"

namespace lora_jax {

template <class T>
struct ImageAttention {
  const T *q, *k, *v;      // rows of heads, `stride` elements apart
  const float *cos, *sin;  // [patches, dim / 2]; null: nothing is turned
  const bool* valid;       // [patches]
  T* out;                  // [patches, heads, dim]
  int64_t patches, images, num_patches, heads, dim, stride;  // no patch from num_patches on is valid
  int64_t k_dim;           // dim, for attention.h
  float scale;
};

// Queries [first, end) of an image's valid patches, of one head.
struct ImageItem {
  int64_t image, head, first, end;
};

// Valid patches of an image, and its turned keys: [heads][rows][dim], empty where they are plain.
template <class T>
struct ImageRows {
  std::vector<int64_t> rows;
  std::vector<T> keys;
};

template <class T>
inline void turn_head(const ImageAttention<T>& g, const T* from, int64_t row, int64_t head, T* out) {
  const int64_t half = g.dim / 2;
  turn(from + row * g.stride + head * g.dim, g.cos + row * half, g.sin + row * half, half, out);
}

template <class D>
void run_image_item(const ImageAttention<typename D::T>& g, const ImageRows<typename D::T>& image,
                    const ImageItem& item) {
  using T = typename D::T;
  const int64_t context = int64_t(image.rows.size()), count = item.end - item.first;
  const int64_t column = item.head * g.dim;
  std::vector<const T*> k, v;
  k.reserve(context), v.reserve(context + kAhead);
  for (int64_t s = 0; s < context; ++s) {
    const int64_t row = image.rows[s] * g.stride + column;
    k.push_back(g.cos ? image.keys.data() + (item.head * context + s) * g.dim : g.k + row);
    v.push_back(g.v + row);
  }
  v.resize(v.size() + kAhead, v.back());
  PackedRows<D> packed(count, g.dim);
  std::vector<T> turned(g.cos ? count * g.dim : 0);
  std::vector<float> scores(context * count);
  std::vector<const typename D::X*> q;
  std::vector<Query> queries;
  std::vector<T*> out;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = image.rows[item.first + i];
    const T* from = g.q + row * g.stride + column;
    if (g.cos) {
      T* head = turned.data() + i * g.dim;
      turn_head(g, g.q, row, item.head, head);
      from = head;
    }
    q.push_back(packed.add(i, from));
    queries.push_back({scores.data() + i * context, 0, context, 0.0f});
    out.push_back(g.out + row * g.heads * g.dim + column);
  }
  score<D>(g, q, k, queries);
  for (Query& query : queries) softmax(query, g.scale, nullptr);
  constexpr int64_t kStrip = 4 * kLanes;
  int64_t col = 0;
  for (; col + kStrip <= g.dim; col += kStrip)
    value_rows<T, 4>(g, queries, out.data(), v.data(), col, kLanes);
  for (; col < g.dim; col += kLanes)
    value_rows<T, 1>(g, queries, out.data(), v.data(), col, std::min<int64_t>(kLanes, g.dim - col));
}

template <class D>
void run_image_attention(xla::ffi::ThreadPool& pool, const ImageAttention<typename D::T>& g) {
  using T = typename D::T;
  const int64_t size = g.patches / std::max<int64_t>(1, g.images), width = g.heads * g.dim;
  std::vector<ImageRows<T>> images(g.images);
  std::vector<ImageItem> items, turns;
  double work = 0;
  for (int64_t i = 0; i < g.images; ++i) {
    std::vector<int64_t>& rows = images[i].rows;
    for (int64_t row = i * size; row < (i + 1) * size; ++row)
      if (row < g.num_patches && g.valid[row])
        rows.push_back(row);
      else
        std::memset(g.out + row * width, 0, width * sizeof(T));
    const int64_t context = int64_t(rows.size());
    if (!context) continue;
    if (g.cos) images[i].keys.resize(context * width);
    const int64_t chunk = std::clamp<int64_t>(kScoreBytes / (context * 4), 1, kQueryRows);
    for (int64_t head = 0; head < g.heads; ++head) {
      turns.push_back({i, head, 0, context});
      for (int64_t first = 0; first < context; first += chunk)
        items.push_back({i, head, first, std::min(first + chunk, context)});
    }
    work += double(context) * context * width;
  }
  const double turned = g.cos ? double(turns.size()) * size * g.dim / 2e3 : 0.0;
  parallel_for(pool, g.cos ? int64_t(turns.size()) : 0, turned, [&](int64_t i) {
    ImageRows<T>& image = images[turns[i].image];
    const int64_t head = turns[i].head, context = turns[i].end;
    for (int64_t s = 0; s < context; ++s)
      turn_head(g, g.k, image.rows[s], head, image.keys.data() + (head * context + s) * g.dim);
  });
  parallel_for(pool, int64_t(items.size()), 2.0 * work / 35e3,
               [&](int64_t i) { run_image_item<D>(g, images[items[i].image], items[i]); });
}

}  // namespace lora_jax
