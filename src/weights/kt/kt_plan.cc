#include "weights/kt/kt_plan.h"

#include <algorithm>
#include <memory>

#include "base/error.h"
#include "base/log.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_expert.h"
#include "weights/kt/kt_origin.h"
#include "weights/kt/kt_shards.h"
#include "weights/plans/side_files.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

std::string_view name_of(Rounding rounding) {
  return rounding == Rounding::kDirect ? "direct" : "established";
}

void check_parts(const KtPlanOptions& options, int64_t inter) {
  constexpr int kMostParts = 64;
  if (options.parts >= 1 && options.parts <= kMostParts && inter % options.parts == 0) return;
  std::string possible;
  for (int parts = 1; parts <= 16; ++parts)
    if (inter % parts == 0) possible += text_of(possible.empty() ? "{}" : ", {}", parts);
  fail("{} parts do not divide an intermediate size of {}: {} would", options.parts, inter, possible);
}

void check_source(const ExpertSource& source, const std::string& path) {
  if (source.layers().empty() || source.experts() < 1)
    fail_as(ErrorKind::kUnsupported, "{}: no layer with experts", path);
  for (const Projection projection : kProjections) {
    if (source.bias(source.layers().front(), 0, projection))
      fail_as(ErrorKind::kUnsupported,
              "{}: experts have biases ({}), which kt weights cannot hold; int4 in groups can (`group_size`)",
              path, source.module_name(source.layers().front(), 0, projection));
  }
}

uint64_t source_bytes(const ExpertSource& source, int layer) {
  double bits = 0;
  for (const Projection projection : kProjections) {
    const auto matrix = source.at(layer, 0, projection);
    bits += stored_bits(matrix->format, matrix->n, matrix->k) * static_cast<double>(matrix->n) *
            static_cast<double>(matrix->k);
  }
  return static_cast<uint64_t>(bits / 8);
}

ShardPlan layer_shard(const ExpertSource& source, const KtModel& model, const KtPlanOptions& options,
                      int layer) {
  ShardPlan shard;
  shard.file = text("_layer_{}", layer);
  shard.folder = !options.merge;
  shard.layer = layer;
  std::vector<KtName> arrays;
  KtExpertJob job{.source = &source,
                  .model = model,
                  .rounding = options.rounding,
                  .report = options.report,
                  .layer = layer};
  const uint64_t scratch = kt_expert_scratch(job), bytes = source_bytes(source, layer);
  const auto shared = std::make_shared<const KtExpertJob>(job);
  for (int expert = 0; expert < source.experts(); ++expert) {
    const size_t first = shard.tensors.size();
    for (const KtName& name : kt_expert_arrays(model, layer, expert)) {
      arrays.push_back(name);
      shard.tensors.push_back(options.merge ? kt_tensor_spec(model, name) : kt_file_spec(model, name));
    }
    shard.pieces.push_back(
        {.source_bytes = bytes,
         .scratch_bytes = scratch,
         .run = [shared, expert, first](ShardOutput& out, Scratch& buffers, PieceReport& report) {
           KtExpertJob mine = *shared;
           mine.expert = expert;
           mine.first_tensor = first;
           kt_write_expert(mine, out, buffers, report);
         }});
  }
  if (options.merge) shard.metadata = kt_metadata(model, arrays);
  return shard;
}

// config.json of a model that has none as a file (GGUF): what its metadata say.
void add_config(const Checkpoint& checkpoint, std::vector<SideFile>& files) {
  const bool there =
      std::ranges::any_of(files, [](const SideFile& file) { return file.name == "config.json"; });
  if (there || !checkpoint.config_json().is_object() || checkpoint.config_json().empty()) return;
  files.push_back({.name = "config.json",
                   .text = checkpoint.config_json().dump(2, ' ', true, Json::error_handler_t::replace) + "\n",
                   .from = {}});
}

}  // namespace

ConversionPlan plan_kt_weights(const Checkpoint& checkpoint, const ExpertSource& source,
                               const KtPlanOptions& options) {
  check_source(source, checkpoint.path());
  check_parts(options, source.inter());
  const KtModel model{.bits = options.bits,
                      .hidden = source.hidden(),
                      .inter = source.inter(),
                      .parts = options.parts,
                      .backward = options.backward,
                      .rounding = std::string(name_of(options.rounding)),
                      .source = std::string(source.dialect()),
                      .tool = options.tool};
  if (kt_padded(model))
    log_once(LogLevel::kWarning,
             "hidden {} and inter {} in {} parts do not fill the layout's tiles: padded with zeros and noted "
             "in the files; "
             "programs that do not know the note cannot read them",
             model.hidden, model.inter, model.parts);
  ConversionPlan plan;
  plan.input = checkpoint.path();
  plan.output = options.output;
  plan.settings = {{"output", options.merge ? "kt" : "kt-folder"},
                   {"bits", model.bits},
                   {"parts", model.parts},
                   {"backward", model.backward},
                   {"rounding", model.rounding},
                   {"source", model.source},
                   {"hidden", model.hidden},
                   {"inter", model.inter},
                   {"experts", source.experts()},
                   {"layers", source.layers()},
                   {"tool", model.tool},
                   {"files", source_files(checkpoint)},
                   {"contents", source_contents(checkpoint)}};
  for (const int layer : source.layers()) plan.shards.push_back(layer_shard(source, model, options, layer));
  plan.side_files = side_files_of(checkpoint.folder());
  add_config(checkpoint, plan.side_files);
  plan.index = options.merge;
  bool whole = false;
  if (options.merge) {
    ShardPlan others = other_tensors(checkpoint, source);
    others.metadata = kt_metadata(model, {});
    whole = !others.tensors.empty();
    if (whole) plan.shards.push_back(std::move(others));
    name_shards(plan);
  }
  if (!whole)
    plan.side_files.push_back(
        {.name = std::string(kKtFactsFile), .text = kt_facts(model, kt_origin(checkpoint)), .from = {}});
  plan.check_source = [&checkpoint] { checkpoint.check_unchanged(); };
  return plan;
}

}  // namespace kt::inline weights
