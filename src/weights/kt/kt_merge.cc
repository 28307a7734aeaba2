// `.kt` folders into merged safetensors: no arithmetic, every array is copied under its other name.
#include <algorithm>
#include <filesystem>
#include <memory>
#include <set>

#include "base/error.h"
#include "base/sha256.h"
#include "weights/kt/kt_arrays.h"
#include "weights/kt/kt_folder.h"
#include "weights/kt/kt_origin.h"
#include "weights/kt/kt_plan.h"
#include "weights/kt/kt_shards.h"
#include "weights/plans/side_files.h"
#include "weights/plans/source_identity.h"

namespace kt::inline weights {
namespace {

// What the pieces read; shared by all of them.
struct Sources {
  std::unique_ptr<KtFolder> folder;
  std::unique_ptr<Checkpoint> original;  // null without one
  std::unique_ptr<ExpertSource> experts;
};

Piece copy_piece(const std::shared_ptr<Sources>& sources, const std::vector<KtName>& names, size_t first) {
  uint64_t bytes = 0, largest = 0;
  for (const KtName& name : names) {
    bytes += sources->folder->bytes(name);
    largest = std::max(largest, sources->folder->bytes(name));
  }
  const auto run = [sources, names, first](ShardOutput& out, Scratch& scratch, PieceReport&) {
    for (size_t i = 0; i < names.size(); ++i) {
      scratch.packed.resize(sources->folder->bytes(names[i]));
      sources->folder->read(names[i], scratch.packed);
      out.write(first + i, 0, scratch.packed);
    }
  };
  return {.source_bytes = bytes, .scratch_bytes = largest, .run = run};
}

// Consecutive arrays of the folder as one shard, a piece for every expert.
ShardPlan array_shard(const std::shared_ptr<Sources>& sources, const KtModel& model,
                      std::span<const KtName> names) {
  ShardPlan shard;
  shard.layer = names.front().layer;
  for (size_t at = 0; at < names.size();) {
    std::vector<KtName> expert;
    const size_t first = at;
    while (at < names.size() && names[at].layer == names[first].layer &&
           names[at].expert == names[first].expert)
      expert.push_back(names[at++]);
    for (const KtName& name : expert) shard.tensors.push_back(kt_tensor_spec(model, name));
    shard.pieces.push_back(copy_piece(sources, expert, first));
  }
  shard.metadata = kt_metadata(model, {names.begin(), names.end()});
  return shard;
}

// A long list of tensors cut into shards of at most `most`; pieces go where their tensors are.
std::vector<ShardPlan> cut_others(const Checkpoint& checkpoint, const ExpertSource& experts, size_t most) {
  std::vector<ShardPlan> out;
  ShardPlan all = other_tensors(checkpoint, experts);
  if (most == 0 || all.tensors.size() <= most) {
    if (!all.tensors.empty()) out.push_back(std::move(all));
    return out;
  }
  class Shifted : public ShardOutput {
   public:
    Shifted(ShardOutput& out, size_t by) : out_(out), by_(by) {}
    void write(size_t tensor, uint64_t offset, std::span<const std::byte> bytes) override {
      out_.write(tensor - by_, offset, bytes);
    }

   private:
    ShardOutput& out_;
    size_t by_;
  };
  size_t piece = 0;
  for (size_t first = 0; first < all.tensors.size(); first += most) {
    ShardPlan shard;
    uint64_t bytes = 0;
    for (size_t i = first; i < std::min(first + most, all.tensors.size()); ++i) {
      bytes += byte_count(all.tensors[i]);
      shard.tensors.push_back(all.tensors[i]);
    }
    // Pieces are in the order of their tensors and none spans two.
    for (uint64_t done = 0; done < bytes; ++piece) {
      done += all.pieces[piece].source_bytes;
      shard.pieces.push_back({.source_bytes = all.pieces[piece].source_bytes,
                              .scratch_bytes = 0,
                              .run = [run = all.pieces[piece].run, first](ShardOutput& to, Scratch& scratch,
                                                                          PieceReport& report) {
                                Shifted shifted(to, first);
                                run(shifted, scratch, report);
                              }});
    }
    out.push_back(std::move(shard));
  }
  return out;
}

// A number that differs when names or sizes do (FNV-1a): the list itself can have 10^5 entries.
uint64_t fingerprint(std::span<const KtEntry> entries) {
  uint64_t hash = 14695981039346656037u;
  for (const KtEntry& entry : entries) {
    for (const char c : text("{} {}\n", kt_tensor_name(entry.name), entry.bytes)) {
      hash ^= static_cast<unsigned char>(c);
      hash *= 1099511628211u;
    }
  }
  return hash;
}

// What arrays hold, as far as a reading of 256 MiB tells: all of them, or some spread over all layers.
Json contents_of(const Sources& sources) {
  constexpr uint64_t kMost = uint64_t{256} << 20;
  const std::span<const KtEntry> entries = sources.folder->entries();
  uint64_t total = 0;
  for (const KtEntry& entry : entries) total += entry.bytes;
  Sha256 sum;
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < entries.size(); i += 1 + total / kMost) {
    bytes.resize(entries[i].bytes);
    sources.folder->read(entries[i].name, bytes);
    sum.add(bytes);
  }
  Json out = sources.original ? source_contents(*sources.original) : Json::object();
  out["arrays"] = sum.hex();
  return out;
}

std::vector<SideFile> merged_side_files(const KtMergeOptions& options, const Sources& sources) {
  std::vector<SideFile> out = side_files_of(options.folder);
  std::erase_if(out, [](const SideFile& file) { return file.name == kKtFactsFile; });
  if (!sources.original) return out;
  std::set<std::string> known;
  std::vector<SideFile> files = side_files_of(sources.original->folder());
  for (const SideFile& file : files) known.insert(file.name);
  for (SideFile& file : out)
    if (!known.contains(file.name)) files.push_back(std::move(file));
  std::ranges::sort(files, {}, &SideFile::name);
  return files;
}

// Without other tensors: whose experts these are, as conversion says it or the folder does.
void add_origin(const KtMergeOptions& options, const Sources& sources, const KtModel& model,
                std::vector<SideFile>& files) {
  const Json origin = sources.original ? kt_origin(*sources.original) : kt_origin_in(options.folder);
  if (!origin.is_null())
    files.push_back({.name = std::string(kKtFactsFile), .text = kt_facts(model, origin), .from = {}});
}

void check_original(const KtMergeOptions& options, const KtInventory& inventory,
                    const ExpertSource& experts) {
  const KtModel& model = inventory.model;
  if (experts.hidden() != model.hidden || experts.inter() != model.inter ||
      experts.experts() != inventory.experts || experts.layers() != inventory.layers)
    fail("{}: {} layers of {} experts, hidden {}, intermediate {}; the original {} has {}, {}, {}, {}",
         options.folder, inventory.layers.size(), inventory.experts, model.hidden, model.inter,
         options.original, experts.layers().size(), experts.experts(), experts.hidden(), experts.inter());
}

}  // namespace

