#include "cli/sft/training_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>

#include "base/cpu.h"
#include "base/memory.h"
#include "cli/doctor/doctor.h"
#include "cli/model_estimate.h"
#include "cli/registry/registry.h"
#include "cli/sft/output_folder.h"
#include "engine/opened_model.h"
#include "models/rule_matches.h"
#include "text/shown.h"
#include "weights/weight_method.h"

namespace kt::inline cli {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostProposedRows = 64;

bool is_float(const std::string& dialect) {
  return dialect == "bf16" || dialect == "fp16" || dialect == "f32";
}

bool multiplies_bf16() {
  const CpuFacts& facts = cpu();
  return facts.avx512_bf16 || facts.amx_bf16 || facts.bf16;
}

// What a file's name says of rules: "DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml". Nothing for another name.
std::optional<RuleWishes> wishes_of_name(const std::string& path) {
  const std::string name = fs::path(path).stem().string();
  if (name.find("-sft") == name.npos) return std::nullopt;
  RuleWishes out;
  constexpr std::string_view kSeveral = "-multi-gpu";
  if (const size_t at = name.find(kSeveral); at != name.npos) {
    const std::string rest = name.substr(at + kSeveral.size());
    const int count = rest.size() > 1 && rest[0] == '-' ? std::atoi(rest.c_str() + 1) : 2;
    for (int i = 0; i < std::clamp(count, 1, 64); ++i) out.devices.push_back(text("cuda:{}", i));
  }
  return out;
}

RuleWishes wishes_of_rules(const RuleFile& file, const ModuleTree& tree) {
  const RuleMatches matches = match_rules(file, tree);
  RuleWishes out;
  std::set<std::string> devices, formats;
  for (size_t i = 0; i < tree.modules.size(); ++i) {
    if (matches.rule[i] < 0) continue;
    const OperatorUse& use = matches.uses[static_cast<size_t>(matches.rule[i])];
    if (use.device.starts_with("cuda")) devices.insert(use.device == "cuda" ? "cuda:0" : use.device);
    if (tree.modules[i].kind != ModuleKind::kExperts) continue;
    formats.insert(use.format == "stored" ? "" : use.format);
  }
  if (formats.size() > 1)
    fail("{}: rules ask for experts in {} formats; training holds all in one", file.name, formats.size());
  if (!formats.empty()) out.format = *formats.begin();
  out.devices.assign(devices.begin(), devices.end());
  return out;
}

// The format of kt_backend, "" for one that leaves experts as they are.
std::string backend_format(const std::string& backend) {
  const std::string name = backend.substr(0, backend.find("_SkipLoRA"));
  if (name.empty() || name == "auto" || name == "AMXBF16" || name == "BF16") return "";
  if (name == "INT8" || name == "AMXINT8") return "int8";
  if (name == "INT4" || name == "AMXINT4") return "int4";
  return "fp8";
}

struct FreeGpu {
  std::string name;
  uint64_t bytes = 0;
};

// As torch will number them.
std::vector<FreeGpu> gpus_here() {
  std::vector<FreeGpu> out;
  Diagnosis found;
  look_at_gpu(found, this_machine(""), GpuTest::kSkip);
  const auto cuda = found.facts.find("cuda");
  if (cuda == found.facts.end() || !cuda->is_object()) return out;
  for (const auto& gpu : cuda->at("gpus")) {
    const auto total = gpu.at("total_bytes").get<uint64_t>(), left = gpu.at("free_bytes").get<uint64_t>();
    out.push_back({gpu.at("name").get<std::string>(), left > 0 ? left : total});
  }
  return out;
}

class Planner {
 public:
  explicit Planner(Recipe recipe) : out_(std::move(recipe)) {}

  TrainingPlan plan() {
    check_switches();
    out_.notes = recipe().notes();
    note_keys_of_others();
    out_.rows = find_rows(recipe(), "dataset");
    if (out_.rows.empty()) recipe().fail("dataset", "no dataset is named");
    out_.eval_rows = find_rows(recipe(), "eval_dataset");
    for (const auto* rows : {&out_.rows, &out_.eval_rows})
      for (const TrainingRows& one : *rows)
        out_.notes.insert(out_.notes.end(), one.notes.begin(), one.notes.end());
    open_output();
    find_model();
    open_model();
    choose_lora();
    choose_devices();
    choose_batch();
    return std::move(out_);
  }

