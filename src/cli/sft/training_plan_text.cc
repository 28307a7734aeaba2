// A training plan for people and for programs.
#include <cmath>

#include "cli/sft/training_plan.h"
#include "terminal/report.h"

namespace kt::inline cli {
namespace {

// "1,234,567"
std::string with_thousands(uint64_t n) {
  std::string out = std::to_string(n);
  for (auto at = static_cast<ptrdiff_t>(out.size()) - 3; at > 0; at -= 3)
    out.insert(static_cast<size_t>(at), ",");
  return out;
}

// "13.6 M"
std::string in_millions(uint64_t n) {
  return n >= 1'000'000'000 ? text("{} B", three_digits(static_cast<double>(n) * 1e-9))
                            : text("{} M", three_digits(static_cast<double>(n) * 1e-6));
}

std::string joined_names(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

std::string experts_text(const TrainingPlan& plan) {
  std::string out = plan.stored;
  if (!plan.format.empty()) out += text(", rounded to {} while they are read", plan.format);
  if (!plan.weights.empty()) out += text(", from {}", plan.weights);
  return out;
}

std::string rows_text(const std::vector<TrainingRows>& all) {
  std::string out;
  for (const TrainingRows& rows : all)
    out += text("{}{} ({})", out.empty() ? "" : ", ", rows.name, rows.layout);
  return out;
}

std::string method_text(const TrainingPlan& plan) {
  const Recipe& recipe = plan.recipe;
  const std::string stage = recipe.text("stage");
  const std::string loss = stage == "dpo" ? text(" ({})", recipe.text("pref_loss")) : "";
  return text("{}{}, LoRA of rank {}, alpha {}", stage, loss, plan.rank, plan.alpha);
}

std::string step_text(const TrainingPlan& plan) {
  const int64_t micro = plan.recipe.integer("gradient_accumulation_steps");
  return text("{} of {} tokens at most, {} rows an expert; {}", counted(plan.batch, "row"), plan.tokens,
              std::lround(plan.rows_per_expert),
              micro == 1 ? std::string("one micro-batch a step") : text("{} micro-batches a step", micro));
}

OrderedJson rows_json(const std::vector<TrainingRows>& all) {
  OrderedJson out = OrderedJson::array();
  for (const TrainingRows& rows : all) out.push_back(rows.json());
  return out;
}

OrderedJson memory_json(const TrainingMemory& memory) {
  return {{"experts", memory.experts},
          {"dense", memory.dense},
          {"lora", memory.lora},
          {"records", memory.records},
          {"activations", memory.layers},
          {"logits", memory.logits},
          {"process", memory.process},
          {"host", memory.host()},
          {"available", memory.available},
          {"device", memory.device()},
          {"device_available", memory.gpu_available},
          {"fits", memory.fits()}};
}

}  // namespace

OrderedJson TrainingPlan::json() const {
  OrderedJson lora = {{"rank", rank}, {"alpha", alpha}, {"targets", targets}, {"trainable", trainable()}};
  for (const LoraPart& part : parts)
    lora["parts"][std::string(name_of(part.part))] = {
        {"matrices", part.matrices}, {"weights", part.weights}, {"trainable", part.trainable}};
  return {
      {"version", 1},
      {"recipe", recipe.path()},
      {"model",
       {{"path", model},
        {"name", name},
        {"family", family},
        {"layers", layers},
        {"routed_layers", routed_layers},
        {"experts", experts},
        {"top_k", top_k},
        {"parameters", parameters},
        {"stored", stored},
        {"weights", weights.empty() ? OrderedJson() : OrderedJson(weights)},
        {"format", format.empty() ? OrderedJson() : OrderedJson(format)}}},
      {"lora", lora},
      {"adapter", adapter.empty() ? OrderedJson() : OrderedJson(adapter)},
      {"data", {{"train", rows_json(rows)}, {"eval", rows_json(eval_rows)}}},
      {"batch", {{"rows", batch}, {"tokens", tokens}, {"rows_per_expert", rows_per_expert}}},
      {"bf16", bf16},
      {"expert_activations", recipe.flag("bf16") ? "bf16" : "f32"},
      {"cpu_activation", retain ? "retain" : "recompute"},
      {"threads", threads},
      {"nodes", nodes},
      {"devices", devices},
      {"output", output},
      {"resume", resume.empty() ? OrderedJson() : OrderedJson(resume)},
      {"memory", memory_json(memory)},
      {"notes", notes},
      {"settings", recipe.all()},
  };
}

std::string describe(const TrainingPlan& plan) {
  Table facts({plan.recipe.path(), ""}, 2);
  facts.add({"model", text("{}: {}, {}, {} parameters", plan.name, plan.family, counted(plan.layers, "layer"),
                           in_millions(plan.parameters))});
  facts.add({"experts", text("{} in each of {}, {} for a token; {}", plan.experts,
                             counted(plan.routed_layers, "layer"), plan.top_k, experts_text(plan))});
  facts.add({"method", method_text(plan)});
  if (!plan.adapter.empty()) facts.add({"adapter", plan.adapter});
  facts.add({"rows", rows_text(plan.rows)});
  if (!plan.eval_rows.empty()) facts.add({"evaluation", rows_text(plan.eval_rows)});
  facts.add({"micro-batch", step_text(plan)});
  facts.add({"torch", text("{} on {}", plan.bf16 ? "bf16" : "f32", joined_names(plan.devices))});
  facts.add({"output", plan.output});
  if (!plan.resume.empty()) facts.add({"goes on from", plan.resume});
  std::string out = facts.str() + "\n";

  Table parts({"trained", "matrices", "weights", "parameters"}, 1);
  for (const LoraPart& part : plan.parts)
    parts.add({std::string(name_of(part.part)), with_thousands(static_cast<uint64_t>(part.matrices)),
               in_millions(part.weights), with_thousands(part.trainable)});
  parts.add({"in all", "", "", with_thousands(plan.trainable())});
  out += parts.str();
  out += text("{} of the model's parameters\n\n",
              percent(static_cast<double>(plan.trainable()) / static_cast<double>(plan.parameters)));

  const TrainingMemory& memory = plan.memory;
  Table sizes({"memory, at most", ""}, 1);
  for (const auto& [name, bytes] : memory.parts()) sizes.add({name, human_bytes(bytes)});
  sizes.add({memory.gpu ? "in all, of the host" : "in all", human_bytes(memory.host())});
  if (memory.gpu) sizes.add({"in all, of the GPU", human_bytes(memory.device())});
  out += sizes.str();
  const auto fit = [](uint64_t there, bool fits) {
    return text("{} available: {}", human_bytes(there),
                fits ? inked(Ink::kGood, "fits") : inked(Ink::kBad, "does not fit"));
  };
  out += fit(memory.available, memory.host() <= memory.available) + "\n";
  if (memory.gpu) out += "GPU: " + fit(memory.gpu_available, memory.device() <= memory.gpu_available) + "\n";
  return out;
}

void check_memory(const TrainingPlan& plan) {
  const TrainingMemory& memory = plan.memory;
  if (memory.fits()) return;
  std::string advice;
  const auto advise = [&](bool when, const std::string& suggestion) {
    if (when) advice += (advice.empty() ? "; try " : ", ") + suggestion;
  };
  const bool host = memory.host() > memory.available;
  advise(host && plan.format.empty() && plan.weights.empty() && memory.experts > memory.host() / 4,
         "kt_config.kt_backend=AMXINT4");
  advise(plan.batch > 1,
         text("per_device_train_batch_size={} with more gradient_accumulation_steps", plan.batch / 2));
  advise(host && plan.retain && memory.records > memory.host() / 10, "kt_cpu_activation=recompute");
  advise(plan.batch == 1 && plan.recipe.integer("cutoff_len") > 512, "a smaller cutoff_len");
  advise(memory.lora > memory.host() / 4, "a smaller lora_rank");
  fail_as(ErrorKind::kMemory, "{}: {} of {} needed ({}), {} available{}", plan.recipe.path(),
          human_bytes(host ? memory.host() : memory.device()), host ? "memory" : "GPU memory",
          memory.largest(), human_bytes(host ? memory.available : memory.gpu_available), advice);
}

}  // namespace kt::inline cli