ConversionPlan plan_merge(const KtMergeOptions& options) {
  if (options.max_tensors < 0) fail("`max_tensors` {}: expected 1 or more", options.max_tensors);
  if (!has_kt_layers(options.folder) && is_kt_weights(options.folder))
    fail("{}: merged already: its converted experts are in safetensors; _layer_* folders are what is merged",
         options.folder);
  const auto sources = std::make_shared<Sources>();
  sources->folder = std::make_unique<KtFolder>(options.folder);
  const KtInventory& inventory = sources->folder->inventory();
  KtModel model = inventory.model;
  if (!options.original.empty()) {
    sources->original = std::make_unique<Checkpoint>(options.original, options.families);
    sources->experts = open_experts(*sources->original);
    check_original(options, inventory, *sources->experts);
    if (model.source.empty()) model.source = std::string(sources->experts->dialect());
  }
  if (model.tool.empty()) model.tool = options.tool;

  ConversionPlan plan;
  plan.input = options.folder;
  plan.output = options.output;
  plan.settings = {{"output", "kt-merged"},
                   {"bits", model.bits},
                   {"parts", model.parts},
                   {"backward", model.backward},
                   {"rounding", model.rounding},
                   {"source", model.source},
                   {"tool", model.tool},
                   {"max_tensors", options.max_tensors},
                   {"arrays", inventory.layers.size() * static_cast<size_t>(inventory.experts) *
                                  kt_expert_arrays(model, 0, 0).size()},
                   {"fingerprint", fingerprint(sources->folder->entries())},
                   {"files", sources->original ? source_files(*sources->original) : Json::array()},
                   {"contents", contents_of(*sources)}};
  std::vector<KtName> names;
  for (const KtEntry& entry : sources->folder->entries()) names.push_back(entry.name);
  const size_t layer_arrays = names.size() / inventory.layers.size();
  const size_t most = options.max_tensors > 0 ? static_cast<size_t>(options.max_tensors) : layer_arrays;
  for (size_t first = 0; first < names.size(); first += most)
    plan.shards.push_back(
        array_shard(sources, model, std::span(names).subspan(first, std::min(most, names.size() - first))));
  const size_t experts_shards = plan.shards.size();
  if (sources->original) {
    for (ShardPlan& shard :
         cut_others(*sources->original, *sources->experts, static_cast<size_t>(options.max_tensors))) {
      shard.metadata = kt_metadata(model, {});
      plan.shards.push_back(std::move(shard));
    }
  }
  name_shards(plan);
  plan.side_files = merged_side_files(options, *sources);
  if (plan.shards.size() == experts_shards) add_origin(options, *sources, model, plan.side_files);
  plan.check_source = [sources] {
    if (sources->original) sources->original->check_unchanged();
  };
  return plan;
}

}  // namespace kt::inline weights
