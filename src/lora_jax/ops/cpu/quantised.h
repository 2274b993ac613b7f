// Rows of weights of 4 and 8 bits as the dot products read them. A decoded weight has the bits of
// the plain array that the quantised one stands for, and the sums are those of dot.h: so are the
// results.
//
// Few rows of x are multiplied by weights that are decoded in registers; many by a block of them
// that is decoded once, in memory.
#pragma once
#include <algorithm>

#include "eight_bits.h"
#include "pairs.h"
#include "quads.h"
#include "words.h"

namespace lora_jax {

constexpr int64_t kFewRows = kLanes == 16 ? 8 : 4;  // more rows are faster by blocks

// Rows of matrices that are not plain. Row n of matrix g is row g * d_out + n.
template <class D>
struct DecodedRows {
  using X = typename D::X;
  double bytes;  // of a plain weight that takes as long
  explicit DecodedRows(double b) : bytes(b) {}
  virtual ~DecodedRows() = default;
  // Whether `dot` can be called for n rows.
  virtual bool in_registers(int64_t row, int64_t n) const { return false; }
  // out[0, k1 - k0) = w[row][k0, k1), k0 a multiple of kWords, in the order that rows of x are
  // packed in; the rest of kWords may follow.
  virtual void decode(int64_t row, int64_t k0, int64_t k1, X* out) const = 0;
  // acc[r * kCols + c] = lane products of x[r] and w[row + c], all of K, for m <= kFewRows rows and
  // n <= kCols columns; others are left.
  virtual void dot(int64_t m, const X* const* x, int64_t row, int64_t n, f32s* acc) const {}
  // Whether dot_in_pairs does what `dot` does for one row, and faster. Its x is that of a TwiceRow.
  virtual bool in_pairs() const { return false; }
  virtual void dot_in_pairs(const X* twice, int64_t row, int64_t n, f32s* acc) const {}
  // Whether dot_quads serves, for up to kQuadRows at a time. Its sums lie as quads.h says.
  virtual bool in_quads() const { return false; }
  virtual void dot_quads(int64_t m, const X* const* x, int64_t row, int64_t n, f32s* acc) const {}
};

// Rows of words. R has `from(row, k)`, where the weights from k on stand, kPerByte of them in a
// byte, and Tables(rows, row), whose table(c) is that of row + c for the first span, then, after
// next(), for the second, and so on.
template <class D, class R>
struct WordRows : DecodedRows<D> {
  using X = typename D::X;
  int64_t d_in, span;  // weights of a row, and those that share a table: multiples of kWords
  explicit WordRows(double b) : DecodedRows<D>(b) {}

  void decode(int64_t row, int64_t k0, int64_t k1, X* out) const override {
    const R& rows = static_cast<const R&>(*this);
    const uint8_t* from = rows.from(row, k0);
    typename R::Tables at(rows, row);
    at.next(k0 / span);
    int64_t end = (k0 / span + 1) * span;
    for (int64_t k = k0; k < k1; at.next(), end += span) {
      auto table = at.table(0);
      for (int64_t stop = std::min(k1, end); k < stop; k += kWords) {
        put<D>(table, from, out);
        from += kWords / R::kPerByte, out += kWords;
      }
    }
  }

  void dot(int64_t m, const X* const* x, int64_t row, int64_t n, f32s* acc) const override {
    if constexpr (kWordsFor<D>) switch (m) {
        case 1: return dot_columns<1>(x, row, n, acc);
        case 2: return dot_columns<2>(x, row, n, acc);
        case 3: return dot_columns<3>(x, row, n, acc);
        case 4: return dot_columns<4>(x, row, n, acc);
#ifdef __AVX512F__
        case 5: return dot_columns<5>(x, row, n, acc);
        case 6: return dot_columns<6>(x, row, n, acc);
        case 7: return dot_columns<7>(x, row, n, acc);
        case 8: return dot_columns<8>(x, row, n, acc);
#endif
      }
  }

