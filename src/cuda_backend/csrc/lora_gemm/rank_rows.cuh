// Rank rows as pools hold them (lora_jax/rank_rows.py).
#pragma once

namespace lora_jax {

constexpr int kInt8Tail = 16;  // bytes behind a row's int8 values: their scale, a float, and nothing

}  // namespace lora_jax
