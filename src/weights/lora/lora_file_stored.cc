// Factors of single matrices where they lie in the adapter's files, for who turns them into other files.
#include <cmath>

#include "base/error.h"
#include "weights/lora/lora_file_state.h"

namespace kt::inline weights {
namespace {

int64_t down_or(const LoraTarget& target, int64_t down, int64_t other) {
  return target.projection == Projection::kDown ? down : other;
}

}  // namespace

FactorViews LoraFile::State::part_of(const LoraPair& pair, std::string_view parameter, const LoraView& a,
                                     const LoraView& b) const {
  taken.insert({pair.a, pair.b});
  const auto rank = static_cast<int>(a.rows);
  LoraPair named = pair;
  constexpr std::string_view kInner = ".base_layer";
  while (!parameter.empty() && named.name.ends_with(kInner))
    named.name.resize(named.name.size() - kInner.size());
  const double of = alpha_of(named, parameter);
  return {.rank = rank,
          .scale = scale_of(named, parameter, rank),
          .alpha = rank_stabilised ? of * std::sqrt(static_cast<double>(rank)) : of,
          .a = a,
          .b = b,
          .a_name = path + ": " + pair.a->name,
          .b_name = path + ": " + pair.b->name};
}

FactorViews LoraFile::State::whole(const LoraPair& pair, int64_t n, int64_t k) const {
  const std::vector<int64_t>& a = pair.a->shape;
  if (a.size() != 2 || a[0] < 1 || a[1] != k) wrong_shape(*pair.a, text("[rank, {}]", k));
  if (pair.b->shape != std::vector<int64_t>{n, a[0]}) wrong_shape(*pair.b, text("[{}, {}]", n, a[0]));
  return part_of(pair, "", view_of(path, *pair.a), view_of(path, *pair.b));
}

std::optional<FactorViews> LoraFile::State::of_expert(const LoraTarget& target, int64_t n, int64_t k,
                                                      int experts) const {
  if (const LoraPair* const own = find(target)) return whole(*own, n, k);
  const int64_t e = target.expert;
  if (e >= experts) return {};
  // [experts, rank, in] and [experts, out, rank].
  if (const LoraPair* const all = find({.layer = target.layer, .projection = target.projection})) {
    const std::vector<int64_t>& a = all->a->shape;
    if (a.size() != 3 || a[0] != experts || a[1] < 1 || a[2] != k)
      wrong_shape(*all->a, text("[{}, rank, {}]", experts, k));
    if (all->b->shape != std::vector<int64_t>{experts, n, a[1]})
      wrong_shape(*all->b, text("[{}, {}, {}]", experts, n, a[1]));
    LoraView one_a = view_of(path, *all->a), one_b = view_of(path, *all->b);
    one_a.data = one_a.at(e * a[1], 0);
    one_b.data = one_b.at(e * n, 0);
    return part_of(*all, "", one_a, one_b);
  }
  const auto fused = fused_pairs.find(target.layer);
  if (fused == fused_pairs.end()) return {};
  const bool down = target.projection == Projection::kDown;
  const ExpertSizes sizes{.experts = experts,
                          .hidden = static_cast<int>(down_or(target, n, k)),
                          .inter = static_cast<int>(down_or(target, k, n))};
  for (const LoraPair* const pair : fused->second) {
    if (!pair->a || !pair->b || !is_fused(*pair, sizes, !down)) continue;
    // Rows of a are expert * rank + r, columns of b r * experts + expert.
    const LoraView a = view_of(path, *pair->a), b = view_of(path, *pair->b);
    const int64_t rank = a.rows / experts, row = target.projection == Projection::kUp ? n : 0;
    LoraView one_b = b.part(row, n, e, 1);
    one_b.columns = rank;
    one_b.column_stride = experts;
    return part_of(*pair, down ? ".down_proj" : ".gate_up_proj", a.part(e * rank, rank, 0, a.columns), one_b);
  }
  return {};
}

std::optional<FactorViews> LoraFile::stored(std::string_view module, int64_t n, int64_t k,
                                            int experts) const {
  KT_CHECK(!state_->family, "{}: factors of a GGUF adapter are read whole", path());
  const std::string_view inside = from_layers(module);
  const std::optional<LoraTarget> target = expert_target(inside);
  if (target && target->expert >= 0) return state_->of_expert(*target, n, k, experts);
  const LoraPair* const pair = state_->find({.module = std::string(inside)});
  if (!pair) return {};
  return state_->whole(*pair, n, k);
}

std::vector<std::string> LoraFile::modules() const {
  std::vector<std::string> out;
  for (const auto& [target, pair] : state_->pairs)
    if (target.layer < 0) out.push_back(target.module);
  return out;
}

std::vector<int> LoraFile::expert_layers() const {
  std::set<int> layers;
  for (const auto& [target, pair] : state_->pairs)
    if (target.layer >= 0) layers.insert(target.layer);
  return {layers.begin(), layers.end()};
}

}  // namespace kt::inline weights
