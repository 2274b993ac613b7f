// Attention of tokens over their sequences' pages. What a token gets depends only on its query, its
// position and its sequence's K and V: scores by dot.h, the exact maximum, exponentials summed in
// kLanes lanes counted from the token's first visible position, then a chain over positions in order.
// Several tokens of one sequence are worked on together only to share loads.
//
// Pages in 8 bits hold rows of e4m3 values with a scale, a power of two, behind them. Their values
// are widened to T, which holds them exactly; the scales multiply scores and weights.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "dot.h"
#include "parallel.h"
#include "quantised.h"

namespace lora_jax {

constexpr int64_t kTailBytes = 16;  // behind the values of a row in 8 bits: its scale, and nothing


constexpr int64_t kQueryRows = 24;          // (token, head) rows that share loads of K and V
constexpr int64_t kScoreBytes = 512 << 10;  // their scores should stay in L2
constexpr int64_t kAhead = 16;  // positions to prefetch ahead: rows of one head lie far apart

// Queries and results are of T, pages of P: T, or uint8_t for rows in 8 bits.
template <class T, class P = T>
struct Attention {
  using Page = P;
  const T* q;
  const P *k, *v;  // v null: V is the first v_dim of K
  const int32_t *block_tables, *token_to_seq, *positions;
  const float* sinks;  // may be null
  T* out;
  int64_t tokens, seqs, max_pages, pages, page_size, q_heads, kv_heads, k_dim, v_dim;
  int64_t window;  // positions a token sees, itself included; 0 for all
  float scale;

