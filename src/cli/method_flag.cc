#include "cli/method_flag.h"

#include "base/error.h"
#include "models/families.h"
#include "weights/weight_method.h"

namespace kt::inline cli {

std::string weight_method_problem(std::string_view name) {
  try {
    weight_method_named(name);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

CLI::Validator weight_method_name() {
  std::string choices;  // as CLI11 describes a check of membership: what completions read
  for (const WeightMethod& method : weight_methods())
    choices += text("{}{}", choices.empty() ? "" : ",", method.name);
  return CLI::Validator(
      [](std::string& value) {
        std::string problem = weight_method_problem(value);
        if (problem.empty()) value = weight_method_named(value).name;
        return problem;
      },
      "{" + choices + "}", "weight_method");
}

std::string checked_method_format(const std::string& method, const std::string& path) {
  const WeightMethod& wanted = weight_method_named(method);
  const auto source = open_experts(path, gguf_families());
  std::string format;
  for (const int layer : source->layers()) {
    check_method(wanted, *source, layer, path);
    if (rounded_format(wanted, *source, layer)) format = wanted.format;
  }
  return format;
}

}  // namespace kt::inline cli
