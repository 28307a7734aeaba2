#include "cli/registry/aliases.h"

#include <algorithm>
#include <array>

#include "cli/registry/model_files.h"

namespace kt::inline cli {
namespace {

// Names of kt 0.7 first. Sizes as published, or the published number of parameters times their bytes; none where
// neither is known. What a download takes is asked of the hub.
constexpr auto kAliases = std::to_array<ModelAlias>({
    {"m2 minimax-m2", "MiniMaxAI/MiniMax-M2", "minimax_m2", 230},
    {"m2.1 minimax-m2.1", "MiniMaxAI/MiniMax-M2.1", "minimax_m2"},
    {"m2.7 minimax-m2.7", "MiniMaxAI/MiniMax-M2.7", "minimax_m2"},
    {"m3 minimax-m3", "MiniMaxAI/MiniMax-M3-MXFP8", "minimax_m3"},
    {"k2 k2-thinking kimi kimi-thinking kimi-k2-thinking", "moonshotai/Kimi-K2-Thinking", "kimi_k2", 594},
    {"k2.5 kimi-k2.5", "moonshotai/Kimi-K2.5", "kimi_k25"},
    {"r1 r1-0528 dsr1 deepseek-r1 deepseek-r1-0528", "deepseek-ai/DeepSeek-R1-0528", "deepseek_v3", 689},
    {"v3-0324 dsv3 deepseek3 deepseek-v3 deepseek-v3-0324", "deepseek-ai/DeepSeek-V3-0324", "deepseek_v3",
     689},
    {"v3.2 dsv3.2 deepseek3.2 deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", "deepseek_v32"},
    {"v4 v4-flash dsv4 deepseek-v4 deepseek-v4-flash", "deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4"},
    {"deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek_v2", 31.4},
    {"glm-4.5-air", "zai-org/GLM-4.5-Air", "glm4_moe", 221},
    {"glm-4.7-flash", "zai-org/GLM-4.7-Flash", "glm4_moe_lite", 62},
    {"gpt-oss-20b", "openai/gpt-oss-20b", "gpt_oss", 13.8},
    {"gpt-oss-120b", "openai/gpt-oss-120b", "gpt_oss", 65.2},
    {"mixtral-8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", 93.4},
    {"mistral-small-4", "mistralai/Mistral-Small-4-119B-2603", "mistral4"},
    {"dots.llm1 dots1", "rednote-hilab/dots.llm1.inst", "dots1", 286},
    {"hy3", "tencent/Hy3", "hy_v3", 598},
    {"solar-open solar-open-100b", "upstage/Solar-Open-100B", "solar_open"},
    {"ernie-4.5 ernie-4.5-21b", "baidu/ERNIE-4.5-21B-A3B-PT", "ernie4_5_moe"},
    {"ernie-4.5-300b", "baidu/ERNIE-4.5-300B-A47B-PT", "ernie4_5_moe"},
    {"qwen3-30b qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "qwen3_moe", 61.1},
    {"qwen3-30b-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3_moe", 61.1},
    {"qwen3-coder-30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3_moe", 61.1},
    {"qwen3-235b qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "qwen3_moe", 470},
});

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const size_t end = std::min(list.find(' '), list.size());
    if (list.substr(0, end) == word) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

}  // namespace

std::span<const ModelAlias> known_aliases() { return kAliases; }

const ModelAlias* find_alias(std::string_view name) {
  const std::string wanted = lower_case(name);
  if (wanted.empty()) return nullptr;
  const auto found =
      std::ranges::find_if(kAliases, [&](const ModelAlias& alias) { return has_word(alias.names, wanted); });
  return found == kAliases.end() ? nullptr : &*found;
}

}  // namespace kt::inline cli
