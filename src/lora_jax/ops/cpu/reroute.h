// Stable counting sort of (token, expert) rows by expert; rows in no group come last.
#pragma once
#include <cstdint>
#include <vector>

namespace lora_jax {

inline void row_map(const int32_t* ids, int64_t rows, int64_t real_rows, int32_t experts,
                    int32_t* order, int32_t* inverse, int32_t* group_sizes) {
  auto bucket = [&](int64_t row) {
    return row < real_rows && ids[row] >= 0 && ids[row] < experts ? ids[row] : experts;
  };
  std::vector<int32_t> next(experts + 2, 0);  // next[e + 1] counts e, then becomes e + 1's start
  for (int64_t row = 0; row < rows; ++row) ++next[bucket(row) + 1];
  for (int32_t e = 0; e < experts; ++e) group_sizes[e] = next[e + 1];
  for (int32_t e = 0; e < experts; ++e) next[e + 1] += next[e];
  for (int64_t row = 0; row < rows; ++row) {
    int32_t place = next[bucket(row)]++;
    order[place] = int32_t(row);
    inverse[row] = place;
  }
}

}  // namespace lora_jax
