// What the log says of a request. Nothing of what was asked or answered, no query and no key.
#pragma once
#include <ctime>
#include <string>

#include "http/server.h"

namespace kt::inline server {

// "2026-11-17T14:50:51Z 127.0.0.1:51234 POST /v1/chat/completions 200 tokens=12+34 ms=812.4": when the request ended,
// who asked, the status (499: the client left before the end), tokens of the prompt and of the answer where there are
// such, and how long it took from its first byte to the last of the reply. A field has no blanks in it.
std::string request_line(const HttpRecord& record, std::time_t now);

}  // namespace kt::inline server
