// What the text of a chat template tells about the values it can take.
#pragma once
#include <string_view>

namespace kt {

enum class ArgumentForm { kObject, kText };

struct TemplateNeeds {
  ArgumentForm arguments = ArgumentForm::kObject;  // of earlier calls
  bool null_content = false;  // it tells a message without content by none, not by an empty text
  bool thinking = false, reasoning = false;  // names that it has for a thought beside reasoning_content
  bool named_ids = false;  // of a call it writes the id, which must name the function: functions.NAME:0
};
TemplateNeeds template_needs(std::string_view chat_template);

}  // namespace kt
