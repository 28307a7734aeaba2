// A model's chat template: Jinja source in, the prompt of a conversation out. It reads as transformers reads
// it (trim_blocks, lstrip_blocks, loop controls, an immutable sandbox, tojson as json.dumps, raise_exception,
// strftime_now), runs no code but its own, and ends within a budget whatever the template says.
#pragma once

#include <ctime>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "text/jinja/meter.h"

namespace kt::inline texts {

// Variables keep the order of their keys, which templates print (tools, schemas); nlohmann::json, which
// sorts, converts.
using TemplateVariables = nlohmann::ordered_json;

class ChatTemplate {
 public:
  using Clock = std::function<std::time_t()>;

  // Parses. Error(kInput) "chat template NAME line N: ..." for a fault in the source.
  ChatTemplate(const std::string& source, std::string name);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // The text for `variables`, an object: messages, tools, add_generation_prompt, bos_token ... Any number of
  // threads may render at once. Error(kInput) of the same form for what the template refuses
  // (raise_exception), gets wrong, or spends.
  std::string render(const TemplateVariables& variables, TemplateBudget budget = {}) const;

  // What strftime_now asks, in place of the system's clock.
  void set_clock(Clock clock) { clock_ = std::move(clock); }

 private:
  struct Parsed;
  std::string name_;
  std::unique_ptr<const Parsed> parsed_;
  Clock clock_;
};

}  // namespace kt::inline texts
