// Every key of a training recipe, the YAML that LLaMA-Factory reads: its type, where it belongs, and what becomes of it
// here. One table; readers, listings and the documentation take it from here.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline cli {

enum class KeyGroup : uint8_t { kModel, kMethod, kData, kOutput, kTrain, kEval, kKt, kKtConfig };
enum class KeyType : uint8_t {
  kText,
  kBoolean,
  kInteger,
  kNumber,
  kNames,          // "a, b", or a list of texts
  kTextOrBoolean,  // a path, or true
  kMapping,
};
enum class KeyUse : uint8_t {
  kHonoured,
  kNoted,    // accepted, and a line says what it means here
  kRefused,  // but for a value that asks for nothing: null, false, 0
};

constexpr double kAnyNumber = 1e300;

struct RecipeKey {
  std::string_view name;  // "lora_rank"; "kt_config.kt_backend" of what stands below kt_config
  KeyGroup group;
  KeyType type;
  KeyUse use = KeyUse::kHonoured;
  std::string_view standard = {};  // what holds without it, as YAML has it; empty: nothing
  std::string_view meaning = {};   // what it is for; of a noted key what the note says, of a refused one why
  std::string_view choices = {};   // of a text: "sft|dpo|kto"; empty: any
  double least = -kAnyNumber, most = kAnyNumber;
};

std::span<const RecipeKey> recipe_keys();
const RecipeKey* find_recipe_key(std::string_view name);  // null: there is none
std::vector<std::string> recipe_key_names(std::string_view prefix = {});

// Values that have a name elsewhere and no meaning here, with the reason: "pt" of stage. Null: there is nothing to say.
const char* refused_value(std::string_view key, std::string_view value);

std::string_view name_of(KeyGroup group);
std::string_view name_of(KeyType type);  // "an integer", as errors say it
std::string_view name_of(KeyUse use);

}  // namespace kt::inline cli
