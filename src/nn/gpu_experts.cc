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
      count_(static_cast<int>(hot.size())),
      activation_(from.options().activation),
      skip_(static_cast<size_t>(experts_)) {
  if (hot.empty()) return;
  std::vector<int32_t> slots(skip_.size(), -1);
  for (size_t i = 0; i < hot.size(); ++i) {
    KT_CHECK(hot[i] > (i == 0 ? -1 : hot[i - 1]) && hot[i] < experts_, "expert {} of {} for the GPU", hot[i],
             experts_);
    skip_[static_cast<size_t>(hot[i])] = 1;
    slots[static_cast<size_t>(hot[i])] = static_cast<int32_t>(i);
  }
  const std::string what = text("experts of {}", name);
  rounds_ = from.options().precision != Precision::kF32;
  const Experts::State& state = from.state();
  for (const Shard& shard : state.shards) {
    if (shard.empty()) continue;
    Piece& piece = pieces_.emplace_back(Piece{.gate = shard.gate.packing,
                                              .up = shard.up.packing,
                                              .down = shard.down.packing,
                                              .gate_first = shard.gate.first,
                                              .up_first = shard.up.first,
                                              .down_first = shard.down.first,
                                              .gate_stride = shard.gate.stride,
                                              .up_stride = shard.up.stride,
                                              .paired = shard.paired,
                                              .expert_bytes = shard.expert_bytes,
                                              .width = shard.width(),
                                              .blocks = {},
                                              .gate_bias = {},
                                              .up_bias = {}});
    for (const Packing* packing : {&piece.gate, &piece.up, &piece.down}) {
      check_gpu_reads(packing->format, what);
      rounds_ = rounds_ && packing->format.code != Code::kF32;
    }
    if (!in.gpu) continue;
    piece.blocks = DeviceBuffer(in.gpu, hot.size() * shard.expert_bytes, what);
    copy_experts(in, shard, hot, piece.blocks);
    piece.gate_bias = biases_of(in, shard.gate_bias, shard.width(), hot, what);
    piece.up_bias = biases_of(in, shard.up_bias, shard.width(), hot, what);
  }
  slots_ = in.hold(slots.data(), slots.size() * sizeof(int32_t), what);
  if (in.gpu) down_bias_ = biases_of(in, state.down_bias, from.shape().hidden, hot, what);
}

PackedRows GpuExperts::rows_of(const Packing& packing, const DeviceBuffer& blocks, size_t first,
                               size_t stride) {
  PackedRows out = packed_rows(packing, blocks.at(first));
  out.block_bytes = static_cast<int64_t>(stride);
  return out;
}

GateSpec GpuExperts::gate_spec() const {
  return {.kind = static_cast<int>(activation_.kind), .limit = activation_.limit, .alpha = activation_.alpha};
}

size_t GpuExperts::bytes() const {
  size_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.expert_bytes * static_cast<size_t>(count_);
  return sum;
}

int64_t GpuExperts::mid_floats(int tokens, int top_k) const {
  if (tokens > kMostHotTokens) return many_floats(tokens, top_k);
  int64_t width = 0;
  for (const Piece& piece : pieces_) width += piece.width;
  return int64_t{tokens} * top_k * width;
}

ChosenExperts GpuExperts::chosen(const Call& call) const {
  KT_CHECK(call.top_k <= kMostChosen && takes(call.tokens), "{} tokens, {} experts each", call.tokens,
           call.top_k);
  return {.ids = call.ids, .slots = slots(), .experts = experts_, .top_k = call.top_k};
}

void GpuExperts::launch_in(GpuStream& stream, const Call& call, const Piece& piece, float* mid) const {
  const auto launch = [&](int part, const Packing& packing, size_t first, size_t stride) {
    stream.launch(kernel_for(rounds_, "in", packing), packing.blocks, int64_t{call.tokens} * call.top_k,
                  rounds_                        ? kFewThreads
                  : part == ExpertsInArgs::kBoth ? kBothThreads
                                                 : kOneThreads,
                  ExpertsInArgs{.chosen = chosen(call),
                                .part = part,
                                .weights = rows_of(packing, piece.blocks, first, stride),
                                .slot_bytes = static_cast<int64_t>(piece.expert_bytes),
                                .up_bytes = static_cast<int64_t>(piece.up_first - piece.gate_first),
                                .gate_bias = piece.gate_bias.as<const float>(),
                                .up_bias = piece.up_bias.as<const float>(),
                                .x = call.x,
                                .x_stride = call.x_stride,
                                .mid = mid,
                                .width = piece.width,
                                .gate = gate_spec()});
  };
  if (piece.paired) return launch(ExpertsInArgs::kBoth, piece.gate, piece.gate_first, piece.gate_stride);
  launch(ExpertsInArgs::kGate, piece.gate, piece.gate_first, piece.gate_stride);
  launch(ExpertsInArgs::kUp, piece.up, piece.up_first, piece.up_stride);
}

void GpuExperts::run_in(GpuStream& stream, const Call& call) const {
  float* mid = call.mid;
  for (const Piece& piece : pieces_) {
    launch_in(stream, call, piece, mid);
    mid += int64_t{call.tokens} * call.top_k * piece.width;
  }
}

void GpuExperts::run_out(GpuStream& stream, const Call& call) const {
  const float* mid = call.mid;
  for (const Piece& piece : pieces_) {
    const bool first = &piece == &pieces_.front();
    stream.launch(
        kernel_for(rounds_, "out", piece.down), piece.down.blocks, call.tokens,
        rounds_ ? kFewThreads : kSumThreads,
        ExpertsOutArgs{.chosen = chosen(call),
                       .weights = rows_of(piece.down, piece.blocks, piece.down_first, piece.down.block_bytes),
                       .slot_bytes = static_cast<int64_t>(piece.expert_bytes),
                       .bias = first ? down_bias_.as<const float>() : nullptr,
                       .pair_weights = call.weights,
                       .mid = mid,
                       .width = piece.width,
                       .out = call.out,
                       .out_stride = call.out_stride,
                       .add = !first || call.add});
    mid += int64_t{call.tokens} * call.top_k * piece.width;
  }
}

}  // namespace kt::inline nn
