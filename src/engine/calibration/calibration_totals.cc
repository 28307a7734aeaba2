#include "engine/calibration/calibration_totals.h"

#include <map>

#include "base/text.h"

namespace kt {

Json calibration_totals(const Json& report, double damping) {
  std::map<std::string, int64_t> methods;
  int64_t experts = 0, tokens = 0, held_out = 0;
  double signal = 0, rtn_error = 0, error = 0;
  Json raised = Json::array();
  for (const Json& layer : report.at("layers")) {
    int64_t number = 0;
    for (const Json& expert : layer.at("experts")) {
      ++methods[expert.at("method").get<std::string>()];
      tokens += expert.at("tokens").get<int64_t>();
      held_out += expert.at("held_out").get<int64_t>();
      signal += expert.at("signal").get<double>();
      rtn_error += expert.at("rtn_error").get<double>();
      error += expert.at("error").get<double>();
      const auto used = expert.at("damping").get<double>(), down = expert.at("down_damping").get<double>();
      if (used > damping || down > damping)
        raised.push_back(
            {{"layer", layer.at("layer")}, {"expert", number}, {"damping", used}, {"down_damping", down}});
      ++number;
    }
    experts += number;
  }
  return {{"experts", experts},      {"methods", methods},
          {"tokens", tokens},        {"held_out", held_out},
          {"signal", signal},        {"rtn_error", rtn_error},
          {"error", error},          {"ratio", rtn_error > 0 ? error / rtn_error : 1},
          {"damping_raised", raised}};
}

std::string calibration_summary(const Json& totals) {
  constexpr std::string_view kNearest = "rtn: ";
  std::string reasons;
  int64_t nearest = 0;
  for (const auto& [method, experts] : totals.at("methods").items()) {
    if (!method.starts_with(kNearest)) continue;
    nearest += experts.get<int64_t>();
    reasons +=
        text("{}{} {}", reasons.empty() ? "" : ", ", experts.get<int64_t>(), method.substr(kNearest.size()));
  }
  const auto all = totals.at("experts").get<int64_t>();
  std::string out = text("{} of {} experts calibrated", all - nearest, all);
  if (nearest > 0) out += text(", {} rounded to nearest ({})", nearest, reasons);
  if (const size_t raised = totals.at("damping_raised").size(); raised > 0)
    out += text("; damping raised for {}", raised);
  return out;
}

}  // namespace kt
