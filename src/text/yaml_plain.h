// What a YAML scalar without quotes means. Knows nothing of the text around it.
#pragma once
#include <string>
#include <string_view>

#include "text/json.h"

namespace kt::inline texts {

struct PlainScalar {
  Json value = {};           // null, boolean, number or string
  std::string refused = {};  // when not empty there is no value, for this reason: "found ..., expected ..."
};
PlainScalar read_plain(std::string_view characters);

}  // namespace kt::inline texts
