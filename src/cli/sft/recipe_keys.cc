#include "cli/sft/recipe_keys.h"

#include <algorithm>
#include <array>

namespace kt::inline cli {
namespace {

using enum KeyGroup;
using enum KeyType;
using enum KeyUse;

constexpr double kMostCount = 1 << 30;

constexpr const char* kNotNeeded = "not needed here";
constexpr const char* kOfChat = "of kt sft chat; training needs none";
constexpr const char* kExtraExperts =
    "extra experts that are trained on the GPU: not there; lora_target chooses what is trained";

// clang-format off
constexpr auto kKeys = std::to_array<RecipeKey>({
    // Model
    {"model_name_or_path", kModel, kText, kHonoured, "", "the model: a folder, or a name that kt knows"},
    {"adapter_name_or_path", kModel, kNames, kHonoured, "",
     "the folder of an adapter to train on; with dpo and kto it is also the reference"},
    {"adapter_folder", kModel, kText, kHonoured, "", "the folder that adapter_name_or_path is in"},
    {"trust_remote_code", kModel, kBoolean, kNoted, "false", "accepted; nothing of a model's folder is executed"},
    {"infer_backend", kModel, kText, kNoted, "", kOfChat, "ktransformers|huggingface|vllm|sglang"},
    {"template", kModel, kText, kNoted, "", "the chat template is the tokenizer's own"},
    // Method
    {"stage", kMethod, kText, kHonoured, "sft", "supervised fine-tuning, preference pairs, or single answers judged",
     "sft|dpo|kto"},
    {"do_train", kMethod, kBoolean, kHonoured, "true", "false: there is nothing to do for kt sft train"},
    {"do_eval", kMethod, kBoolean, kHonoured, "false", "the loss of the evaluation rows, at the end too"},
    {"do_predict", kMethod, kBoolean, kHonoured, "",
     "of kt sft eval; false: it generates nothing; kt sft train never does"},
    {"finetuning_type", kMethod, kText, kHonoured, "lora", "what is trained", "lora"},
    {"lora_rank", kMethod, kInteger, kHonoured, "8", "rank of the LoRA matrices", "", 1, 4096},
    {"lora_alpha", kMethod, kNumber, kHonoured, "", "their product is multiplied by alpha / rank; default: 2 x rank",
     "", 0, kAnyNumber},
    {"lora_dropout", kMethod, kNumber, kHonoured, "0",
     "of attention's LoRA; experts, shared experts and MLPs have none", "", 0, 0.999},
    {"lora_target", kMethod, kNames, kHonoured, "all",
     "all, all_attention, or names of modules: q_proj, experts, shared_experts.gate_proj"},
    {"use_rslora", kMethod, kBoolean, kHonoured, "false", "alpha / sqrt(rank) instead of alpha / rank"},
    {"use_dora", kMethod, kBoolean, kRefused, "false", "DoRA needs the norms of rows of weights that are not in torch"},
    {"additional_target", kMethod, kNames, kHonoured, "",
     "modules that are trained whole and saved beside the LoRA: embed_tokens, lm_head"},
    {"create_new_adapter", kMethod, kBoolean, kRefused, "false",
     "experts are not in torch, so the old adapter cannot be merged into them; leave it out to train on"},
    {"pref_beta", kMethod, kNumber, kHonoured, "0.1", "beta of the preference losses", "", 0, kAnyNumber},
    {"pref_loss", kMethod, kText, kHonoured, "sigmoid", "the preference loss", "sigmoid|orpo|simpo"},
    {"pref_ftx", kMethod, kNumber, kHonoured, "0", "share of the sft loss that is added to dpo's", "", 0, kAnyNumber},
    {"simpo_gamma", kMethod, kNumber, kHonoured, "0.5", "the margin of simpo", "", 0, kAnyNumber},
    {"dpo_label_smoothing", kMethod, kNumber, kHonoured, "0", "of pref_loss sigmoid", "", 0, 0.5},
    {"kto_chosen_weight", kMethod, kNumber, kHonoured, "1", "of answers that were wanted", "", 0, kAnyNumber},
    {"kto_rejected_weight", kMethod, kNumber, kHonoured, "1", "of those that were not", "", 0, kAnyNumber},
    {"ref_model", kMethod, kText, kRefused, "",
     "the reference is this model without its adapter, or with the one of adapter_name_or_path"},
    {"ref_model_adapters", kMethod, kText, kRefused, "",
     "the reference is this model without its adapter, or with the one of adapter_name_or_path"},
    {"plot_loss", kMethod, kBoolean, kHonoured, "false", "draws training_loss.svg"},
    {"compute_accuracy", kMethod, kBoolean, kHonoured, "false",
     "also the share of tokens that are predicted, at evaluations"},
    // Data
    {"dataset", kData, kNames, kHonoured, "", "names of dataset_info.json, or .json and .jsonl files"},
    {"eval_dataset", kData, kNames, kHonoured, "", "the same, for evaluations and kt sft eval"},
    {"dataset_dir", kData, kText, kHonoured, "data", "the folder of dataset_info.json and its files"},
    {"cutoff_len", kData, kInteger, kHonoured, "2048", "the most tokens of a row", "", 8, kMostCount},
    {"max_samples", kData, kInteger, kHonoured, "", "the most rows of each dataset", "", 1, kMostCount},
    {"overwrite_cache", kData, kBoolean, kNoted, "false", kNotNeeded},
    {"preprocessing_num_workers", kData, kInteger, kNoted, "", kNotNeeded, "", 1, kMostCount},
    {"dataloader_num_workers", kData, kInteger, kHonoured, "0", "processes that make batches", "", 0, 1024},
    {"val_size", kData, kNumber, kHonoured, "0", "rows for evaluations: a share below 1, or how many", "", 0,
     kMostCount},
    {"packing", kData, kBoolean, kHonoured, "", "several conversations in one row of cutoff_len tokens"},
    {"neat_packing", kData, kBoolean, kHonoured, "false", "packing whose conversations do not see each other"},
    {"train_on_prompt", kData, kBoolean, kHonoured, "false", "the loss counts prompts too"},
    {"mask_history", kData, kBoolean, kHonoured, "false", "the loss counts the last answer alone"},
    {"default_system", kData, kText, kHonoured, "", "the system message of rows without one"},
    {"enable_thinking", kData, kBoolean, kHonoured, "", "given to the chat template"},
    {"streaming", kData, kBoolean, kNoted, "false", "rows are read before training"},
    // Output
    {"output_dir", kOutput, kText, kHonoured, "", "the folder of the adapter, checkpoints and logs"},
    {"logging_steps", kOutput, kNumber, kHonoured, "10", "steps between lines of the log", "", 0, kMostCount},
    {"logging_first_step", kOutput, kBoolean, kHonoured, "false", "the first step has a line too"},
    {"save_steps", kOutput, kNumber, kHonoured, "500", "steps between checkpoints", "", 0, kMostCount},
    {"save_strategy", kOutput, kText, kHonoured, "steps", "when checkpoints are written", "steps|epoch|no"},
    {"save_total_limit", kOutput, kInteger, kHonoured, "", "the most checkpoints that are kept", "", 1, kMostCount},
    {"save_only_model", kOutput, kBoolean, kHonoured, "false", "checkpoints without optimizer: they cannot be resumed"},
    {"overwrite_output_dir", kOutput, kBoolean, kHonoured, "false", "begin anew where output_dir has a run"},
    {"report_to", kOutput, kNames, kHonoured, "none", "none, tensorboard, wandb, ...: as transformers knows them"},
    {"run_name", kOutput, kText, kHonoured, "", "the run's name for report_to"},
    // Training
    {"per_device_train_batch_size", kTrain, kInteger, kHonoured, "",
     "rows of a micro-batch; default: chosen from memory and rows per expert", "", 1, 1 << 20},
    {"gradient_accumulation_steps", kTrain, kInteger, kHonoured, "1", "micro-batches of a step", "", 1, 1 << 20},
    {"learning_rate", kTrain, kNumber, kHonoured, "5e-5", "the highest", "", 0, kAnyNumber},
    {"num_train_epochs", kTrain, kNumber, kHonoured, "3", "how often all rows are seen", "", 0, kMostCount},
    {"max_steps", kTrain, kInteger, kHonoured, "-1", "steps, whatever the epochs; -1: as many as they have", "", -1,
     kMostCount},
    {"lr_scheduler_type", kTrain, kText, kHonoured, "linear",
     "how the learning rate falls: cosine, linear, constant, ..."},
    {"warmup_ratio", kTrain, kNumber, kHonoured, "0", "share of the steps in which it rises", "", 0, 1},
    {"warmup_steps", kTrain, kNumber, kHonoured, "0", "the same as a number of steps, or a share below 1; wins", "", 0,
     kMostCount},
    {"max_grad_norm", kTrain, kNumber, kHonoured, "1", "gradients are scaled down to it; 0: never", "", 0, kAnyNumber},
    {"weight_decay", kTrain, kNumber, kHonoured, "0", "of AdamW", "", 0, kAnyNumber},
    {"adam_beta1", kTrain, kNumber, kHonoured, "0.9", "of AdamW", "", 0, 1},
    {"adam_beta2", kTrain, kNumber, kHonoured, "0.999", "of AdamW", "", 0, 1},
    {"adam_epsilon", kTrain, kNumber, kHonoured, "1e-8", "of AdamW", "", 0, kAnyNumber},
    {"optim", kTrain, kText, kHonoured, "adamw_torch_fused", "the optimizer, as transformers names it"},
    {"seed", kTrain, kInteger, kHonoured, "42", "of the order of rows and the first LoRA values", "", 0, 4294967295.0},
    {"bf16", kTrain, kBoolean, kHonoured, "false", "the parts in torch in bf16; on a CPU without bf16 products in f32"},
    {"fp16", kTrain, kBoolean, kRefused, "false",
     "gradients through experts need the range of bf16: bf16: true, or neither for f32"},
    {"ddp_timeout", kTrain, kInteger, kNoted, "", "training is one process"},
    {"resume_from_checkpoint", kTrain, kTextOrBoolean, kHonoured, "",
     "a checkpoint's folder, or true: the last one of output_dir"},
    {"disable_gradient_checkpointing", kTrain, kBoolean, kHonoured, "false",
     "keep all activations of attention instead of computing them again"},
    {"use_cpu", kTrain, kBoolean, kHonoured, "false", "leave GPUs alone"},
    {"on_nan", kTrain, kText, kHonoured, "stop", "a loss or gradient that is not finite: stop, or leave that step out",
     "stop|skip"},
    // Evaluation
    {"per_device_eval_batch_size", kEval, kInteger, kHonoured, "",
     "rows at once; default: as in training, in kt sft eval 8", "", 1, 1 << 20},
    {"eval_strategy", kEval, kText, kHonoured, "no", "when evaluations are made", "no|steps|epoch"},
    {"eval_steps", kEval, kNumber, kHonoured, "", "steps between them; default: logging_steps", "", 0, kMostCount},
    {"predict_with_generate", kEval, kBoolean, kHonoured, "",
     "of kt sft eval; false: no answers, loss and multiple choice alone"},
    {"max_new_tokens", kEval, kInteger, kHonoured, "",
     "of kt sft eval and chat: the most tokens of an answer; of eval by default 1024, and no more than cutoff_len "
     "leaves", "", 1, kMostCount},
    {"temperature", kEval, kNumber, kHonoured, "", "of kt sft eval, where do_sample is true (0.95), and of kt sft chat",
     "", 0, kAnyNumber},
    {"top_p", kEval, kNumber, kHonoured, "", "the same (0.7)", "", 0, 1},
    {"top_k", kEval, kInteger, kHonoured, "", "the same (50)", "", -1, kMostCount},
    {"do_sample", kEval, kBoolean, kHonoured, "",
     "of kt sft eval: choose tokens by chance; default: the most probable; false does that in kt sft chat too"},
    // KT
    {"use_kt", kKt, kBoolean, kHonoured, "true", "false is refused: experts run on KT here"},
    {"kt_optimize_rule", kKt, kText, kHonoured, "",
     "a file of placement rules: of it the experts' backend and the devices are read"},
    {"cpu_infer", kKt, kInteger, kHonoured, "", "threads of the experts; default: one for each core", "", 1, 65536},
    {"chunk_size", kKt, kInteger, kHonoured, "", "the most tokens of one expert call", "", 1, 1 << 24},
    {"mode", kKt, kText, kNoted, "", kNotNeeded},
    {"kt_mode", kKt, kText, kNoted, "", kNotNeeded},
    {"kt_maxlen", kKt, kInteger, kNoted, "", kOfChat, "", 1, kMostCount},
    {"kt_use_cuda_graph", kKt, kBoolean, kNoted, "", kOfChat},
    {"kt_force_think", kKt, kBoolean, kNoted, "", kOfChat},
    {"kt_weight_path", kKt, kText, kHonoured, "",
     "experts to train instead of the model's own: what kt quant wrote, a GGUF file, another checkpoint"},
    {"kt_non_expert_weight_path", kKt, kText, kNoted, "", "all but the experts is read from model_name_or_path"},
    {"kt_expert_checkpoint_path", kKt, kText, kHonoured, "", "the same as kt_weight_path, which wins"},
    {"kt_cpu_activation", kKt, kText, kHonoured, "",
     "keep what the experts' backward needs, or compute it again; default: keep what fits", "retain|recompute"},
    {"kt_use_lora_experts", kKt, kBoolean, kRefused, "false", kExtraExperts},
    {"kt_lora_expert_num", kKt, kInteger, kRefused, "0", kExtraExperts},
    {"kt_lora_expert_intermediate_size", kKt, kInteger, kRefused, "0", kExtraExperts},
    {"kt_config", kKt, kMapping, kHonoured, "", "more of them, below it"},
    // Below kt_config
    {"kt_config.kt_backend", kKtConfig, kText, kHonoured, "",
     "the format of experts that are stored as bf16, fp16 or f32: rounded while they are read",
     "AMXBF16|AMXINT8|AMXINT4|BF16|INT8|INT4|FP8|auto|AMXBF16_SkipLoRA|AMXINT8_SkipLoRA|AMXINT4_SkipLoRA|"
     "INT8_SkipLoRA|FP8_SkipLoRA"},
    {"kt_config.kt_num_threads", kKtConfig, kInteger, kHonoured, "", "the same as cpu_infer, which wins", "", 1, 65536},
    {"kt_config.kt_tp_enabled", kKtConfig, kBoolean, kNoted, "", "experts are divided among NUMA nodes by themselves"},
    {"kt_config.kt_threadpool_count", kKtConfig, kInteger, kHonoured, "", "NUMA nodes to use; default: all", "", 1,
     1024},
    {"kt_config.kt_weight_path", kKtConfig, kText, kHonoured, "", "as above it"},
    {"kt_config.kt_non_expert_weight_path", kKtConfig, kText, kNoted, "",
     "all but the experts is read from model_name_or_path"},
    {"kt_config.kt_expert_weight_format", kKtConfig, kText, kNoted, "", "the files say how experts are stored",
     "bf16|int8|int4|fp8"},
    {"kt_config.kt_weight_lifecycle", kKtConfig, kText, kNoted, "", kNotNeeded, "persistent|ephemeral"},
    {"kt_config.kt_expert_checkpoint_path", kKtConfig, kText, kHonoured, "", "as above it"},
    {"kt_config.kt_num_gpu_experts", kKtConfig, kInteger, kRefused, "0", "experts that are trained stay on the CPU"},
    {"kt_config.kt_skip_expert_loading", kKtConfig, kBoolean, kNoted, "", "experts are never read into torch"},
    {"kt_config.kt_share_backward_bb", kKtConfig, kBoolean, kNoted, "",
     "there is no second copy of weights for backward"},
    {"kt_config.kt_share_cache_pool", kKtConfig, kBoolean, kNoted, "", kNotNeeded},
    {"kt_config.kt_force_fused_expert_lora", kKtConfig, kBoolean, kNoted, "", kNotNeeded},
    {"kt_config.kt_max_cache_depth", kKtConfig, kInteger, kNoted, "", kNotNeeded, "", 0, kMostCount},
    {"kt_config.kt_model_max_length", kKtConfig, kInteger, kNoted, "", "cutoff_len is the longest row", "", 1,
     kMostCount},
    {"kt_config.kt_activation_policy", kKtConfig, kMapping, kHonoured, "",
     "cpu: as kt_cpu_activation; gpu: recompute is gradient checkpointing"},
    {"kt_config.kt_activation_policy.cpu", kKtConfig, kText, kHonoured, "", "as kt_cpu_activation", "retain|recompute"},
    {"kt_config.kt_activation_policy.gpu", kKtConfig, kText, kHonoured, "",
     "recompute: gradient checkpointing; retain: none", "retain|recompute"},
    {"kt_config.kt_lora_rank", kKtConfig, kInteger, kHonoured, "", "has to be lora_rank", "", 1, 4096},
    {"kt_config.kt_lora_alpha", kKtConfig, kNumber, kHonoured, "", "has to be lora_alpha", "", 0, kAnyNumber},
    {"kt_config.kt_lora_dropout", kKtConfig, kNumber, kRefused, "0",
     "experts have no dropout; lora_dropout is attention's"},
    {"kt_config.kt_train_mode", kKtConfig, kText, kHonoured, "lora", "what is trained", "lora"},
    {"kt_config.kt_full_weight_grad", kKtConfig, kBoolean, kRefused, "false", "the weights of experts are frozen"},
    {"kt_config.kt_use_lora_experts", kKtConfig, kBoolean, kRefused, "false", kExtraExperts},
    {"kt_config.kt_lora_expert_num", kKtConfig, kInteger, kRefused, "0", kExtraExperts},
    {"kt_config.kt_lora_expert_intermediate_size", kKtConfig, kInteger, kRefused, "0", kExtraExperts},
});

constexpr const char* kOtherStage = "a stage that is not there: sft, dpo and kto are";
constexpr const char* kWholeWeights = "the weights of experts are packed and frozen: finetuning_type: lora";
constexpr const char* kOtherLoss = "a loss that is not there: sigmoid, orpo and simpo are";
struct RefusedValue {
  std::string_view key, value;
  const char* why;
};
constexpr RefusedValue kRefusedValues[] = {
    {"stage", "pt", kOtherStage}, {"stage", "rm", kOtherStage}, {"stage", "ppo", kOtherStage},
    {"finetuning_type", "full", kWholeWeights},
    {"finetuning_type", "freeze", kWholeWeights},
    {"finetuning_type", "oft", kWholeWeights},
    {"pref_loss", "hinge", kOtherLoss}, {"pref_loss", "ipo", kOtherLoss}, {"pref_loss", "kto_pair", kOtherLoss},
    {"kt_config.kt_train_mode", "full", kWholeWeights}, {"kt_config.kt_train_mode", "hybrid", kWholeWeights},
};
// clang-format on

}  // namespace

std::span<const RecipeKey> recipe_keys() { return kKeys; }

const RecipeKey* find_recipe_key(std::string_view name) {
  const auto found = std::ranges::find(kKeys, name, &RecipeKey::name);
  return found == kKeys.end() ? nullptr : &*found;
}

std::vector<std::string> recipe_key_names(std::string_view prefix) {
  std::vector<std::string> out;
  for (const RecipeKey& key : kKeys) {
    if (!key.name.starts_with(prefix)) continue;
    const std::string_view rest = key.name.substr(prefix.size());
    if (rest.find('.') == rest.npos) out.emplace_back(rest);
  }
  return out;
}

const char* refused_value(std::string_view key, std::string_view value) {
  for (const RefusedValue& row : kRefusedValues)
    if (row.key == key && row.value == value) return row.why;
  return nullptr;
}

std::string_view name_of(KeyGroup group) {
  constexpr std::string_view kNames[] = {"model",    "method",     "data", "output",
                                         "training", "evaluation", "kt",   "kt_config"};
  return kNames[static_cast<size_t>(group)];
}

std::string_view name_of(KeyType type) {
  constexpr std::string_view kNames[] = {"text",
                                         "true or false",
                                         "an integer",
                                         "a number",
                                         "names: a text with commas, or a list of texts",
                                         "a text or true",
                                         "a mapping"};
  return kNames[static_cast<size_t>(type)];
}

std::string_view name_of(KeyUse use) {
  constexpr std::string_view kNames[] = {"used", "noted", "refused"};
  return kNames[static_cast<size_t>(use)];
}

}  // namespace kt::inline cli