 private:
  const Recipe& recipe() const { return out_.recipe; }
  void note(std::string line) { out_.notes.push_back(std::move(line)); }

  void check_switches() {
    for (const char* const key : {"model_name_or_path", "dataset", "output_dir"})
      if (!recipe().given(key)) recipe().fail(key, "is missing, and a training recipe needs it");
    if (!recipe().flag("do_train"))
      recipe().fail("do_train", "false: there is nothing to do for kt sft train");
    if (!recipe().flag("use_kt"))
      recipe().fail("use_kt", "false: experts run on KT here; without KT it is LLaMA-Factory's own train");
    const char* const world = std::getenv("WORLD_SIZE");
    if (world && std::atoi(world) > 1)
      fail_as(ErrorKind::kUnsupported,
              "WORLD_SIZE is {}: training is one process here, which uses all cores and may use several "
              "GPUs; start kt sft train "
              "alone, without torchrun or accelerate launch",
              shown(world));
    if (recipe().text("stage") == "kto" && recipe().given("pref_loss") &&
        recipe().text("pref_loss") != "sigmoid")
      recipe().fail("pref_loss", "of stage: dpo; kto has a loss of its own");
    for (const char* const kind : {"kt_config.kt_lora_rank", "kt_config.kt_lora_alpha"}) {
      const std::string own = std::string(kind).substr(std::string_view("kt_config.kt_").size());
      if (recipe().given(kind) && recipe().given(own) && recipe().number(kind) != recipe().number(own))
        recipe().fail(kind, "{}, and {} is {}: experts and attention have the same", recipe().number(kind),
                      own, recipe().number(own));
    }
  }

  // What the recipe says and its stage does not ask: LLaMA-Factory's own files have such keys, so they are told and no
  // more.
  void note_keys_of_others() {
    struct Asked {
      const char *key, *stages, *losses;  // the loss: of stage dpo
    };
    constexpr Asked kAsked[] = {{"pref_beta", "dpo kto", "sigmoid orpo simpo"},
                                {"pref_loss", "dpo", "sigmoid orpo simpo"},
                                {"pref_ftx", "dpo", "sigmoid"},
                                {"simpo_gamma", "dpo", "simpo"},
                                {"dpo_label_smoothing", "dpo", "sigmoid"},
                                {"kto_chosen_weight", "kto", ""},
                                {"kto_rejected_weight", "kto", ""},
                                {"packing", "sft", ""},
                                {"neat_packing", "sft", ""},
                                {"mask_history", "sft", ""},
                                {"train_on_prompt", "sft", ""},
                                {"compute_accuracy", "sft", ""}};
    const std::string stage = recipe().text("stage"), loss = recipe().text("pref_loss");
    const auto has = [](std::string_view list, std::string_view word) {
      return list.find(word) != list.npos;
    };
    std::map<std::string, std::string> others;  // by what asks for them
    for (const Asked& row : kAsked) {
      const bool asked = has(row.stages, stage) && (stage != "dpo" || has(row.losses, loss) || !*row.losses);
      const Json value = recipe().value(row.key);
      if (asked || !recipe().given(row.key) || value == false || value == 0) continue;
      std::string& keys =
          others[has(row.stages, stage) ? text("pref_loss {}", row.losses) : text("stage {}", row.stages)];
      keys += text("{}{}", keys.empty() ? "" : ", ", row.key);
    }
    for (const auto& [of, keys] : others) note(text("{}: of {}; nothing here", keys, of));
  }

  void open_output() {
    out_.output = recipe().text("output_dir");
    const OutputFolder found = look_at_output(recipe());
    out_.resume = found.resume;
    if (!found.note.empty()) note(found.note);
  }

