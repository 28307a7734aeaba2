#include "nn/gpu_experts.h"

#include "base/checked.h"
#include "base/error.h"
#include "nn/experts_state.h"

namespace kt::inline nn {
namespace {

constexpr int kBothThreads = 192, kOneThreads = 96;  // of blocks for gate and up; for one of them
constexpr int kSumThreads = 256;

// The rows of `all` [experts, width] that belong to copies, as they stand there.
DeviceBuffer biases_of(const GpuMemory& in, const std::vector<float>& all, int64_t width,
                       std::span<const int> hot, std::string_view what) {
  if (all.empty()) return {};
  std::vector<float> rows;
  rows.reserve(hot.size() * static_cast<size_t>(width));
  for (const int expert : hot)
    rows.insert(rows.end(), all.begin() + expert * width, all.begin() + (expert + 1) * width);
  return in.hold(rows.data(), rows.size() * sizeof(float), what);
}

// Of neighbours at once.
void copy_experts(const GpuMemory& in, const Shard& shard, std::span<const int> hot, const DeviceBuffer& to) {
  for (size_t first = 0, end = 0; first < hot.size(); first = end) {
    for (end = first + 1; end < hot.size() && hot[end] == hot[end - 1] + 1;) ++end;
    in.stream->copy(to.at(first * shard.expert_bytes), shard.expert(hot[first]),
                    (end - first) * shard.expert_bytes);
  }
  in.stream->wait();
}

// Where precision allows it operands are bf16, in blocks of kFewThreads.
std::string kernel_for(bool rounds, std::string_view what, const Packing& packing) {
  return text("kt_experts_{}{}_{}_{}", rounds ? "few_" : "", what, kernel_word(packing.format.code),
              packing.fragment.step_bytes);
}

}  // namespace

GpuExperts::GpuExperts(const GpuMemory& in, const Experts& from, std::span<const int> hot,
                       std::string_view name)
    : experts_(from.shape().experts),
      activation_(from.options().activation),
      skip_(static_cast<size_t>(experts_)) {
  held_.count = static_cast<int>(hot.size());
  const std::string what = text("experts of {}", name);
  rounds_ = from.options().precision != Precision::kF32;
  for (const Shard& shard : from.state().shards) {
    if (shard.empty()) continue;
    slices_.push_back({.gate = shard.gate.packing,
                       .up = shard.up.packing,
                       .down = shard.down.packing,
                       .gate_first = shard.gate.first,
                       .up_first = shard.up.first,
                       .down_first = shard.down.first,
                       .gate_stride = shard.gate.stride,
                       .up_stride = shard.up.stride,
                       .paired = shard.paired,
                       .expert_bytes = shard.expert_bytes,
                       .width = shard.width()});
    for (const StoredBlocks* part : {&shard.gate, &shard.up, &shard.down}) {
      const Format& format = part->packing.format;
      if (!hot.empty()) check_gpu_reads(format, what);
      rounds_ = rounds_ && gpu_reads(format) && format.code != Code::kF32;
    }
  }
  if (!hot.empty()) hold(in, from, hot, what);
}

void GpuExperts::hold(const GpuMemory& in, const Experts& from, std::span<const int> hot,
                      std::string_view what) {
  std::vector<int32_t> slots(skip_.size(), -1);
  for (size_t i = 0; i < hot.size(); ++i) {
    KT_CHECK(hot[i] > (i == 0 ? -1 : hot[i - 1]) && hot[i] < experts_, "expert {} of {} for the GPU", hot[i],
             experts_);
    skip_[static_cast<size_t>(hot[i])] = 1;
    slots[static_cast<size_t>(hot[i])] = static_cast<int32_t>(i);
  }
  if (!in.gpu) return;
  const auto keep = [&](DeviceBuffer buffer) { return memory_.emplace_back(std::move(buffer)).at(); };
  const auto biases = [&](const std::vector<float>& all, int64_t width) {
    return reinterpret_cast<const float*>(keep(biases_of(in, all, width, hot, what)));
  };
  for (const Shard& shard : from.state().shards) {
    if (shard.empty()) continue;
    DeviceBuffer blocks(in.gpu, hot.size() * shard.expert_bytes, what);
    copy_experts(in, shard, hot, blocks);
    held_.pieces.push_back({.blocks = keep(std::move(blocks)),
                            .gate_bias = biases(shard.gate_bias, shard.width()),
                            .up_bias = biases(shard.up_bias, shard.width())});
  }
  held_.slots =
      reinterpret_cast<const int32_t*>(keep(in.hold(slots.data(), slots.size() * sizeof(int32_t), what)));
  held_.down_bias = biases(from.state().down_bias, from.shape().hidden);
}

PackedRows GpuExperts::rows_of(const Packing& packing, const uint8_t* blocks, size_t first, size_t stride) {
  PackedRows out = packed_rows(packing, blocks + first);
  out.block_bytes = static_cast<int64_t>(stride);
  return out;
}

GateSpec GpuExperts::gate_spec() const {
  return {.kind = static_cast<int>(activation_.kind), .limit = activation_.limit, .alpha = activation_.alpha};
}

size_t GpuExperts::bytes() const {
  size_t sum = 0;
  for (const Slice& slice : slices_) sum += slice.expert_bytes * static_cast<size_t>(count());
  return sum;
}

int64_t GpuExperts::mid_floats(int tokens, int top_k) const {
  if (tokens > kMostHotTokens) return many_floats(tokens, top_k, count(), kRoundTokens);
  int64_t width = 0;
  for (const Slice& slice : slices_) width += slice.width;
  return int64_t{tokens} * top_k * width;
}

ChosenExperts GpuExperts::chosen(const Call& call, const Copies& copies) const {
  KT_CHECK(call.top_k <= kMostChosen && copies.count > 0 && (call.tokens <= kMostHotTokens || rounds_),
           "{} tokens, {} experts each", call.tokens, call.top_k);
  return {.ids = call.ids, .slots = copies.slots, .experts = experts_, .top_k = call.top_k};
}

void GpuExperts::launch_in(GpuStream& stream, const Call& call, size_t number, float* mid) const {
  const Slice& slice = slices_[number];
  const Piece& piece = held_.pieces[number];
  const auto launch = [&](int part, const Packing& packing, size_t first, size_t stride) {
    stream.launch(kernel_for(rounds_, "in", packing), packing.blocks, int64_t{call.tokens} * call.top_k,
                  rounds_                        ? kFewThreads
                  : part == ExpertsInArgs::kBoth ? kBothThreads
                                                 : kOneThreads,
                  ExpertsInArgs{.chosen = chosen(call, held_),
                                .part = part,
                                .weights = rows_of(packing, piece.blocks, first, stride),
                                .slot_bytes = static_cast<int64_t>(slice.expert_bytes),
                                .up_bytes = static_cast<int64_t>(slice.up_first - slice.gate_first),
                                .gate_bias = piece.gate_bias,
                                .up_bias = piece.up_bias,
                                .x = call.x,
                                .x_stride = call.x_stride,
                                .mid = mid,
                                .width = slice.width,
                                .gate = gate_spec()});
  };
  if (slice.paired) return launch(ExpertsInArgs::kBoth, slice.gate, slice.gate_first, slice.gate_stride);
  launch(ExpertsInArgs::kGate, slice.gate, slice.gate_first, slice.gate_stride);
  launch(ExpertsInArgs::kUp, slice.up, slice.up_first, slice.up_stride);
}

void GpuExperts::run_in(GpuStream& stream, const Call& call) const {
  float* mid = call.mid;
  for (size_t i = 0; i < slices_.size(); ++i) {
    launch_in(stream, call, i, mid);
    mid += int64_t{call.tokens} * call.top_k * slices_[i].width;
  }
}

void GpuExperts::run_out(GpuStream& stream, const Call& call) const {
  const float* mid = call.mid;
  for (size_t i = 0; i < slices_.size(); ++i) {
    const Slice& slice = slices_[i];
    stream.launch(kernel_for(rounds_, "out", slice.down), slice.down.blocks, call.tokens,
                  rounds_ ? kFewThreads : kSumThreads,
                  ExpertsOutArgs{.chosen = chosen(call, held_),
                                 .weights = rows_of(slice.down, held_.pieces[i].blocks, slice.down_first,
                                                    slice.down.block_bytes),
                                 .slot_bytes = static_cast<int64_t>(slice.expert_bytes),
                                 .bias = i == 0 ? held_.down_bias : nullptr,
                                 .pair_weights = call.weights,
                                 .mid = mid,
                                 .width = slice.width,
                                 .out = call.out,
                                 .out_stride = call.out_stride,
                                 .add = i > 0 || call.add});
    mid += int64_t{call.tokens} * call.top_k * slice.width;
  }
}

}  // namespace kt::inline nn
