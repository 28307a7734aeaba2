// The key that clients of kt run have to send, from wherever it stands.
#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace kt {

struct KeySources {
  std::optional<std::string> flag = {};  // --api-key
  std::optional<std::string> file = {};  // --api-key-file, a path
  std::string setting = {};              // of config.yaml; "": none
};

// What is wrong with a key; empty: nothing.
std::string server_key_problem(std::string_view key);

// The first of: flag, file (its one line), KT_API_KEY, setting. "" if there is none: no key is asked for. A source that
// is given but blank is an Error, since whoever gave it does not want a server without a key.
std::string server_key(const KeySources& sources);

}  // namespace kt