  void find_model() {
    const std::string model = beside_recipe(recipe(), recipe().text("model_name_or_path"));
    ResolvedModel found = kt::find_model(model);
    out_.name = recipe().text("model_name_or_path");
    out_.model = found.path;
    out_.weights = found.weights;
    if (found.path.ends_with(".gguf"))
      recipe().fail(
          "model_name_or_path",
          "{} is a GGUF file; torch needs the model's own folder, and takes the experts of a GGUF file as "
          "kt_weight_path",
          found.path);
    for (const char* const key : {"kt_config.kt_expert_checkpoint_path", "kt_expert_checkpoint_path",
                                  "kt_config.kt_weight_path", "kt_weight_path"})
      if (recipe().given(key))
        out_.weights = kt::find_model(beside_recipe(recipe(), recipe().text(key))).path;
    if (const std::vector<std::string> adapters = recipe().names("adapter_name_or_path"); !adapters.empty()) {
      if (adapters.size() > 1)
        recipe().fail("adapter_name_or_path", "{} adapters; training goes on with one", adapters.size());
      const std::string folder = recipe().text("adapter_folder");
      out_.adapter = beside_recipe(recipe(), folder.empty() ? adapters[0] : folder + "/" + adapters[0]);
      check_adapter(recipe(), out_.adapter);
    }
  }

  void open_model() {
    ModelOptions options{.weights = out_.weights,
                         .threads = chosen_threads(),
                         .nodes = chosen_nodes(),
                         .max_tokens = 16,
                         .tokenizer = TokenizerNeed::kIfReadable};
    auto model = std::make_unique<OpenedModel>(out_.model, options);
    spec_ = model->spec();
    if (!spec_.moe())
      recipe().fail("model_name_or_path",
                    "{} ({}) has no routed experts; transformers and PEFT train it by themselves", out_.model,
                    spec_.family);
    if (model->checkpoint().is_gguf())
      recipe().fail(
          "model_name_or_path",
          "{} holds GGUF files; torch needs the model's own folder, and takes them as kt_weight_path",
          out_.model);
    if (model->checkpoint().has_kt_experts())
      recipe().fail(
          "model_name_or_path",
          "{} is what kt quant wrote; torch needs the model's own folder, and takes it as kt_weight_path",
          out_.model);
    if (model->chat_template().empty())
      recipe().fail("model_name_or_path", "{} has no chat template, which says how messages become text",
                    out_.model);
    if (!model->experts_path().empty()) {  // what kt quant wrote, by itself
      out_.weights = model->experts_path();
      out_.model = model->checkpoint().folder();
    }
    tree_ = module_tree(spec_);
    out_.stored = model->experts_dialect();
    choose_format();
    if (!out_.format.empty()) {
      options.format = out_.format;
      options.weights = out_.weights;
      model = std::make_unique<OpenedModel>(out_.model, options);
    }
    out_.family = spec_.family;
    out_.layers = static_cast<int>(spec_.layers.size());
    out_.routed_layers = static_cast<int>(
        std::ranges::count_if(spec_.layers, [](const LayerSpec& layer) { return layer.moe() != nullptr; }));
    out_.experts = spec_.moe()->experts;
    out_.top_k = spec_.moe()->top_k;
    out_.parameters = dense_parameters(spec_, tree_) + expert_parameters(spec_);
    out_.threads = model->threads();
    out_.nodes = model->nodes();
    packed_ = model->memory_plan({.context = 1}).host().experts;
  }

  int chosen_threads() const {
    for (const char* const key : {"cpu_infer", "kt_config.kt_num_threads"})
      if (recipe().given(key)) return static_cast<int>(recipe().integer(key));
    return 0;
  }
  int chosen_nodes() const { return static_cast<int>(recipe().integer("kt_config.kt_threadpool_count")); }

  // Of the recipe's backend, else of its rules; stored codes stay what they are.
  void choose_format() {
    RuleWishes wishes = read_rule_file();
    devices_ = wishes.devices;
    std::string from = "kt_optimize_rule";
    if (recipe().given("kt_config.kt_backend")) {
      wishes.format = backend_format(recipe().text("kt_config.kt_backend"));
      from = "kt_backend";
    }
    if (wishes.format.empty() || wishes.format == out_.stored) return;
    if (is_float(out_.stored) && wishes.format != "bf16")
      out_.format = wishes.format;
    else if (!is_float(out_.stored) && out_.stored.find(wishes.format) == out_.stored.npos)
      note(text("{}: experts are stored as {}, and are trained as they are, not as {}", from, out_.stored,
                wishes.format));
  }