  // Columns together are as many as the registers hold sums of: one alone would wait for itself.
  template <int M>
  void dot_columns(const X* const* x, int64_t row, int64_t n, f32s* acc) const {
    constexpr int kSums = kLanes == 16 ? 16 : 8;
    constexpr int C = std::min(kCols, M <= 2 ? kSums / 2 : M <= 4 ? kSums / 4 : kSums / 8);
    int64_t c = 0;
    for (; c + C <= n; c += C) dot_some<M, C>(x, row + c, acc + c);
    for (; c < n; ++c) dot_some<M, 1>(x, row + c, acc + c);
  }

  template <int M, int C>
  void dot_some(const X* const* x, int64_t row, f32s* acc) const {
    const R& rows = static_cast<const R&>(*this);
    const int64_t row_bytes = d_in / R::kPerByte, ahead = kCols * row_bytes;
    const uint8_t* from = rows.from(row, 0);
    typename R::Tables at(rows, row);
    f32s a[M][C];
    const X* xp[M];
    for (int r = 0; r < M; ++r) {
      xp[r] = x[r];
      for (int c = 0; c < C; ++c) a[r][c] = f32s{};
    }
    for (int64_t k = 0; k < d_in; at.next()) {
      const int64_t span_end = std::min(d_in, k + span);
      typename R::Table tables[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) tables[c] = at.table(c);
      for (int64_t b = 0; b < (span_end - k) / R::kPerByte; b += 64)
        for (int c = 0; c < C; ++c) __builtin_prefetch(from + c * row_bytes + b + ahead, 0, 2);
      for (; k < span_end; k += kWords, from += kWords / R::kPerByte)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          Words words = tables[c].quick(from + c * row_bytes);
          for (int i = 0; i < kOperands<D>; ++i) {
            typename D::V wv = operand<D>(words, i);
            const int64_t step = k + i / D::kParts * D::kStep;
            for (int r = 0; r < M; ++r)
              a[r][c] = D::fma(a[r][c], D::load_x(xp[r] + step, i % D::kParts), wv);
          }
        }
    }
    for (int r = 0; r < M; ++r)
      for (int c = 0; c < C; ++c) acc[r * kCols + c] = a[r][c];
  }
};

// A scale: float32, or bfloat16 where `narrow`.
struct Scales {
  const void* data;
  bool narrow;
  float operator[](int64_t i) const {
    return narrow ? to_f32(static_cast<const uint16_t*>(data)[i])
                  : static_cast<const float*>(data)[i];
  }
};

// w[n][k] = (values[code] - zero) * scale, zero and scale of the row's group of `span` weights.
template <class D>
struct CodedRows : WordRows<D, CodedRows<D>> {
  using Table = std::conditional_t<kWordsFor<D>, WordTable, FloatTable>;
  static constexpr int kPerByte = 2;
  const uint8_t* codes;
  Scales scales;
  const uint8_t* zeros;  // may be null
  const Values values;   // of the 16 codes
  bool quads = false;    // the order of codes, only where kReadsQuads

  explicit CodedRows(const float* of) : WordRows<D, CodedRows<D>>(1.5), values(of) {}
  bool in_registers(int64_t, int64_t) const override { return kWordsFor<D> && !quads; }
  const uint8_t* from(int64_t row, int64_t k) const { return codes + (row * this->d_in + k) / 2; }
  bool in_pairs() const override { return kPairsFor<D>; }
  void dot_in_pairs(const typename D::X* twice, int64_t row, int64_t n, f32s* acc) const override {
    if constexpr (kPairsFor<D>) dot_columns_in_pairs(*this, twice, row, n, acc);
  }
  bool in_quads() const override {
    return quads && quads_serve<D>(this->span, this->d_in / this->span);
  }
  void dot_quads(int64_t m, const typename D::X* const* x, int64_t row, int64_t n,
                 f32s* acc) const override {
    if constexpr (kReadsQuads && kWordsFor<D>) dot_in_quads(*this, m, x, row, n, acc);
  }
  void decode(int64_t row, int64_t k0, int64_t k1, typename D::X* out) const override {
    if constexpr (kReadsQuads)
      if (quads) return decode_quads(*this, row, k0, k1, out);
    WordRows<D, CodedRows<D>>::decode(row, k0, k1, out);
  }
  // Of groups i and j, in the low and in the high half of vectors.
  auto table_of_two(int64_t i, int64_t j) const {
    if (!zeros) return Table::of_two(values, scales[i], scales[j]);
    const float two_zeros[2] = {float(zeros[i]), float(zeros[j])}, two[2] = {scales[i], scales[j]};
    return Table::of_two(values, two_zeros, two);
  }
  struct Tables {
    const CodedRows& rows;
    const int64_t groups;
    int64_t at;
    Tables(const CodedRows& r, int64_t row) : rows(r), groups(r.d_in / r.span), at(row * groups) {}
    void next(int64_t spans = 1) { at += spans; }
    Table table(int64_t c) const {
      int64_t i = at + c * groups;
      if (!rows.zeros) return {rows.values, rows.scales[i]};
      return {rows.values, float(rows.zeros[i]), rows.scales[i]};
    }
  };
};

