// A training recipe as it was written: a YAML file and words such as "learning_rate=1e-4" that change it, every key of
// the table in recipe_keys.h and of its type. What the values add up to, training_plan.h knows.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "cli/sft/recipe_keys.h"
#include "text/json.h"
#include "text/yaml.h"

namespace kt::inline cli {

class Recipe {
 public:
  // Error(kInput) in one line "FILE:12: lora_rnk: ...": what YAML refuses; a key that is not known, with the nearest
  // one that is; a value of another type or out of range; a key or a value that training here refuses, with the reason.
  // `changes` are "key=value", each value as YAML has it; of a key below kt_config the whole name counts. What neither
  // the file nor a change says of those is read from ACCELERATE_KT_NUM_THREADS and the like.
  Recipe(const std::string& path, const std::vector<std::string>& changes);

  const std::string& path() const { return path_; }
  std::string folder() const;  // that the file is in
  bool given(std::string_view key) const;
  // The value, or what holds without one; null where nothing does.
  Json value(std::string_view key) const;
  // The same of a type; "" and zeros where nothing holds.
  std::string text(std::string_view key) const;
  int64_t integer(std::string_view key) const;
  double number(std::string_view key) const;
  bool flag(std::string_view key) const;
  std::vector<std::string> names(std::string_view key) const;
  // "FILE:12: lora_rank" or "lora_rank=4": where a key was given; "FILE: lora_rank" where it was not.
  std::string place(std::string_view key) const;

  template <typename... Args>
  [[noreturn]] void fail(std::string_view key, TextPattern<sizeof...(Args)> pattern,
                         const Args&... args) const {
    ::kt::fail("{}: {}", place(key), ::kt::text(pattern, args...));
  }
  // What noted keys come to, a line for each reason.
  std::vector<std::string> notes() const;
  // All that was given and all defaults, by the key's name.
  OrderedJson all() const;

 private:
  struct Given {
    Json value;
    std::string place;
  };
  void take(const std::string& name, const Json& value, const std::string& place);
  void take_all(const Json& mapping, const std::string& prefix, const YamlLines& lines);
  void take_environment();
  void change(const std::string& assignment);

  std::string path_;
  std::map<std::string, Given, std::less<>> given_;
};

}  // namespace kt::inline cli