  int64_t group() const { return q_heads / kv_heads; }
  int64_t first(int64_t position) const {
    return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

// Tokens [token, token + count) stand at consecutive positions of one sequence.
struct AttentionItem {
  int64_t token, count, kv_head;
};

// One (token, head) query: where its scores start, and the positions it sees, relative to the
// first position that any query of the item sees.
struct Query {
  float* scores;
  int64_t begin, end;
  float total;
};

// Pointers to the K and V rows of positions [lo, hi] of a sequence for one kv head; V's last is
// repeated kAhead times.
template <class T>
void row_pointers(const Attention<T, T>& g, int64_t seq, int64_t kv_head, int64_t lo, int64_t hi,
                  std::vector<const T*>* k, std::vector<const T*>* v) {
  const int32_t* table = g.block_tables + seq * g.max_pages;
  int64_t v_dim = g.v ? g.v_dim : g.k_dim;
  const T* v_base = g.v ? g.v : g.k;
  for (int64_t s = lo; s <= hi;) {
    int64_t page = std::clamp<int64_t>(table[s / g.page_size], 0, g.pages - 1);
    int64_t offset = s % g.page_size;
    for (; offset < g.page_size && s <= hi; ++offset, ++s) {
      int64_t row = (page * g.page_size + offset) * g.kv_heads + kv_head;
      k->push_back(g.k + row * g.k_dim);
      v->push_back(v_base + row * v_dim);
    }
  }
  v->resize(v->size() + kAhead, v->back());
}

// Widened rows of positions [lo, hi] for one kv head, and their scales.
template <class T>
struct WideRows {
  std::vector<T> values;
  std::vector<float> scales;

  void reserve(int64_t rows, int64_t dim) { values.resize(rows * dim), scales.reserve(rows); }
  const T* add(const uint8_t* row, int64_t dim) {
    T* out = values.data() + int64_t(scales.size()) * dim;
    int64_t d = 0;
    for (; d + kValueStep <= dim; d += kValueStep) scale_e4m3(row + d, 1.0f, out + d);
    if (d < dim) {
      uint8_t codes[kValueStep] = {};
      T rest[kValueStep];
      std::memcpy(codes, row + d, dim - d);
      scale_e4m3(codes, 1.0f, rest);
      std::memcpy(out + d, rest, (dim - d) * sizeof(T));
    }
    float scale;
    std::memcpy(&scale, row + dim, sizeof(scale));
    scales.push_back(scale);
    return out;
  }
};

// As row_pointers of plain pages, with the rows widened into `wide_k` and `wide_v`.
template <class T>
void wide_pointers(const Attention<T, uint8_t>& g, int64_t seq, int64_t kv_head, int64_t lo,
                   int64_t hi, std::vector<const T*>* k, std::vector<const T*>* v,
                   WideRows<T>* wide_k, WideRows<T>* wide_v) {
  const int32_t* table = g.block_tables + seq * g.max_pages;
  wide_k->reserve(hi - lo + 1, g.k_dim);
  if (g.v) wide_v->reserve(hi - lo + 1, g.v_dim);
  for (int64_t s = lo; s <= hi; ++s) {
    int64_t page = std::clamp<int64_t>(table[s / g.page_size], 0, g.pages - 1);
    int64_t row = (page * g.page_size + s % g.page_size) * g.kv_heads + kv_head;
    k->push_back(wide_k->add(g.k + row * (g.k_dim + kTailBytes), g.k_dim));
    v->push_back(g.v ? wide_v->add(g.v + row * (g.v_dim + kTailBytes), g.v_dim)
                     : k->back());
  }
  v->resize(v->size() + kAhead, v->back());
}

// values[s] *= scales[s] for s in [begin, end).
inline void times(float* values, const std::vector<float>& scales, int64_t begin, int64_t end) {
  for (int64_t s = begin; s < end; ++s) values[s] *= scales[s];
}

// queries[i].scores[s] = q[i] . k[s] for all s, also those that query i does not see.
template <class D, class G>
void score(const G& g, const std::vector<const typename D::X*>& q,
           const std::vector<const typename D::T*>& k, std::vector<Query>& queries) {
  int64_t num_q = int64_t(q.size()), num_k = int64_t(k.size());
  float sums[kTile];
  for (int64_t s = 0; s < num_k; s += kCols) {
    const typename D::T* cols[kCols];
    for (int64_t c = 0; c < kCols; ++c) cols[c] = k[std::min(s + c, num_k - 1)];
    int64_t n = std::min<int64_t>(kCols, num_k - s);
    for (int64_t c = s + kAhead; c < std::min(s + kAhead + kCols, num_k); ++c)
      for (int64_t d = 0; d < g.k_dim; d += D::kLine) __builtin_prefetch(k[c] + d);
    for (int64_t i = 0; i < num_q; i += kRows) {
      int64_t m = std::min<int64_t>(kRows, num_q - i);
      dot_tile<D>(m, q.data() + i, cols, g.k_dim, sums);
      for (int64_t r = 0; r < m; ++r)
        store(queries[i + r].scores + s, load(sums + r * kCols, n), n);
    }
  }
}

// Turns scores[begin, end) into exp(scale * score - max) and sets the total.
inline void softmax(Query& query, float scale, const float* sink) {
  const f32s lowest = splat(-INFINITY);
  float* p = query.scores + query.begin;
  int64_t n = query.end - query.begin;
  f32s top = lowest;
  for (int64_t s = 0; s < n; s += kLanes) {
    f32s x = load(p + s, n - s) * splat(scale);
    store(p + s, x, n - s);
    top = vmax(top, keep(x, n - s, -INFINITY));
  }
  float highest = max_lanes(top);
  if (sink) highest = std::max(highest, *sink);
  f32s total = {};
  for (int64_t s = 0; s < n; s += kLanes) {
    f32s e = exp_nonpositive(load(p + s, n - s) - splat(highest));
    store(p + s, e, n - s);
    total += keep(e, n - s, 0.0f);
  }
  query.total = sum_lanes(total);
  if (sink) query.total += exp_nonpositive(splat(*sink - highest))[0];
}

// acc[r][j] += sum over s in [begin, end) of p[r][s] v[s]; n columns in the last of S vectors.
template <class T, int M, int S>
inline void add_values(const Query* queries, const T* const* v, int64_t begin, int64_t end,
                       int64_t col, int64_t n, f32s (*acc)[S]) {
  f32s a[M][S];
  const float* p[M];
  for (int r = 0; r < M; ++r) {
    p[r] = queries[r].scores;
    for (int j = 0; j < S; ++j) a[r][j] = acc[r][j];
  }
  for (int64_t s = begin; s < end; ++s) {
    const T* row = v[s] + col;
    for (int j = 0; j < S; j += sizeof(float) / sizeof(T))
      __builtin_prefetch(v[s + kAhead] + col + j * kLanes);
    f32s weight[M];
    for (int r = 0; r < M; ++r) {
      weight[r] = splat(p[r][s]);
      in_register(weight[r]);
    }
    for (int j = 0; j < S; ++j) {
      f32s value = j + 1 < S ? load(row + j * kLanes) : load(row + j * kLanes, n);
      for (int r = 0; r < M; ++r) a[r][j] = fma(weight[r], value, a[r][j]);
    }
  }
  for (int r = 0; r < M; ++r)
    for (int j = 0; j < S; ++j) acc[r][j] = a[r][j];
}

// S vectors of output columns of M queries. Each query's positions are added in order; those that
// all M see are added together.
template <class T, int M, int S, class G>
inline void value_tile(const G& g, const Query* queries, T* const* out,
                       const T* const* v, int64_t col, int64_t n) {
  int64_t begin = queries[0].begin, end = queries[0].end;
  for (int r = 1; r < M; ++r) {
    begin = std::max(begin, queries[r].begin);
    end = std::min(end, queries[r].end);
  }
  f32s acc[M][S] = {};
  if (begin >= end) {
    for (int r = 0; r < M; ++r)
      add_values<T, 1, S>(queries + r, v, queries[r].begin, queries[r].end, col, n, acc + r);
  } else {
    for (int r = 0; r < M; ++r)
      add_values<T, 1, S>(queries + r, v, queries[r].begin, begin, col, n, acc + r);
    add_values<T, M, S>(queries, v, begin, end, col, n, acc);
    for (int r = 0; r < M; ++r)
      add_values<T, 1, S>(queries + r, v, end, queries[r].end, col, n, acc + r);
  }
  for (int r = 0; r < M; ++r)
    for (int j = 0; j < S; ++j)
      store(out[r] + col + j * kLanes, acc[r][j] / splat(queries[r].total),
            j + 1 < S ? kLanes : n);
}

template <class T, int S, class G>
inline void value_rows(const G& g, const std::vector<Query>& queries, T* const* out,
                       const T* const* v, int64_t col, int64_t n) {
  int64_t num = int64_t(queries.size());
  for (int64_t i = 0; i < num; i += 4) {
    const Query* first = queries.data() + i;
    switch (num - i) {
      case 1: value_tile<T, 1, S>(g, first, out + i, v, col, n); break;
      case 2: value_tile<T, 2, S>(g, first, out + i, v, col, n); break;
      case 3: value_tile<T, 3, S>(g, first, out + i, v, col, n); break;
      default: value_tile<T, 4, S>(g, first, out + i, v, col, n);
    }
  }
}

template <class D, class G>
void run_attention_item(const G& g, const AttentionItem& item) {
  using T = typename D::T;
  constexpr bool kCoded = !std::is_same_v<T, typename G::Page>;
  int64_t position = g.positions[item.token], group = g.group();
  int64_t lo = g.first(position), hi = position + item.count - 1, context = hi - lo + 1;
  std::vector<const T*> k, v;
  std::vector<const typename D::X*> q;
  PackedRows<D> packed(item.count * group, g.k_dim);
  k.reserve(context);
  v.reserve(context + kAhead);
  WideRows<T> wide_k, wide_v;
  int64_t seq = g.token_to_seq[item.token];
  if constexpr (kCoded)
    wide_pointers(g, seq, item.kv_head, lo, hi, &k, &v, &wide_k, &wide_v);
  else
    row_pointers(g, seq, item.kv_head, lo, hi, &k, &v);
  std::vector<float> scores(context * item.count * group);
  std::vector<Query> queries;
  std::vector<T*> out;
  for (int64_t t = 0; t < item.count; ++t)
    for (int64_t h = item.kv_head * group; h < (item.kv_head + 1) * group; ++h) {
      float* mine = scores.data() + queries.size() * context;
      queries.push_back({mine, g.first(position + t) - lo, position + t + 1 - lo, 0.0f});
      const T* row = g.q + ((item.token + t) * g.q_heads + h) * g.k_dim;
      q.push_back(packed.add(int64_t(q.size()), row));
      out.push_back(g.out + ((item.token + t) * g.q_heads + h) * g.v_dim);
    }
  score<D>(g, q, k, queries);
  for (size_t i = 0; i < queries.size(); ++i) {
    Query& query = queries[i];
    if (kCoded) times(query.scores, wide_k.scales, query.begin, query.end);
    softmax(query, g.scale, g.sinks ? g.sinks + item.kv_head * group + i % group : nullptr);
    const auto& scales = g.v ? wide_v.scales : wide_k.scales;
    if (kCoded) times(query.scores, scales, query.begin, query.end);
  }
  constexpr int64_t kStrip = 4 * kLanes;
  int64_t col = 0;
  for (; col + kStrip <= g.v_dim; col += kStrip)
    value_rows<T, 4>(g, queries, out.data(), v.data(), col, kLanes);
  for (; col < g.v_dim; col += kLanes)
    value_rows<T, 1>(g, queries, out.data(), v.data(), col,
                     std::min<int64_t>(kLanes, g.v_dim - col));
}

// Returns false if a token's sequence or position has no place in the block tables.
template <class G>
bool attention_items(const G& g, std::vector<AttentionItem>* items, double* micros) {
  *micros = 0;
  for (int64_t t = 0, end; t < g.tokens; t = end) {
    int32_t seq = g.token_to_seq[t], position = g.positions[t];
    for (end = t + 1; end < g.tokens; ++end)
      if (g.token_to_seq[end] != seq || g.positions[end] != position + (end - t)) break;
    int64_t last = position + (end - t) - 1;
    if (seq < 0 || seq >= g.seqs || position < 0 || last >= g.max_pages * g.page_size) return false;
    int64_t context = last - g.first(position) + 1;
    int64_t rows = std::clamp<int64_t>(kScoreBytes / (context * 4), 1, kQueryRows);
    int64_t chunk = std::max<int64_t>(1, rows / g.group());
    for (int64_t head = 0; head < g.kv_heads; ++head)
      for (int64_t token = t; token < end; token += chunk)
        items->push_back({token, std::min(chunk, end - token), head});
    double work = double(end - t) * (last - g.first(last) + 1) * (g.k_dim + g.v_dim);
    *micros += std::max(work * g.q_heads / 35e3, work * g.kv_heads * sizeof(typename G::Page) / 12e3 / chunk);
  }
  return true;
}

template <class D, class P>
bool run_attention(xla::ffi::ThreadPool& pool, const Attention<typename D::T, P>& g,
                   int64_t all_tokens) {
  std::vector<AttentionItem> items;
  double micros;
  if (!attention_items(g, &items, &micros)) return false;
  parallel_for(pool, int64_t(items.size()), micros,
               [&](int64_t i) { run_attention_item<D>(g, items[i]); });
  int64_t row = g.q_heads * g.v_dim;
  std::memset(g.out + g.tokens * row, 0, (all_tokens - g.tokens) * row * sizeof(*g.out));
  return true;
}

}  // namespace lora_jax
