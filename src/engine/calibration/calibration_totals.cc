#include "engine/calibration/calibration_totals.h"

#include <map>

#include "base/text.h"

namespace kt::inline engine {

namespace {

// Of the figures under `kind`, "experts" or "linears".
Json totals_of(const Json& report, const std::string& kind, double damping) {
  std::map<std::string, int64_t> methods;
  int64_t count = 0, tokens = 0, held_out = 0;
  double signal = 0, rtn_error = 0, error = 0;
  Json raised = Json::array();
  for (const Json& layer : report.at("layers")) {
    int64_t number = 0;
    for (const Json& each : layer.value(kind, Json::array())) {
      ++methods[each.at("method").get<std::string>()];
      tokens += each.at("tokens").get<int64_t>();
      held_out += each.at("held_out").get<int64_t>();
      signal += each.at("signal").get<double>();
      rtn_error += each.at("rtn_error").get<double>();
      error += each.at("error").get<double>();
      const auto used = each.at("damping").get<double>(), down = each.at("down_damping").get<double>();
      if (used > damping || down > damping) {
        raised.push_back({{"layer", layer.at("layer")}, {"damping", used}, {"down_damping", down}});
        if (each.contains("module")) {
          raised.back()["module"] = each.at("module");
        } else {
          raised.back()["expert"] = number;
        }
      }
      ++number;
    }
    count += number;
  }
  return {{kind, count},
          {"methods", methods},
          {"tokens", tokens},
          {"held_out", held_out},
          {"signal", signal},
          {"rtn_error", rtn_error},
          {"error", error},
          {"ratio", rtn_error > 0 ? error / rtn_error : 1},
          {"damping_raised", raised}};
}

std::string summary_of(const Json& totals, const std::string& kind, std::string_view noun) {
  constexpr std::string_view kNearest = "rtn: ";
  std::string reasons;
  int64_t nearest = 0, kept = 0;
  for (const auto& [method, count] : totals.at("methods").items()) {
    if (method == "kept") kept = count.get<int64_t>();
    if (!method.starts_with(kNearest)) continue;
    nearest += count.get<int64_t>();
    reasons +=
        text("{}{} {}", reasons.empty() ? "" : ", ", count.get<int64_t>(), method.substr(kNearest.size()));
  }
  const auto all = totals.at(kind).get<int64_t>();
  std::string out = text("{} of {} {} calibrated", all - nearest - kept, all, noun);
  if (nearest > 0) out += text(", {} rounded to nearest ({})", nearest, reasons);
  if (kept > 0) out += text(", {} left as they were", kept);
  if (const size_t raised = totals.at("damping_raised").size(); raised > 0)
    out += text("; damping raised for {}", raised);
  return out;
}

}  // namespace

Json calibration_totals(const Json& report, double damping) {
  Json out = totals_of(report, "experts", damping);
  if (Json linears = totals_of(report, "linears", damping); linears.at("linears").get<int64_t>() > 0)
    out["linears"] = std::move(linears);
  return out;
}

std::string calibration_summary(const Json& totals) {
  const std::string experts = summary_of(totals, "experts", "experts");
  const auto linears = totals.find("linears");
  if (linears == totals.end()) return experts;
  const std::string others = summary_of(*linears, "linears", "matrices and MLPs of every token");
  return totals.at("experts").get<int64_t>() == 0 ? others : experts + "\n" + others;
}

}  // namespace kt::inline engine
