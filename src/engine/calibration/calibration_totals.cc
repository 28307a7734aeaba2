#include "engine/calibration/calibration_totals.h"

#include <map>

#include "base/text.h"

namespace kt {
namespace {

struct Totals {
  std::map<std::string, int64_t> methods;
  int64_t count = 0, tokens = 0, held_out = 0;
  double signal = 0, rtn_error = 0, error = 0;

  void add(const Json& figures) {
    ++methods[figures.at("method").get<std::string>()];
    ++count;
    tokens += figures.at("tokens").get<int64_t>();
    held_out += figures.at("held_out").get<int64_t>();
    signal += figures.at("signal").get<double>();
    rtn_error += figures.at("rtn_error").get<double>();
    error += figures.at("error").get<double>();
  }
  Json json(const char* counted) const {
    return {{counted, count},         {"methods", methods}, {"signal", signal},
            {"rtn_error", rtn_error}, {"error", error},     {"ratio", rtn_error > 0 ? error / rtn_error : 1}};
  }
};

// "3 of 9 experts calibrated, 4 rounded to nearest (4 few tokens), 2 kept".
std::string line_of(const Json& totals, const char* counted) {
  constexpr std::string_view kNearest = "rtn: ";
  std::string reasons;
  int64_t nearest = 0;
  for (const auto& [method, count] : totals.at("methods").items()) {
    if (!method.starts_with(kNearest)) continue;
    nearest += count.get<int64_t>();
    reasons +=
        text("{}{} {}", reasons.empty() ? "" : ", ", count.get<int64_t>(), method.substr(kNearest.size()));
  }
  std::string out = text("{} of {} {} calibrated", totals.at("methods").value("gptq", int64_t{0}),
                         totals.at(counted).get<int64_t>(), counted);
  if (nearest > 0) out += text(", {} rounded to nearest ({})", nearest, reasons);
  if (const auto kept = totals.at("methods").value("kept", int64_t{0}); kept > 0)
    out += text(", {} kept", kept);
  return out;
}

}  // namespace

Json calibration_totals(const Json& report, double damping) {
  Totals experts, linears;
  Json raised = Json::array();
  const auto note = [&](const Json& layer, const Json& figures, Json who) {
    const auto used = figures.at("damping").get<double>(), down = figures.at("down_damping").get<double>();
    if (used <= damping && down <= damping) return;
    who["layer"] = layer.at("layer");
    who["damping"] = used;
    who["down_damping"] = down;
    raised.push_back(std::move(who));
  };
  for (const Json& layer : report.at("layers")) {
    int64_t number = 0;
    for (const Json& expert : layer.at("experts")) {
      experts.add(expert);
      note(layer, expert, {{"expert", number++}});
    }
    if (!layer.contains("linears")) continue;
    for (const Json& linear : layer.at("linears")) {
      linears.add(linear);
      note(layer, linear, {{"module", linear.at("module")}});
    }
  }
  Json out = experts.json("experts");
  out["tokens"] = experts.tokens;
  out["held_out"] = experts.held_out;
  out["damping_raised"] = std::move(raised);
  if (linears.count > 0) out["linears"] = linears.json("matrices");
  return out;
}

std::string calibration_summary(const Json& totals) {
  std::string out;
  if (totals.at("experts").get<int64_t>() > 0) out = line_of(totals, "experts");
  if (totals.contains("linears"))
    out += (out.empty() ? "" : "; ") + line_of(totals.at("linears"), "matrices");
  if (const size_t raised = totals.at("damping_raised").size(); raised > 0)
    out += text("; damping raised for {}", raised);
  return out;
}

}  // namespace kt
