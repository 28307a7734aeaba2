// What the text of a chat template tells about the values it can take.
#pragma once
#include <string_view>

namespace kt::inline server {

enum class ArgumentForm { kObject, kText };

// What a template wants the ids of calls to be.
enum class CallIds {
  kAny,
  kNamed,  // functions.NAME:0: of a call it writes nothing else
  kNine,   // nine letters or digits: it refuses others
};

struct TemplateNeeds {
  ArgumentForm arguments = ArgumentForm::kObject;  // of earlier calls
  bool null_content = false;  // it tells a message without content by none, not by an empty text
  bool thinking = false, reasoning = false;  // names that it has for a thought beside reasoning_content
  CallIds ids = CallIds::kAny;
};
TemplateNeeds template_needs(std::string_view chat_template);

}  // namespace kt::inline server