  RuleWishes read_rule_file() {
    const std::string given = recipe().text("kt_optimize_rule");
    if (given.empty()) return {};
    const std::string path = beside_recipe(recipe(), given);
    if (fs::exists(path)) return wishes_of_rules(read_rules(path), tree_);
    const auto wishes = wishes_of_name(path);
    if (!wishes) recipe().fail("kt_optimize_rule", "{}: no such file", shown(path));
    note(text(
        "kt_optimize_rule: no file {}; its name says all: experts as they are stored, {}", shown(path),
        wishes->devices.empty() ? "one GPU where there is one" : text("{} GPUs", wishes->devices.size())));
    return *wishes;
  }

  void choose_lora() {
    out_.rank = recipe().integer(recipe().given("lora_rank") || !recipe().given("kt_config.kt_lora_rank")
                                     ? "lora_rank"
                                     : "kt_config.kt_lora_rank");
    out_.alpha = 2.0 * static_cast<double>(out_.rank);
    for (const char* const key : {"kt_config.kt_lora_alpha", "lora_alpha"})
      if (recipe().given(key)) out_.alpha = recipe().number(key);
    out_.targets = recipe().names("lora_target");
    std::vector<LoraMatrix> chosen =
        chosen_matrices(lora_matrices(spec_, tree_), out_.targets, recipe().place("lora_target"));
    if (recipe().text("kt_config.kt_backend").ends_with("_SkipLoRA")) {
      std::erase_if(chosen, [](const LoraMatrix& one) { return one.part == ModulePart::kExperts; });
      if (chosen.empty())
        recipe().fail("kt_config.kt_backend", "leaves the experts out, and lora_target names nothing else");
      skip_experts_ = true;
    }
    out_.parts = count_lora(chosen, out_.rank);
    experts_trained_ = std::ranges::any_of(
        out_.parts, [](const LoraPart& part) { return part.part == ModulePart::kExperts; });
    const bool others = std::ranges::any_of(
        out_.parts, [](const LoraPart& part) { return part.part != ModulePart::kAttention; });
    if (recipe().number("lora_dropout") > 0 && others)
      note("lora_dropout: of attention's LoRA alone; experts, shared experts and MLPs have none");
    for (const std::string& word : recipe().names("additional_target")) whole_ += whole_parameters(word);
    // The words as they are given to Python, which knows no method names.
    if (skip_experts_) out_.targets = words_without_experts(chosen);
  }

  static std::vector<std::string> words_without_experts(const std::vector<LoraMatrix>& chosen) {
    std::set<std::string> words;
    for (const LoraMatrix& one : chosen)
      words.insert(one.part == ModulePart::kAttention ? "all_attention"
                   : one.part == ModulePart::kShared  ? "shared_experts"
                                                      : one.name);
    return {words.begin(), words.end()};
  }

  uint64_t whole_parameters(const std::string& word) const {
    uint64_t out = 0;
    std::set<std::string> known;
    for (const ModelModule& module : tree_.modules) {
      const std::string last = module.name.substr(module.name.rfind('.') + 1);
      if (module.n > 0 && module.part != ModulePart::kExperts) known.insert(last);
      if (module.part == ModulePart::kExperts || (module.name != word && !module.name.ends_with("." + word)))
        continue;
      out += static_cast<uint64_t>(module.n * std::max<int64_t>(module.k, 1));
    }
    if (out == 0)
      recipe().fail("additional_target", "no module of this model is called '{}'; the nearest is {}",
                    shown(word), nearest_name(word, {known.begin(), known.end()}));
    return out;
  }

  void choose_devices() {
    const bool wanted = recipe().flag("bf16");
    gpus_ = recipe().flag("use_cpu") ? std::vector<FreeGpu>() : gpus_here();
    out_.devices = gpus_.empty() ? std::vector<std::string>{"cpu"} : devices_;
    if (out_.devices.empty()) out_.devices = {"cuda:0"};
    if (gpus_.empty() && !devices_.empty() && !recipe().flag("use_cpu"))
      note(text("kt_optimize_rule: {} GPUs are named and none is here: all is on the CPU", devices_.size()));
    if (out_.devices.size() > gpus_.size() && !gpus_.empty())
      fail_as(ErrorKind::kUnsupported, "{}: {} GPUs are named, {} here", recipe().place("kt_optimize_rule"),
              out_.devices.size(), gpus_.size());
    out_.bf16 = wanted && (!gpus_.empty() || multiplies_bf16());
    if (wanted && !out_.bf16)
      note(
          "bf16: this CPU has no products of bf16 numbers: what is in torch is f32, the experts' arithmetic "
          "bf16");
  }

