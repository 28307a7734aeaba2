// Renders what stands on standard input, for tests/chat_template_test.py. One line of JSON a case:
// {"template": ..., "variables": {...}, "now": seconds}; one line of JSON an answer: {"output": ...} or
// {"error": ...}.
#include <chrono>
#include <iostream>
#include <string>

#include "engine/chat_template.h"

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    kt::TemplateVariables answer;
    const auto start = std::chrono::steady_clock::now();
    try {
      const auto input = kt::TemplateVariables::parse(line);
      kt::ChatTemplate chat(input.at("template").get<std::string>(), "probe");
      if (input.contains("now")) chat.set_clock([&] { return input.at("now").get<std::time_t>(); });
      answer["output"] = chat.render(input.at("variables"));
    } catch (const kt::Error& e) {
      answer["error"] = e.what();
    }
    answer["seconds"] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::cout << answer.dump(-1, ' ', false, kt::TemplateVariables::error_handler_t::replace) << std::endl;
  }
}
