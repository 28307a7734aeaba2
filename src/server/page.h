// The web page at "/": files of the program, the same for everybody. They hold no secret, so they need no API
// key; what the page asks for afterwards does.
#pragma once
#include <optional>
#include <string>

#include "http/message.h"

namespace kt::inline server {

// The reply to GET of a path of the page ("/", "/page.css", "/favicon.ico" ...); nullopt for any other path.
std::optional<HttpReply> page_reply(const std::string& path);

}  // namespace kt::inline server