// w[n][k] = value * scale of the block of block_rows x span that it lies in. d_in is a multiple of
// kValueStep, and so is a span that is not all of it; those that are none of kWords are decoded
// by kValueStep in memory.
template <class D>
struct ScaledRows : WordRows<D, ScaledRows<D>> {
  using X = typename D::X;
  using T = typename D::T;
  using Table = ScaledTable;
  static constexpr int kPerByte = 1;
  const uint8_t* values;
  const float* scales;
  int64_t d_out, block_rows;

  ScaledRows(int64_t in, int64_t columns) : WordRows<D, ScaledRows<D>>(2.5) {
    this->d_in = in, this->span = std::min(in, columns);
  }
  bool in_words() const { return this->d_in % kWords == 0 && this->span % kWords == 0; }
  bool in_registers(int64_t row, int64_t n) const override {
    if (!kWordsFor<D> || !in_words()) return false;
    const int64_t across = (this->d_in + this->span - 1) / this->span;
    const float* of = row_scales(row);
    const float* end = row_scales(row + n - 1) + across;
    return std::all_of(of, end, [](float s) { return Table::has_words(s); });
  }
  const uint8_t* from(int64_t row, int64_t k) const { return values + row * this->d_in + k; }
  // The scales of the blocks that a row lies in.
  const float* row_scales(int64_t row) const {
    int64_t down = (d_out + block_rows - 1) / block_rows;
    int64_t across = (this->d_in + this->span - 1) / this->span;
    return scales + (row / d_out * down + row % d_out / block_rows) * across;
  }
  struct Tables {
    const ScaledRows& rows;
    const float* scales[kCols];
    int64_t s = 0;
    Tables(const ScaledRows& r, int64_t row) : rows(r) {
      // Rows of one matrix; a division for each would take long.
      const int64_t across = (r.d_in + r.span - 1) / r.span;
      int64_t left = r.block_rows - row % r.d_out % r.block_rows;
      scales[0] = r.row_scales(row);
      for (int c = 1; c < kCols; ++c) {
        scales[c] = scales[c - 1];
        if (--left == 0) scales[c] += across, left = r.block_rows;
      }
    }
    void next(int64_t spans = 1) { s += spans; }
    Table table(int64_t c) const { return Table(scales[c][s]); }
  };

  void decode(int64_t row, int64_t k0, int64_t k1, X* out) const override {
    if (kWordsFor<D> && in_words()) return WordRows<D, ScaledRows<D>>::decode(row, k0, k1, out);
    if constexpr (std::is_same_v<T, X>) {
      by_steps(row, k0, k1, out);
    } else {
      std::unique_ptr<T[]> plain(new T[k1 - k0]);
      by_steps(row, k0, k1, plain.get());
      D::pack(plain.get(), k1 - k0, out);
    }
  }
  // out[0, k1 - k0) = w[row][k0, k1), in order.
  void by_steps(int64_t row, int64_t k0, int64_t k1, T* out) const {
    const uint8_t* first = from(row, 0);
    const float* scales = row_scales(row);
    for (int64_t k = k0, s = k0 / this->span; k < k1; ++s) {
      float of_block = scales[s];
      for (int64_t stop = std::min(k1, (s + 1) * this->span); k < stop; k += kValueStep)
        scale_e4m3(first + k, of_block, out + (k - k0));
    }
  }
};

}  // namespace lora_jax
