// Stable counting sort of (token, expert) rows by expert; rows in no group come last.
#pragma once
#include <cstdint>
#include <vector>

namespace lora_jax {

// Row r of the first real_rows is in group group_of(r) if that is in [0, groups).
template <class GroupOf>
inline void sort_rows(const GroupOf& group_of, int64_t rows, int64_t real_rows, int32_t groups,
                      int32_t* order, int32_t* inverse, int32_t* group_sizes) {
  std::vector<int32_t> bucket(rows);
  std::vector<int32_t> next(groups + 2, 0);  // next[g + 1] counts g, then becomes g + 1's start
  for (int64_t row = 0; row < rows; ++row) {
    int32_t group = row < real_rows ? group_of(row) : -1;
    bucket[row] = group >= 0 && group < groups ? group : groups;
    ++next[bucket[row] + 1];
  }
  for (int32_t g = 0; g < groups; ++g) group_sizes[g] = next[g + 1];
  for (int32_t g = 0; g < groups; ++g) next[g + 1] += next[g];
  for (int64_t row = 0; row < rows; ++row) {
    int32_t place = next[bucket[row]]++;
    order[place] = int32_t(row);
    inverse[row] = place;
  }
}

inline void row_map(const int32_t* ids, int64_t rows, int64_t real_rows, int32_t experts,
                    int32_t* order, int32_t* inverse, int32_t* group_sizes) {
  sort_rows([&](int64_t row) { return ids[row]; }, rows, real_rows, experts, order, inverse,
            group_sizes);
}

// ids[row] is looked up in the table's row of the token's slot, if the table has that slot.
struct Reroute {
  const int32_t *ids, *token_to_slot, *table;
  int64_t k;
  int32_t slots, experts;

  int32_t operator()(int64_t row) const {
    int32_t id = ids[row], slot = token_to_slot[row / k];
    if (id < 0 || id >= experts) return -1;
    return slot >= 0 && slot < slots ? table[int64_t(slot) * experts + id] : id;
  }
};

}  // namespace lora_jax
