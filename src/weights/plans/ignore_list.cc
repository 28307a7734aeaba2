#include "weights/plans/ignore_list.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "base/error.h"
#include "base/utf8.h"

namespace kt::inline weights {
namespace {

std::vector<std::string_view> components(std::string_view module) {
  std::vector<std::string_view> out;
  while (true) {
    const size_t dot = module.find('.');
    out.push_back(module.substr(0, dot));
    if (dot == std::string_view::npos) return out;
    module.remove_prefix(dot + 1);
  }
}

bool is_number(std::string_view word) {
  return !word.empty() && std::ranges::all_of(word, [](char c) { return c >= '0' && c <= '9'; });
}

// Parts of a model beside its language layers.
bool is_foreign(std::string_view word) {
  constexpr std::string_view kForeign[] = {
      "mtp",          "visual",      "vision_tower",  "vision_model",
      "vision_embed", "audio_tower", "audio_model",   "multi_modal_projector",
      "mm_projector", "vision_proj", "image_newline", "audio",
      "vision",       "aligner",     "code2wav",      "talker"};
  return word.starts_with("mtp_") || std::ranges::find(kForeign, word) != std::end(kForeign);
}

std::string escaped(std::string_view word) {
  std::string out;
  for (const char c : word) {
    if (std::string_view(".^$|()[]{}*+?\\").find(c) != std::string_view::npos) out += '\\';
    out += c;
  }
  return out;
}

// "re:.*layers\.\d+\.self_attn\.q_proj$"
std::string general(std::string_view module) {
  const auto words = components(module);
  const auto layers = std::ranges::find(words, std::string_view("layers"));
  const auto first = layers == words.end() ? words.begin() : layers;
  std::string out = first == words.begin() ? "re:" : "re:.*";
  for (auto word = first; word != words.end(); ++word) {
    if (word != first) out += "\\.";
    out += is_number(*word) ? "\\d+" : escaped(*word);
  }
  return out + "$";
}

}  // namespace

ModulePatterns::ModulePatterns(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) {
    if (pattern.empty()) fail("an empty pattern of modules to ignore");
    patterns_.push_back({.source = pattern});
    if (!pattern.starts_with("re:")) continue;
    try {
      patterns_.back().expression.emplace(pattern.substr(3), RegexDialect::kPython);
    } catch (const Error& error) {
      fail("{}: not a regular expression that is read: {}", printable(pattern), error.what());
    }
  }
}

bool ModulePatterns::Pattern::match(std::string_view module) const {
  if (!expression) return module.find(source) != std::string_view::npos;
  const std::string valid = is_valid_utf8(module) ? "" : replace_invalid_utf8(module);
  return RegexSearch(*expression, valid.empty() ? module : valid, kMostNameSteps).at_start().has_value();
}

bool ModulePatterns::match(std::string_view module) const {
  return std::ranges::any_of(patterns_, [module](const Pattern& pattern) { return pattern.match(module); });
}

std::vector<std::string> ModulePatterns::idle(const std::vector<std::string>& modules) const {
  std::vector<std::string> out;
  for (const Pattern& pattern : patterns_)
    if (std::ranges::none_of(modules, [&](const std::string& module) { return pattern.match(module); }))
      out.push_back(pattern.source);
  return out;
}

bool never_quantised(std::string_view module) {
  const auto words = components(module);
  if (std::ranges::any_of(words, is_foreign)) return true;
  const std::string_view last = words.back();
  constexpr std::string_view kKept[] = {"lm_head",     "output", "score",   "wte",
                                        "wpe",         "gate",   "router",  "shared_expert_gate",
                                        "shared_head", "head",   "eh_proj", "weights_proj"};
  if (std::ranges::find(kKept, last) != std::end(kKept)) return true;
  // gpt-oss: mlp.router; Mixtral: block_sparse_moe.gate; some: mlp.gate.wg
  if (words.size() > 1 && (words[words.size() - 2] == "gate" || words[words.size() - 2] == "router"))
    return true;
  return last.find("embed") != std::string_view::npos || last.find("norm") != std::string_view::npos;
}

int layer_of(std::string_view module) {
  const auto words = components(module);
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (is_foreign(words[i])) return -1;
    if (words[i] != "layers" || !is_number(words[i + 1])) continue;
    int layer = -1;
    const auto [end, code] =
        std::from_chars(words[i + 1].data(), words[i + 1].data() + words[i + 1].size(), layer);
    return code == std::errc() ? layer : -1;
  }
  return -1;
}

std::vector<std::string> ignore_entries(const std::vector<std::string>& kept,
                                        const std::vector<std::string>& quantised, int layers) {
  std::set<std::string> taken;
  for (const std::string& module : quantised) taken.insert(general(module));
  std::set<std::string> entries = {"lm_head"};
  for (const std::string& module : kept) {
    const int layer = layer_of(module);
    if (module.starts_with("mtp.")) {
      entries.insert("re:mtp\\..*");
    } else if (layers > 0 && layer >= layers) {
      entries.insert(text("re:.*layers\\.{}\\..*", layer));
    } else if (module != "lm_head") {
      const std::string entry = general(module);
      entries.insert(taken.contains(entry) ? module : entry);
    }
  }
  return {entries.begin(), entries.end()};
}

}  // namespace kt::inline weights
