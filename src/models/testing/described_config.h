// For tests: what a family makes of a config, or why it does not.
#pragma once
#include <string>

#include "base/error.h"
#include "models/families.h"
#include "text/json.h"

namespace kt::testing_configs {

inline ModelSpec described(const Json& config) { return describe_model(config, "config.json"); }

// The error's words, "unsupported: " before those of what is not run.
inline std::string refused(const Json& config) {
  try {
    described(config);
  } catch (const Error& error) {
    return (error.kind() == ErrorKind::kUnsupported ? "unsupported: " : "") + std::string(error.what());
  }
  return "no error";
}

}  // namespace kt::testing_configs
