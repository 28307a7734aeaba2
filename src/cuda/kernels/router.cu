// Which experts a token goes to: nn/router.h on a GPU, equal scores to the lower id as there.
#include "cuda/gpu.h"
#include "cuda/kernels/args.h"

namespace kt::inline cuda {

constexpr float kNever = -3.4e38f;

KT_GPU int shuffled(int value, int mask) {
  return static_cast<int>(gpu::bits_of(gpu::shuffle_xor(gpu::float_of(static_cast<uint32_t>(value)), mask)));
}

// exp(x - largest) / sum, by one warp.
KT_GPU void softmax(float* x, int count) {
  float most = kNever, sum = 0;
  for (int i = gpu::thread(); i < count; i += gpu::kWarp) most = x[i] > most ? x[i] : most;
  most = gpu::warp_max(most);
  for (int i = gpu::thread(); i < count; i += gpu::kWarp) {
    x[i] = gpu::exp(x[i] - most);
    sum += x[i];
  }
  sum = gpu::warp_sum(sum);
  for (int i = gpu::thread(); i < count; i += gpu::kWarp) x[i] /= sum;
}

// Takes the experts of all but the best groups out of the choice.
KT_GPU void keep_best_groups(const RouteArgs& args, float* choice, float* groups) {
  const int size = args.experts / args.groups;
  for (int g = gpu::thread(); g < args.groups; g += gpu::kWarp) {
    float first = kNever, second = kNever;
    for (int i = 0; i < size; ++i) {
      const float x = choice[g * size + i];
      const float less = first < x ? first : x;
      second = second > less ? second : less;
      first = first > x ? first : x;
    }
    groups[g] = args.group_top_two ? first + (size > 1 ? second : 0.0f) : first;
  }
  gpu::barrier();
  for (int g = gpu::thread(); g < args.groups; g += gpu::kWarp) {
    int better = 0;
    for (int other = 0; other < args.groups; ++other)
      better += groups[other] > groups[g] || (groups[other] == groups[g] && other < g);
    for (int i = 0; better >= args.top_groups && i < size; ++i) choice[g * size + i] = kNever;
  }
  gpu::barrier();
}

// A block of one warp for each token.
KT_KERNEL(kt_route, RouteArgs, args, 32) {
  KT_SHARED(float, scores, kMostRouted);
  KT_SHARED(float, choice, kMostRouted);
  KT_SHARED(float, groups, kMostRouted);
  KT_SHARED(float, weights, kMostChosen);
  const int token = gpu::block(), lane = gpu::thread();
  const bool live = !args.step || token < args.step->tokens;
  for (int e = lane; e < args.experts; e += gpu::kWarp) {
    const float logit = args.scores[token * args.width + e];
    scores[e] = args.sigmoid ? 1.0f / (1.0f + gpu::exp(-logit)) : logit;
  }
  gpu::barrier();
  if (!args.sigmoid && !args.softmax_of_chosen) softmax(scores, args.experts);
  for (int e = lane; e < args.experts; e += gpu::kWarp) {
    const float x = scores[e] + (args.correction ? args.correction[e] : 0.0f);
    choice[e] = x >= kNever ? x : kNever;  // NaN compares with nothing
  }
  gpu::barrier();
  if (args.groups > 1) keep_best_groups(args, choice, groups);
  for (int slot = 0; slot < args.top_k; ++slot) {
    float best = -gpu::float_of(0x7F800000u);
    int id = args.experts;
    for (int e = lane; e < args.experts; e += gpu::kWarp)
      if (choice[e] > best) best = choice[e], id = e;
    for (int mask = gpu::kWarp / 2; mask > 0; mask /= 2) {
      const float other = gpu::shuffle_xor(best, mask);
      const int other_id = shuffled(id, mask);
      if (other > best || (other == best && other_id < id)) best = other, id = other_id;
    }
    gpu::barrier();  // all have looked
    if (lane == 0) {
      args.ids[token * args.top_k + slot] = live ? id : -1;
      weights[slot] = scores[id];
      choice[id] = -gpu::float_of(0x7F800000u);  // chosen
    }
    gpu::barrier();
  }
  if (args.softmax_of_chosen) softmax(weights, args.top_k);
  gpu::barrier();
  if (args.forced && live) {
    const int round = static_cast<int>((args.positions[token] + int64_t{97} * token) % args.forced_rounds);
    for (int slot = lane; slot < args.top_k; slot += gpu::kWarp)
      args.ids[token * args.top_k + slot] = static_cast<int>(args.forced[int64_t{round} * args.top_k + slot]);
  }
  if (lane != 0) return;
  float sum = 0;
  for (int slot = 0; slot < args.top_k; ++slot) sum += weights[slot];
  sum += args.normalise_floor;
  sum = sum > args.normalise_least ? sum : args.normalise_least;
  for (int slot = 0; slot < args.top_k; ++slot) {
    const float weight = args.normalise ? weights[slot] / sum : weights[slot];
    args.weights[token * args.top_k + slot] = weight * args.scale;
  }
}

}  // namespace kt::inline cuda
