// Statistics of experts and the orders of placement, for tests that compare with Python:
//
//   placement_probe statistics FILE...   for each a line: {"layers", "experts", "counts"}, or "error: " and the message
//   placement_probe order STRATEGY SEED EXPERTS,EXPERTS,... [STATISTICS]
//
// EXPERTS: of each layer of the model, 0 where it does not route. The order is printed as JSON, [[layer, expert], ...].
#include <cstdio>
#include <sstream>
#include <string>

#include "base/error.h"
#include "models/expert_order.h"
#include "text/json.h"
#include "weights/expert_statistics.h"

namespace {

void print(const std::string& line) { std::printf("%s\n", line.c_str()); }

void statistics(int count, char** paths) {
  for (int i = 0; i < count; ++i) {
    try {
      const kt::ExpertStatistics found = kt::read_expert_statistics(paths[i]);
      print(kt::Json{{"layers", found.layers}, {"experts", found.experts}, {"counts", found.counts}}.dump());
    } catch (const kt::Error& error) {
      print(kt::text("error: {}", error.what()));
    }
  }
}

// arguments: STRATEGY SEED EXPERTS [STATISTICS]
void order(int count, char** arguments) {
  kt::ExpertStatistics found;
  kt::ExpertOrderInput input{.seed = static_cast<uint32_t>(std::stoul(arguments[1]))};
  std::istringstream in(arguments[2]);
  for (std::string word; std::getline(in, word, ',');) input.experts.push_back(std::stoi(word));
  if (count == 4) {
    found = kt::read_expert_statistics(arguments[3]);
    input.statistics = &found;
  }
  kt::Json out = kt::Json::array();
  for (const auto& [layer, expert] : kt::expert_order(kt::expert_strategy_named(arguments[0]), input))
    out.push_back({layer, expert});
  print(out.dump());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string verb = argc >= 3 ? argv[1] : "";
  try {
    if (verb == "statistics") return statistics(argc - 2, argv + 2), 0;
    if (verb == "order" && (argc == 5 || argc == 6)) return order(argc - 2, argv + 2), 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "placement_probe: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr,
               "usage: placement_probe statistics FILE... | order STRATEGY SEED EXPERTS [STATISTICS]\n");
  return 2;
}
