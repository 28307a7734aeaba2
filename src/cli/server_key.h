// The keys of which clients of kt run have to send one, from wherever they stand.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace kt::inline cli {

struct KeySources {
  std::optional<std::string> flag = {};  // --api-key
  std::optional<std::string> file = {};  // --api-key-file, a path
  std::string setting = {};              // of config.yaml; "": none
};

// What is wrong with a key; empty: nothing.
std::string server_key_problem(std::string_view key);

// Those of a file: one a line, blanks around it left out; blank lines and those that begin with # say nothing. Error
// that names the file, and the line at fault; also if there is none.
std::vector<std::string> keys_in_file(const std::string& path);

// The first of: flag, file, KT_API_KEY, setting. None: no key is asked for. A source that is given but blank is an
// Error, since whoever gave it does not want a server without a key.
std::vector<std::string> server_keys(const KeySources& sources);

}  // namespace kt::inline cli
