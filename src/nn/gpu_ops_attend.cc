// Attention of GpuOps: which kernel takes which rows of a step.
#include "base/text.h"
#include "nn/cpu_work.h"
#include "nn/gpu_cache.h"
#include "nn/gpu_ops_state.h"

namespace kt::inline nn {
namespace {

constexpr int kSplitRows = 64;
constexpr int kSplitBlocks = 8192;  // rows and heads times groups of pages: more are busy enough as they are
constexpr int kAttendMatrixThreads = 128;
constexpr int kBusyBlocks = 512;  // so many keep a GPU busy without groups of pages,
constexpr int kBusyTokens = 32;   // and so many tokens of a sequence need no more room than their rows
constexpr int kManyTokens = 16;   // of a sequence: fewer read less if each splits its pages
constexpr size_t kMostParts = size_t{64}
                              << 20;  // bytes that groups of pages give in a launch, of more than one token
constexpr int kMostGridRows = 65535;

// Which kernel on matrix units takes such heads; none: they are too wide.
struct MatrixKernel {
  std::string name;
  int heads = 0;  // of a block
};
MatrixKernel matrix_kernel(const KvShape& shape) {
  const int widest = std::max(shape.d_pad(), shape.dv_pad());
  if (shape.type == KvType::kF32) return {};
  if (shape.shared && shape.heads == 1 && shape.d_pad() <= kLatentColumns && shape.dv_pad() <= kLatentValues)
    return {text("kt_attend_latent_{}", name_of(shape.type)), kLatentHeads};
  if (shape.shared || widest > kFewWideColumns) return {};
  return {text("kt_attend_few_{}{}", widest > kFewColumns ? "wide_" : "", name_of(shape.type)), kFewHeads};
}

// Whether tokens of a sequence may share a block's keys.
bool takes_many(const Attend& args, const KvShape& shape) {
  return !shape.shared && std::max(shape.d_pad(), shape.dv_pad()) <= kFewColumns &&
         args.heads / shape.heads <= kAttendManyRows;
}
// New tokens of a sequence from which on none of them has its pages split.
int least_whole(const Attend& args, const KvShape& shape) {
  const auto blocks = shape.heads * ceil_div(args.heads / shape.heads, matrix_kernel(shape).heads);
  return takes_many(args, shape)
             ? kManyTokens
             : std::clamp(static_cast<int>(ceil_div(kBusyBlocks, blocks)), 2, kBusyTokens);
}

}  // namespace

AttendRowsArgs GpuOps::attend_args(const Attend& args) const {
  const auto* const sinks = static_cast<const GpuVector*>(args.sinks);
  return {.plane = static_cast<const GpuCache&>(*step_.cache).plane(args.plane),
          .places = tables_.places(),
          .q = at(args.q),
          .out = at(args.out),
          .sinks = sinks ? sinks->data() : nullptr,
          .q_width = args.q.width,
          .out_width = args.out.width,
          .heads = args.heads,
          .window = args.window,
          .scale = args.scale};
}

// Groups of pages that a row sees at most, where rows alone would leave the GPU idle; else 1.
int GpuOps::groups_of(int blocks, int window) const {
  const int groups = std::min(most_pages(window), kAttendGroups);
  return step_.tokens <= kSplitRows && int64_t{blocks} * step_.tokens * groups <= kSplitBlocks ? groups : 1;
}

// Keys that a row sees at most, in pages.
int GpuOps::most_pages(int window) const {
  const int most = recording_ ? recording_->longest : longest();
  const int keys = window > 0 ? std::min(most, window + kPageTokens) : most;
  return std::max(1, (keys + kPageTokens - 1) / kPageTokens);
}

void GpuOps::attend(const Attend& args) {
  if (args.chunk > 0) refuse("chunks of attention");
  const KvShape& shape =
      measured_ ? measured_->shape->planes[static_cast<size_t>(args.plane)] : step_.cache->shape(args.plane);
  if (recording_)
    recording_->attended.push_back({.plane = args.plane, .heads = args.heads, .window = args.window});
  else
    for (const AttentionSequence& sequence : step_.sequences)
      count(place(), attention_work(shape, args.heads, {args.window}, sequence));
  if (!measured_) flush();
  if (args.exact || matrix_kernel(shape).heads == 0) return attend_exactly(args, shape);
  // Sequences with so many new tokens that these are taken together, and runs of others between them.
  if (measured_) {  // the most that may be: sequences of a plan have no tokens yet
    const auto most = std::ssize(step_.sequences) * (least_whole(args, shape) - 1);
    return attend_split(args, shape, {0, static_cast<int>(std::min<int64_t>(step_.tokens, most))});
  }
  int first = 0;
  for (const AttentionSequence& sequence : step_.sequences) {
    if (recording_ || sequence.count < least_whole(args, shape)) continue;
    attend_split(args, shape, {first, sequence.first - first});
    attend_whole(args, shape, {sequence.first, sequence.count});
    first = sequence.first + sequence.count;
  }
  attend_split(args, shape, {first, step_.tokens - first});
}

// Sums of products in f32, whatever the cache holds.
void GpuOps::attend_exactly(const Attend& args, const KvShape& shape) {
  const bool wide = shape.dv > kAttendThreads;
  const int blocks = shape.heads * static_cast<int>(ceil_div(args.heads / shape.heads,
                                                             wide ? kAttendWideHeads : kAttendHeads));
  const int groups = groups_of(blocks, args.window);
  const size_t parts = groups > 1
                           ? static_cast<size_t>(step_.tokens) * static_cast<size_t>(args.heads * groups) *
                                 static_cast<size_t>(shape.dv + 2)
                           : 0;
  if (measured_) {
    measured_->workspace = std::max(measured_->workspace, parts * sizeof(float));
    return;
  }
  AttendRowsArgs how = attend_args(args);
  const std::string kernel = text("kt_attend_{}{}", wide ? "wide_" : "", name_of(shape.type));
  if (parts == 0) return stream_->launch(kernel, blocks, step_.tokens, kAttendThreads, how);
  how.groups = groups;
  how.parts = scratch(parts);
  stream_->launch(kernel, blocks, int64_t{step_.tokens} * groups, kAttendThreads, how);
  stream_->launch("kt_attend_join", args.heads, step_.tokens, kAttendThreads, how);
}

// Rows of one sequence, each of which takes all its pages one after the other.
void GpuOps::attend_whole(const Attend& args, const KvShape& shape, const RowRange& rows) {
  AttendMatrixArgs how{.rows = attend_args(args), .first = rows.first, .whole = 1, .count = rows.count};
  how.rows.groups = 1;
  if (takes_many(args, shape)) {
    how.tiles = static_cast<int>(ceil_div(rows.count, kAttendManyRows / (args.heads / shape.heads)));
    return stream_->launch(text("kt_attend_many_{}", name_of(shape.type)), shape.heads, how.tiles,
                           kAttendMatrixThreads, how);
  }
  const MatrixKernel kernel = matrix_kernel(shape);
  stream_->launch(kernel.name, shape.heads * ceil_div(args.heads / shape.heads, kernel.heads), rows.count,
                  kAttendMatrixThreads, how);
}

// Rows whose pages are taken in groups at once: as many rows in a launch as there is room for what the groups give.
void GpuOps::attend_split(const Attend& args, const KvShape& shape, const RowRange& rows) {
  if (rows.count == 0) return;
  const int groups = std::min(most_pages(args.window), kAttendGroups);
  const size_t parts = groups > 1 ? static_cast<size_t>(args.heads * groups) : 0;  // of a token
  const size_t floats = parts * static_cast<size_t>(shape.dv_pad() + 2);
  const int room =
      floats > 0 ? std::max(1, static_cast<int>(kMostParts / (floats * sizeof(float)))) : rows.count;
  const int most = std::min({rows.count, room, kMostGridRows / groups});
  if (measured_) {
    measured_->workspace = std::max(measured_->workspace, static_cast<size_t>(most) * floats * sizeof(float));
    return;
  }
  const MatrixKernel kernel = matrix_kernel(shape);
  const int64_t blocks = shape.heads * ceil_div(args.heads / shape.heads, kernel.heads);
  AttendMatrixArgs how{.rows = attend_args(args), .first = rows.first};
  how.rows.groups = groups;
  if (parts > 0) {
    how.rows.parts = scratch(static_cast<size_t>(most) * floats);
    how.stats = how.rows.parts + static_cast<size_t>(most) * parts * static_cast<size_t>(shape.dv_pad());
  }
  for (const int end = rows.first + rows.count; how.first < end; how.first += most) {
    const int count = std::min(most, end - how.first);
    stream_->launch(kernel.name, blocks, int64_t{count} * groups, kAttendMatrixThreads, how);
    if (parts > 0)
      stream_->launch("kt_attend_sum", args.heads * ceil_div(shape.dv_pad(), kAttendSumColumns), count,
                      kAttendSumThreads, how);
  }
}

}  // namespace kt::inline nn
