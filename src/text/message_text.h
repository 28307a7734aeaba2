// The text of a chat message, as clients and datasets write it.
#pragma once
#include <string>
#include <string_view>

#include "text/json.h"

namespace kt::inline texts {

// "an array", "a string", for errors.
std::string_view json_kind_of(const OrderedJson& value);

// A string as it is; parts of text (also input_text, output_text and refusal) joined by line ends. Error(kInput)
// beginning with `place`, the content's name, for anything else.
std::string message_text(const OrderedJson& content, const std::string& place);

}  // namespace kt::inline texts
