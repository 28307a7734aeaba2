// The values of a config.json by name, with errors that say file, key, what was there and what was expected.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "text/json.h"
#include "weights/config.h"

namespace kt::inline models {

// Views the JSON, which outlives it. A null is as good as absent. Sizes are at most kMost: what is computed
// from two of them fits 64 bits, and no model comes near.
class ConfigReader {
 public:
  static constexpr int kMost = 1 << 24;

  // The text model's section first (text_config ...), then those around it, which speak where it is silent.
  ConfigReader(const Json& config, std::string_view name, KeyNames key_names = {});

  const ModelConfig& model() const { return model_; }  // what has several spellings: experts, layers, top_k
  bool has(std::string_view key) const { return find(key).first != nullptr; }

  // A whole number from `least` to kMost. Without a fallback the key has to be there.
  int integer(std::string_view key) const;
  int integer(std::string_view key, int fallback, int least = 0) const;
  double number(std::string_view key) const;  // finite
  double number(std::string_view key, double fallback) const;
  bool boolean(std::string_view key, bool fallback) const;
  bool truth(std::string_view key, bool fallback) const;  // a number that is not 0 is true as well
  std::string string(std::string_view key, std::string_view fallback) const;
  std::vector<std::string> strings(std::string_view key) const;  // empty where absent
  std::vector<double> numbers(std::string_view key) const;       // finite; empty where absent
  // A member that is an object, read by itself alone.
  std::optional<ConfigReader> object(std::string_view key) const;
  // model().experts and the like, which must not be 0; `key` is the family's word for it.
  int known(int value, std::string_view key) const;

  // "<file>: <key> ..."
  std::string place(std::string_view key) const;
  [[noreturn]] void wrong(std::string_view key, std::string_view expected) const;
  [[noreturn]] void missing(std::string_view key) const;
  // A value that is well formed, but that nothing here computes.
  [[noreturn]] void unsupported(std::string_view key, std::string_view known) const;

 private:
  ConfigReader() = default;
  struct Section {
    const Json* object;
    std::string path;  // "text_config."
  };
  std::pair<const Json*, const Section*> find(std::string_view key) const;

  std::string file_;
  KeyNames key_names_;
  std::vector<Section> sections_;
  ModelConfig model_;
};

}  // namespace kt::inline models
