// Any bytes as a chat template, rendered over a small conversation: text or an Error.
#include <cstdint>

#include "text/chat_template.h"

namespace {

const kt::TemplateVariables& variables() {
  static const auto value = kt::TemplateVariables::parse(R"({
    "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "h\u00e9 </think> x"},
                 {"role": "assistant", "content": null,
                  "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}],
    "tools": [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "number"}}}}}],
    "add_generation_prompt": true, "bos_token": "<s>", "n": 3, "f": 2.5, "xs": [3, 1, 2]})");
  return value;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const kt::TemplateBudget budget{
      .steps = 20'000, .work_bytes = 4u << 20, .output_bytes = 1u << 20, .value_bytes = 1u << 20};
  try {
    const kt::ChatTemplate chat(std::string(reinterpret_cast<const char*>(data), size), "fuzz");
    (void)chat.render(variables(), budget);
  } catch (const kt::Error&) {
  }
  return 0;
}
