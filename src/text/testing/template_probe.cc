// Renders what stands on standard input, for tests/chat_template_test.py. A case is a line of JSON,
// {"template": ..., "variables": {...}, "now": seconds}; so is the answer, {"output": ...} or {"error": ...},
// with "seconds" of CPU time.
#include <ctime>
#include <iostream>
#include <string>

#include "text/chat_template.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    kt::TemplateVariables answer;
    const std::clock_t start = std::clock();
    try {
      const auto input = kt::TemplateVariables::parse(line);
      kt::ChatTemplate chat(input.at("template").get<std::string>(), "probe");
      if (input.contains("now")) chat.set_clock([&] { return input.at("now").get<std::time_t>(); });
      answer["output"] = chat.render(input.at("variables"));
    } catch (const kt::Error& e) {
      answer["error"] = e.what();
    }
    answer["seconds"] = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
    std::cout << answer.dump(-1, ' ', false, kt::TemplateVariables::error_handler_t::replace) << std::endl;
  }
}