  TrainingLoad load_of(int64_t rows, bool retain) const {
    const std::string stage = recipe().text("stage");
    const bool torch_recomputes = recipe().text("kt_config.kt_activation_policy.gpu") != "retain";
    uint64_t trainable = out_.trainable();
    return {.rows = rows * (stage == "sft" ? 1 : 2),
            .row_tokens = recipe().integer("cutoff_len"),
            .rank = out_.rank,
            .experts_trained = experts_trained_,
            .retain = retain,
            .checkpointing = torch_recomputes && !recipe().flag("disable_gradient_checkpointing"),
            .torch_bytes = out_.bf16 ? 2 : 4,
            .expert_bytes = recipe().flag("bf16") ? 2 : 4,
            .packed_experts = packed_,
            .trainable = trainable,
            .whole = whole_,
            .gpu = !gpus_.empty()};
  }

  TrainingMemory memory_of(int64_t rows, bool retain) const {
    TrainingMemory out = training_memory(spec_, tree_, load_of(rows, retain));
    out.available = available_memory() + own_memory();
    for (size_t i = 0; i < std::min(out_.devices.size(), gpus_.size()); ++i)
      out.gpu_available += gpus_[i].bytes;
    return out;
  }

  void choose_batch() {
    const Rates rates = measured_rates(out_.threads);
    const double bytes_a_weight =
        static_cast<double>(packed_) / static_cast<double>(expert_parameters(spec_));
    // Rows of an expert with which multiplying takes as long as reading its weights.
    const double even = rates.float_operations * bytes_a_weight / (2 * rates.read_bytes);
    const bool open = !recipe().given("per_device_train_batch_size");
    const std::string policy = !recipe().text("kt_cpu_activation").empty()
                                   ? recipe().text("kt_cpu_activation")
                                   : recipe().text("kt_config.kt_activation_policy.cpu");
    out_.retain = policy != "recompute";
    out_.batch = open ? 1 : recipe().integer("per_device_train_batch_size");
    const auto rows_of = [&](int64_t batch) {
      const TrainingLoad load = load_of(batch, true);
      return static_cast<double>(load.tokens()) * out_.top_k / out_.experts;
    };
    while (open && out_.batch < kMostProposedRows && rows_of(out_.batch) < even &&
           memory_of(2 * out_.batch, out_.retain).fits())
      out_.batch *= 2;
    if (policy.empty() && !memory_of(out_.batch, true).fits() && memory_of(out_.batch, false).fits()) {
      out_.retain = false;
      note("kt_cpu_activation: recompute, because what retain keeps does not fit");
    }
    out_.memory = memory_of(out_.batch, out_.retain);
    out_.tokens = load_of(out_.batch, true).tokens();
    out_.rows_per_expert = rows_of(out_.batch);
    if (open)
      note(
          text("per_device_train_batch_size: {}, of {} tokens at most: {} rows an expert, where {} let the "
               "CPU multiply as long as it "
               "reads",
               out_.batch, out_.tokens, std::lround(out_.rows_per_expert), std::lround(even)));
    else if (out_.rows_per_expert < even / 2)
      note(
          text("per_device_train_batch_size: micro-batches of at most {} tokens are {} rows an expert; "
               "weights are read once for each, "
               "and below {} rows that takes longer than the arithmetic",
               out_.tokens, std::lround(out_.rows_per_expert), std::lround(even)));
  }

  TrainingPlan out_;
  ModelSpec spec_;
  ModuleTree tree_;
  std::vector<std::string> devices_;
  std::vector<FreeGpu> gpus_;
  uint64_t packed_ = 0, whole_ = 0;
  bool experts_trained_ = false, skip_experts_ = false;
};

}  // namespace

uint64_t TrainingPlan::trainable() const {
  uint64_t out = 0;
  for (const LoraPart& part : parts) out += part.trainable;
  return out;
}

TrainingPlan plan_training(Recipe recipe) { return Planner(std::move(recipe)).plan(); }

}  // namespace kt::inline cli
